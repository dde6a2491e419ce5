"""The loaded model: diffusers' and transformers' own modules, and what the loop needs to know of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.request import Sizes


@dataclass(frozen=True)
class Parts:
    """`encoders` are (tokenizer, text encoder) in SDXL's order; the last one gives the pooled text too."""

    encoders: tuple[tuple[Any, Any], ...]
    unet: Any
    vae: Any
    scheduler_config: Mapping[str, Any]  # the noise levels that the model was trained on
    zero_negative: bool  # whether no negative prompt means zeros, not the encoding of ""
    scale: int  # pixels a side that one latent pixel stands for
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    channels_last: bool = False

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    def laid_out(self, images: Tensor) -> Tensor:
        """[B, C, H, W] in the memory order of the weights."""
        return images.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
