"""Writes the trained parts as an ordinary diffusers folder in half precision."""

import copy
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from transformers import CLIPTokenizer

from training.diffusion import Denoiser, build_scheduler


def export(folder: Path, vae: AutoencoderKL, denoiser: Denoiser, tokenizer: CLIPTokenizer) -> None:
    pipeline = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=denoiser.text_encoder,
        text_encoder_2=denoiser.text_encoder_2,
        tokenizer=tokenizer,
        tokenizer_2=copy.deepcopy(tokenizer),
        unet=denoiser.unet,
        scheduler=build_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    pipeline.to(torch.float16).save_pretrained(folder, safe_serialization=True)
