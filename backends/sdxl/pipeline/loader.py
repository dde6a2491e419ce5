"""From `model.json` to a loaded model: any diffusers SDXL folder or hub id."""

import logging
import time
from typing import Any

import torch

from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError
from pipeline.parts import Parts
from pipeline.request import Sizes

log = logging.getLogger(__name__)


def load_parts(config: PipelineConfig, device: torch.device | None = None) -> Parts:
    """`device` is where the server wants the model; `config.device` wins over it. Raises ConfigError."""
    started = time.perf_counter()
    device = _device(config, device)
    dtype = _dtype("dtype", config.dtype, torch.float16 if device.type == "cuda" else torch.float32)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    loaded = _pipeline(config, dtype)
    # Raised by SDXL's own VAE: its decoder overflows in half precision and would paint black pictures.
    fragile = dtype == torch.float16 and loaded.vae.config.force_upcast
    vae_dtype = _dtype("vae_dtype", config.vae_dtype, torch.float32 if fragile else dtype)
    order = torch.channels_last if config.channels_last else torch.contiguous_format
    unet = loaded.unet.to(device, memory_format=order).eval().requires_grad_(False)
    vae = loaded.vae if loaded.vae.dtype == vae_dtype else loaded.vae.to(vae_dtype)
    vae = vae.to(device, memory_format=order).eval().requires_grad_(False)
    text = [(loaded.tokenizer, loaded.text_encoder), (loaded.tokenizer_2, loaded.text_encoder_2)]
    encoders = tuple((tok, enc.to(device).eval().requires_grad_(False)) for tok, enc in text if enc is not None)
    _check(config.model, unet, encoders)
    parts = Parts(
        encoders=encoders,
        unet=torch.compile(unet) if config.compile else unet,
        vae=vae,
        scheduler_config=loaded.scheduler.config,
        zero_negative=bool(loaded.config.force_zeros_for_empty_prompt),
        scale=loaded.vae_scale_factor,
        sizes=_sizes(config, unet, loaded.vae_scale_factor),
        device=device,
        dtype=dtype,
        channels_last=config.channels_last,
    )
    log.info(
        "loaded %s on %s, UNet %s, VAE %s, mode %s, in %.1f s",
        config.model, device, dtype, vae_dtype, config.mode, time.perf_counter() - started,
    )  # fmt: skip
    return parts


def _pipeline(config: PipelineConfig, dtype: torch.dtype) -> Any:
    import transformers
    from diffusers import AutoencoderKL, StableDiffusionXLPipeline
    from diffusers.utils.logging import disable_progress_bar

    disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    # The watermarker would switch itself on when its package happens to be installed.
    options: dict[str, Any] = {"dtype": dtype, "add_watermarker": False, "use_safetensors": True}
    if config.variant:
        options["variant"] = config.variant
    try:
        if config.vae:
            options["vae"] = AutoencoderKL.from_pretrained(config.vae, dtype=dtype)
        return StableDiffusionXLPipeline.from_pretrained(config.model, **options)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(f"model {config.model!r} can't be loaded as an SDXL pipeline: {error}") from error


def _check(source: str, unet: Any, encoders: tuple[tuple[Any, Any], ...]) -> None:
    if unet.config.addition_embed_type != "text_time":
        raise ConfigError(f"model {source!r} is not SDXL-style: its UNet takes no pooled text and sizes (text_time)")
    if unet.config.time_cond_proj_dim is not None:
        raise ConfigError(
            f"model {source!r} takes its guidance as an embedding, which this backend does not do; use LCM-LoRA weights"
        )
    text_width = unet.add_embedding.linear_1.in_features - 6 * unet.config.addition_time_embed_dim
    pooled = encoders[-1][1].config.projection_dim
    if text_width != pooled:
        raise ConfigError(
            f"model {source!r} is no base model: its UNet takes {text_width} pooled text features and 6 sizes, "
            f"and the text encoder gives {pooled}"
        )


def _sizes(config: PipelineConfig, unet: Any, scale: int) -> Sizes:
    native = int(unet.config.sample_size) * scale
    # A side must halve evenly on its way down the UNet, or up and down would not fit together.
    multiple = scale * 2 ** (len(unet.config.block_out_channels) - 1)
    largest = config.max_size or 2 * native
    for name in ("width", "height"):
        side = getattr(config, name)
        if side is not None and (side % multiple or side > largest):
            raise ConfigError(f"{name} is {side}; allowed: null or a multiple of {multiple} up to {largest}")
    return Sizes(native, multiple, largest)


def _device(config: PipelineConfig, wanted: torch.device | None) -> torch.device:
    if config.device == "auto":
        device = wanted or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        device = torch.device(config.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {str(device)!r}; allowed: cpu or one of {torch.cuda.device_count()} CUDA devices")
    return device


def _dtype(name: str, value: str, default: torch.dtype) -> torch.dtype:
    return (
        default
        if value == "auto"
        else {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[value]
    )
