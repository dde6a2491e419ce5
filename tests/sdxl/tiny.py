"""Random SDXL-style models of the real classes, small enough to be made in a test. They draw noise, each its own."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

HIDDEN, LENGTH = 32, 16


def write(folder: Path, sample_size: int = 8, seed: int = 0, time_ids: int = 6, **scheduler: object) -> Path:
    """A diffusers folder of a model for pictures of 2 * `sample_size` pixels a side, with these scheduler settings."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(c) for c in range(33, 127)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=LENGTH)
    text = CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=HIDDEN, intermediate_size=64, projection_dim=HIDDEN, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=sample_size, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), cross_attention_dim=2 * HIDDEN, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * time_ids + HIDDEN,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, sample_size=2 * sample_size, scaling_factor=0.5,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler.from_config(
            {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1, **scheduler}
        ),
        add_watermarker=False,
    ).save_pretrained(folder)
    return folder
