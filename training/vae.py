"""The autoencoder between 64x64 pictures and 4x16x16 latents."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from training import stage
from training.shapes import SIZE, crowd, draw, sample_scene

BATCH = 16
# Small: it keeps the latents bounded. At 1e-3 one of the four channels collapsed to noise in a pilot.
KL_WEIGHT = 1e-4


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 32, 48),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=SIZE,
        scaling_factor=1.0,
        force_upcast=True,
    ).to(memory_format=torch.channels_last)


def pictures(rng: np.random.Generator, count: int, crowds: int = 0) -> Tensor:
    """[count, 3, 64, 64] in -1..1; so many of them crowds."""
    scenes = [crowd(rng) for _ in range(crowds)] + [sample_scene(rng) for _ in range(count - crowds)]
    return to_tensor(np.stack([np.asarray(draw(scene)) for scene in scenes]))


def to_tensor(pixels: np.ndarray) -> Tensor:
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous(
        memory_format=torch.channels_last
    )


def difference(output: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(output, target) + F.mse_loss(output, target)


def train_vae(vae: AutoencoderKL, folder: Path, steps: int, seed: int) -> None:
    def loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + step)
        images = pictures(np.random.default_rng([seed, 2, step]), BATCH, BATCH // 2)
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample(generator)).sample
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return difference(decoded, images) + KL_WEIGHT * kl

    stage.train("vae", vae, loss, folder, steps=steps, peak=2e-3, decay=0.995)
    normalise(vae, pictures(np.random.default_rng([seed, 3]), 256))


def tune_decoder(vae: AutoencoderKL, folder: Path, steps: int, seed: int) -> None:
    """The decoder again, on latents with noise of 0 to 0.2: the UNet's latents are never as clean as the encoder's."""
    vae.requires_grad_(False)
    for part in (vae.decoder, vae.post_quant_conv):
        part.requires_grad_(True)

    def loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + step)
        images = pictures(np.random.default_rng([seed, 4, step]), BATCH, BATCH // 2)
        with torch.no_grad():
            latents = vae.encode(images).latent_dist.mode()
        strength = 0.2 * torch.rand(len(images), 1, 1, 1, generator=generator)
        noisy = latents + strength * torch.randn(latents.shape, generator=generator)
        return difference(vae.decode(noisy).sample, images)

    stage.train("decoder", vae, loss, folder, steps=steps, peak=1.5e-3, decay=0.995)
    vae.requires_grad_(True)


@torch.no_grad()
def normalise(vae: AutoencoderKL, images: Tensor) -> None:
    """Folds each channel's mean and spread into the two 1x1 convolutions: latents get mean 0 and variance 1."""
    latents = vae.encode(images).latent_dist.mode()
    mean, spread = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    into, out, channels = vae.quant_conv, vae.post_quant_conv, len(mean)
    into.weight[:channels] /= spread[:, None, None, None]
    into.bias[:channels] = (into.bias[:channels] - mean) / spread
    into.bias[channels:] -= 2 * spread.log()
    out.bias += out.weight[:, :, 0, 0] @ mean
    out.weight *= spread[None, :, None, None]


@torch.inference_mode()
def psnr(vae: AutoencoderKL, seed: int, noise: float = 0.0) -> float:
    """dB over 64 new scenes (peak 2.0, the range of the pixels)."""
    images = pictures(np.random.default_rng([seed, 5]), 64)
    latents = vae.encode(images).latent_dist.mode()
    latents = latents + noise * torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
    error = F.mse_loss(vae.decode(latents).sample.clamp(-1, 1), images)
    return float(10 * torch.log10(4.0 / error))


@torch.inference_mode()
def encode(vae: AutoencoderKL, pixels: np.ndarray, progress: Callable[[range], "range"] = lambda r: r) -> Tensor:
    """[N, 4, 16, 16], from uint8 [N, 64, 64, 3]."""
    parts = [
        vae.encode(to_tensor(pixels[i : i + BATCH])).latent_dist.mode() for i in progress(range(0, len(pixels), BATCH))
    ]
    return torch.cat(parts)
