"""Writes the trained parts as an ordinary diffusers folder in half precision."""

import copy
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTokenizer

from training.diffusion import build_scheduler
from training.text import TextEncoders


def export(
    folder: Path, vae: AutoencoderKL, encoders: TextEncoders, unet: UNet2DConditionModel, tokenizer: CLIPTokenizer
) -> None:
    pipeline = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=encoders.first,
        text_encoder_2=encoders.second,
        tokenizer=tokenizer,
        tokenizer_2=copy.deepcopy(tokenizer),
        unet=unet,
        scheduler=build_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    pipeline.to(torch.float16).save_pretrained(folder, safe_serialization=True)
