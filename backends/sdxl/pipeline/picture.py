"""The last stretch: latents to pixels, pixels to a file's bytes."""

import base64
import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pipeline.errors import PipelineFailure
from pipeline.parts import Parts

QUALITY = 92  # of JPEG and WebP


def decode(parts: Parts, latent: Tensor) -> NDArray[np.uint8]:
    """[height, width, 3] from one latent [1, C, h, w]. Raises PipelineFailure where the model gave no picture.

    One at a time: batches of VAE decodes cost memory and save no time, and so no neighbour can matter.
    """
    config = parts.vae.config
    latent = latent / config.scaling_factor
    if getattr(config, "latents_mean", None) is not None:
        mean, std = (
            torch.tensor(v, device=latent.device).view(1, -1, 1, 1) for v in (config.latents_mean, config.latents_std)
        )
        latent = latent * std + mean
    image = parts.vae.decode(parts.laid_out(latent.to(parts.vae.dtype)), return_dict=False)[0].float()
    if not torch.isfinite(image).all():
        raise PipelineFailure(
            "the model produced values that are no numbers: with dtype float16 set vae_dtype to float32, "
            "or vae to one that is safe in half precision"
        )
    pixels = ((image[0].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return pixels.cpu().numpy()


def encode(pixels: NDArray[np.uint8], format_: str, encoding: str) -> bytes:
    buffer = io.BytesIO()
    options = {} if format_ == "png" else {"quality": QUALITY}
    Image.fromarray(pixels).save(buffer, format_.upper(), **options)
    return base64.b64encode(buffer.getvalue()) if encoding == "base64" else buffer.getvalue()
