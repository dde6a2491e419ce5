"""The UNet, trained to remove noise from the latents of captioned scenes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor
from tqdm import tqdm

from training import stage
from training.shapes import SIZE, Scene, draw
from training.text import HIDDEN
from training.vae import encode

BATCH = 24
DROPPED = 0.1  # share of captions replaced by zeros, for classifier-free guidance
SNR_CAP = 5.0


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(64, 128), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4),
        cross_attention_dim=2 * HIDDEN, transformer_layers_per_block=1, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=6 * 32 + HIDDEN,
        norm_num_groups=16,
    ).to(memory_format=torch.channels_last)  # fmt: skip


def build_scheduler() -> EulerDiscreteScheduler:
    # Zero terminal SNR and trailing steps: sampling then starts from noise that says nothing about the picture's mean,
    # which is the background's colour.
    return EulerDiscreteScheduler(
        num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingSet:
    latents: Tensor  # [N, 4, 16, 16]
    context: Tensor  # [N, 24, 128]
    pooled: Tensor  # [N, 64]


def encode_scenes(vae: AutoencoderKL, scenes: list[Scene], folder: Path) -> Tensor:
    """Latents [N, 4, 16, 16]; kept in `folder` for a run that goes on."""
    file = folder / "latents.pt"
    if not file.exists():
        pixels = np.stack([np.asarray(draw(scene)) for scene in tqdm(scenes, "drawing", mininterval=5)])
        latents = encode(vae, pixels, lambda r: tqdm(r, "encoding", mininterval=5))
        torch.save(latents, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
    return torch.load(file, weights_only=True)


def train_unet(unet: UNet2DConditionModel, data: TrainingSet, folder: Path, steps: int, seed: int) -> None:
    signal = build_scheduler().alphas_cumprod  # [1000], share of the picture's variance at each timestep
    sizes = torch.tensor([SIZE, SIZE, 0, 0, SIZE, SIZE], dtype=torch.float32).expand(BATCH, 6)

    def loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 1_000_000 + step)
        rows = torch.randint(len(data.latents), (BATCH,), generator=generator)
        # One timestep from each of as many equal slices: less noise in the gradient than free draws.
        timesteps = ((torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) * 1000 / BATCH).long()
        clean = data.latents[rows]
        noise = torch.randn(clean.shape, generator=generator)
        alpha = signal[timesteps][:, None, None, None]
        noisy = (alpha.sqrt() * clean + (1 - alpha).sqrt() * noise).contiguous(memory_format=torch.channels_last)
        velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
        keep = (torch.rand(BATCH, generator=generator) >= DROPPED).float()
        added = {"text_embeds": data.pooled[rows] * keep[:, None], "time_ids": sizes}
        context = data.context[rows] * keep[:, None, None]
        predicted = unet(noisy, timesteps, context, added_cond_kwargs=added).sample
        error = (predicted - velocity).square().mean((1, 2, 3))
        snr = signal[timesteps] / (1 - signal[timesteps])
        # Min-SNR weighting (Hang et al. 2023) for velocity, shifted by one so that the noisiest step, where the layout
        # is decided, keeps weight 1.
        return (error * (snr + 1).clamp(max=SNR_CAP) / (snr + 1)).mean()

    stage.train("unet", unet, loss, folder, steps=steps, peak=1.2e-3, warm_up=150)
