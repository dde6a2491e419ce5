"""One request for pictures: what its sender may ask, read from strings and numbers, checked once, then frozen."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pipeline.config import PipelineConfig, nearest
from pipeline.errors import InvalidRequest
from pipeline.schedulers import SCHEDULERS

FORMATS = ("png", "jpeg", "webp")
ENCODINGS = ("binary", "base64")
MAX_PROMPT = 10_000  # characters; the text encoders read the first 77 tokens
MAX_SEED = 2**63 - 1
DRAWN_SEEDS = 2**32  # drawn ones stay below this, so that every JSON reader can hand them back exactly

# Set by Triton itself or by its clients, not for us.
_FOREIGN = ("id", "priority", "headers", "sequence_id", "sequence_start", "sequence_end", "binary_data_output")
_FOREIGN_PREFIXES = ("triton_", "sequence_", "header_")

Value = str | int | float | bool
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """What the loaded model can draw, in pixels."""

    native: int
    multiple: int
    largest: int


@dataclass(frozen=True)
class ImageRequest:
    """One picture. `seed` is the one used, never -1. Errors name the field as the sender wrote it."""

    prompt: str
    negative_prompt: str
    seed: int
    steps: int
    guidance_scale: float
    width: int
    height: int
    scheduler: str
    format: str
    encoding: str
    generated_image: bool  # raw pixels in the answer, although the request lists no outputs
    timeout_us: int  # 0: none; counts from the moment the batch starts

    @property
    def guided(self) -> bool:
        """Whether each step needs the UNet twice, with and without the prompt (classifier-free guidance)."""
        return self.guidance_scale > 1


def parse(
    prompts: list[str],
    negatives: list[str] | None,
    parameters: Mapping[str, Value],
    config: PipelineConfig,
    sizes: Sizes,
) -> list[ImageRequest]:
    """One ImageRequest a prompt; their seeds count up from the request's. Raises InvalidRequest.

    `negatives`, one a prompt, are given by those who send them as an input instead of a parameter.
    """
    if negatives is not None and "negative_prompt" in parameters:
        raise InvalidRequest("negative_prompt", parameters["negative_prompt"], "an input or a parameter, not both")
    for name in parameters:
        if name not in _PARAMETERS and name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES):
            raise InvalidRequest(
                f"parameter {name!r}{nearest(name, _PARAMETERS)}", parameters[name], ", ".join(_PARAMETERS)
            )
    read = _Reader(parameters)
    scheduler = read.choice("scheduler", tuple(SCHEDULERS), config.scheduler)
    kind = SCHEDULERS[scheduler]
    own = scheduler == config.scheduler  # the defaults of model.json are meant for its scheduler
    steps = read.integer(
        "steps", 1, min(config.max_steps, kind.most_steps), config.steps if own and config.steps else kind.steps
    )
    guidance = config.guidance_scale if own and config.guidance_scale is not None else kind.guidance_scale
    seed = read.integer("seed", -1, MAX_SEED, -1)
    if seed == -1:
        seed = secrets.randbelow(DRAWN_SEEDS)
    if negatives is None:
        negatives = [read.text("negative_prompt", "")] * len(prompts)
    for name, texts in (("prompt", prompts), ("negative_prompt", negatives)):
        for text in texts:
            if len(text) > MAX_PROMPT:
                raise InvalidRequest(name, text, f"at most {MAX_PROMPT} characters, and it has {len(text)}")
    guidance_scale = read.number("guidance_scale", 0, 50, guidance)
    width, height = (
        read.side(name, default or sizes.native, sizes)
        for name, default in (("width", config.width), ("height", config.height))
    )
    format_ = read.choice("format", FORMATS, "png")
    encoding = read.choice("encoding", ENCODINGS, "binary")
    raw = read.flag("generated_image", False)
    timeout = read.integer("timeout", 0, MAX_SEED, 0)
    return [
        ImageRequest(
            prompt, negative, (seed + i) % (MAX_SEED + 1), steps, guidance_scale, width, height,
            scheduler, format_, encoding, raw, timeout,
        )
        for i, (prompt, negative) in enumerate(zip(prompts, negatives, strict=True))
    ]  # fmt: skip


_PARAMETERS = (
    "negative_prompt", "seed", "steps", "guidance_scale", "width", "height", "scheduler", "format", "encoding",
    "generated_image", "timeout",
)  # fmt: skip


class _Reader:
    """Takes typed values out of parameters. Numbers may come as strings: not every protocol carries fractions."""

    def __init__(self, parameters: Mapping[str, Value]) -> None:
        self._parameters = parameters

    def integer(self, name: str, least: int, most: int, default: int) -> int:
        allowed = f"an integer from {least} to {most}"
        return self._read(name, default, allowed, _to_int, lambda value: least <= value <= most)

    def number(self, name: str, least: float, most: float, default: float) -> float:
        allowed = f"a number from {least:g} to {most:g}"
        return self._read(name, default, allowed, _to_float, lambda value: least <= value <= most)

    def side(self, name: str, default: int, sizes: Sizes) -> int:
        allowed = f"a multiple of {sizes.multiple} from {sizes.multiple} to {sizes.largest}"
        fits: Callable[[int], bool] = lambda v: sizes.multiple <= v <= sizes.largest and v % sizes.multiple == 0  # noqa: E731
        return self._read(name, default, allowed, _to_int, fits)

    def choice(self, name: str, known: tuple[str, ...], default: str) -> str:
        return self._read(name, default, f"one of {', '.join(known)}", _to_str, lambda value: value in known)

    def text(self, name: str, default: str) -> str:
        return self._read(name, default, "a string", _to_str, lambda value: True)

    def flag(self, name: str, default: bool) -> bool:
        return self._read(name, default, "true or false", _to_bool, lambda value: True)

    def _read(self, name: str, default: T, allowed: str, convert: Callable[[Value], T], fits: Callable[[T], bool]) -> T:
        if name not in self._parameters:
            return default
        given = self._parameters[name]
        try:
            value = convert(given)
        except (ValueError, OverflowError):
            raise InvalidRequest(name, given, allowed) from None
        if not fits(value):
            raise InvalidRequest(name, given, allowed)
        return value


def _to_int(value: Value) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _to_float(value: Value) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _to_str(value: Value) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _to_bool(value: Value) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ValueError
