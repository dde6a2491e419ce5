"""The two text encoders and the UNet, trained together to remove noise from the latents of captioned scenes."""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor, nn
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from training import stage
from training.shapes import SIZE, caption, draw, sample_scene
from training.tokenizer import LENGTH
from training.vae import encode

BATCH = 24
HIDDEN = 64
DROPPED = 0.1  # share of captions replaced by zeros, for classifier-free guidance
SNR_CAP = 5.0


class Denoiser(nn.Module):
    """UNet and text encoders under one optimiser; SDXL takes both encoders' last layer but one, one pooled text."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        config = CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, projection_dim=HIDDEN,
            num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=LENGTH, hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        self.text_encoder = CLIPTextModel(config)
        self.text_encoder_2 = CLIPTextModelWithProjection(config)
        self.unet = UNet2DConditionModel(
            sample_size=16, in_channels=4, out_channels=4, block_out_channels=(48, 96), layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4),
            cross_attention_dim=2 * HIDDEN, transformer_layers_per_block=1, use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=32,
            projection_class_embeddings_input_dim=6 * 32 + HIDDEN,
            norm_num_groups=16,
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def forward(self, noisy: Tensor, timesteps: Tensor, tokens: Tensor, keep: Tensor) -> Tensor:
        """`keep` [B] is 0.0 where the caption is dropped. Returns the velocity, shaped like `noisy`."""
        first = self.text_encoder(tokens, output_hidden_states=True)
        second = self.text_encoder_2(tokens, output_hidden_states=True)
        context = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1) * keep[:, None, None]
        sizes = torch.tensor([SIZE, SIZE, 0, 0, SIZE, SIZE], dtype=torch.float32).expand(len(noisy), 6)
        added = {"text_embeds": second.text_embeds * keep[:, None], "time_ids": sizes}
        return self.unet(noisy, timesteps, context, added_cond_kwargs=added).sample


def build_scheduler() -> EulerDiscreteScheduler:
    # Zero terminal SNR and trailing steps: sampling then starts from noise that says nothing about the picture's mean,
    # which is the background's colour.
    return EulerDiscreteScheduler(
        num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
    )  # fmt: skip


def training_set(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, folder: Path, scenes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Latents [N, 4, 16, 16] and tokens [N, 24]; kept in `folder` for a run that goes on."""
    file = folder / "training_set.pt"
    if file.exists():
        latents, tokens = torch.load(file, weights_only=True)
        return latents, tokens
    rng = np.random.default_rng([seed, 6])
    drawn = [sample_scene(rng) for _ in range(scenes)]
    pixels = np.stack([np.asarray(draw(scene)) for scene in tqdm(drawn, "drawing", mininterval=5)])
    latents = encode(vae, pixels, lambda r: tqdm(r, "encoding", mininterval=5))
    captions = [caption(scene) for scene in drawn]
    tokens = tokenizer(
        captions, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt"
    ).input_ids
    torch.save((latents, tokens), file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)
    return latents, tokens


def train_denoiser(model: Denoiser, latents: Tensor, tokens: Tensor, folder: Path, steps: int, seed: int) -> None:
    signal = build_scheduler().alphas_cumprod  # [1000], share of the picture's variance at each timestep

    def loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 1_000_000 + step)
        rows = torch.randint(len(latents), (BATCH,), generator=generator)
        # One timestep from each of as many equal slices: less noise in the gradient than free draws.
        timesteps = ((torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) * 1000 / BATCH).long()
        clean = latents[rows]
        noise = torch.randn(clean.shape, generator=generator)
        alpha = signal[timesteps][:, None, None, None]
        noisy = (alpha.sqrt() * clean + (1 - alpha).sqrt() * noise).contiguous(memory_format=torch.channels_last)
        velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
        keep = (torch.rand(BATCH, generator=generator) >= DROPPED).float()
        error = (model(noisy, timesteps, tokens[rows], keep) - velocity).square().mean((1, 2, 3))
        snr = signal[timesteps] / (1 - signal[timesteps])
        # Min-SNR weighting (Hang et al. 2023) for velocity, shifted by one so that the noisiest step, where the layout
        # is decided, keeps weight 1.
        return (error * (snr + 1).clamp(max=SNR_CAP) / (snr + 1)).mean()

    stage.train("denoiser", model, loss, folder, steps=steps, peak=1e-3, warm_up=150)
