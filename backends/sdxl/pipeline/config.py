"""The pipeline's arguments: `model.json`, checked once, then frozen."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.schedulers import SCHEDULERS

DTYPES = ("auto", "float32", "bfloat16", "float16")
MODES = ("fast", "exact")


@dataclass(frozen=True)
class PipelineConfig:
    """`None` means: chosen at load time from the model and the device."""

    model: str  # diffusers folder or hub id; relative paths start at the model repository
    variant: str | None = None  # of the weights' files, as "fp16" in unet/diffusion_pytorch_model.fp16.safetensors
    vae: str | None = None  # folder or hub id of another VAE, such as one that is safe in half precision
    dtype: str = "auto"  # auto: float32 on a CPU, float16 on CUDA
    vae_dtype: str = "auto"  # auto: float32 if the VAE says that half precision overflows in it, else dtype
    device: str = "auto"  # auto: what Triton's instance_group says, cpu, cuda or cuda:N
    mode: str = "fast"  # exact: the same bytes whatever else is in the batch, at the price of padding
    max_batch: int = 16  # pictures of one UNet call
    buckets: tuple[int, ...] = ()  # sizes that a batch is padded to; (): none in fast mode, max_batch in exact mode
    channels_last: bool = True
    compile: bool = False  # torch.compile of the UNet; give buckets with it: every batch size is compiled once
    num_threads: int | None = None  # CPU threads; None: torch's default
    scheduler: str = "euler"  # of requests that name none; so for the next four
    steps: int | None = None  # None: what the scheduler is made for
    guidance_scale: float | None = None
    width: int | None = None  # pixels; None: what the model was trained for
    height: int | None = None
    max_steps: int = 100
    max_size: int | None = None  # pixels of a side; None: twice what the model was trained for

    def __post_init__(self) -> None:
        self._require("model", bool(self.model), "a diffusers folder or a hub id")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._require("vae_dtype", self.vae_dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        device, _, index = self.device.partition(":")
        known = device in ("auto", "cpu", "cuda") and (not index or (device == "cuda" and index.isdigit()))
        self._require("device", known and not self.device.endswith(":"), "auto, cpu, cuda or cuda:N")
        self._require("mode", self.mode in MODES, f"one of {', '.join(MODES)}")
        self._require("scheduler", self.scheduler in SCHEDULERS, f"one of {', '.join(SCHEDULERS)}")
        self._require("max_batch", self.max_batch >= 1, "an integer of at least 1")
        self._require("max_steps", 1 <= self.max_steps <= 1000, "an integer from 1 to 1000")
        for name in ("num_threads", "width", "height", "max_size"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "null or an integer of at least 1")
        self._require(
            "steps",
            self.steps is None or 1 <= self.steps <= self.max_steps,
            f"null or an integer from 1 to {self.max_steps}",
        )
        scale = self.guidance_scale
        self._require("guidance_scale", scale is None or 0 <= scale <= 50, "null or a number from 0 to 50")
        ordered = list(self.buckets) == sorted(set(self.buckets)) and all(b >= 1 for b in self.buckets)
        fits = not self.buckets or (ordered and self.buckets[-1] == self.max_batch)
        self._require("buckets", fits, f"an empty list, or rising sizes that end with max_batch ({self.max_batch})")
        one_shape = self.mode == "fast" or len(self.buckets) <= 1
        self._require("buckets", one_shape, "an empty list or one size in exact mode")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")

    def padded(self, count: int) -> int:
        """The batch size that `count` pictures are computed in."""
        if self.mode == "exact":
            return self.max_batch
        return next((bucket for bucket in self.buckets if bucket >= count), count)

    @classmethod
    def from_file(cls, path: Path) -> "PipelineConfig":
        """Read `model.json`. Raises ConfigError that names the file and what is wrong in it."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f'{path} is missing; it names the model: {{"model": "..."}}') from None
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # what json and UTF-8 raise are ValueErrors
            raise ConfigError(f"{path} is not JSON: {error}") from None
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: object) -> "PipelineConfig":
        if not isinstance(values, dict):
            raise ConfigError(f"expected a JSON object, got {type(values).__name__}")
        kinds = typing.get_type_hints(cls)
        checked: dict[str, typing.Any] = {}
        for name, value in values.items():
            if name not in kinds:
                raise ConfigError(f"unknown key {name!r}{nearest(name, kinds)}; known: {', '.join(kinds)}")
            checked[name] = _checked(name, value, kinds[name])
        if "model" not in checked:
            raise ConfigError("model is missing; allowed: a diffusers folder or a hub id")
        return cls(**checked)

    def resolved(self, repository: Path) -> "PipelineConfig":
        """Relative paths made absolute. What names nothing on disk and looks like `org/name` stays a hub id."""
        return dataclasses.replace(
            self,
            model=_resolved("model", self.model, repository),
            vae=self.vae and _resolved("vae", self.vae, repository),
        )


def _checked(name: str, value: object, kind: typing.Any) -> object:
    if name == "buckets":
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise ConfigError(f"{name} is {value!r}; allowed: a list of integers")
        return tuple(value)
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    # bool is a subclass of int, and an int is as good as a float
    if type(value) in allowed or (float in allowed and type(value) is int):
        return value
    wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
    raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); allowed: {wanted}")


def _resolved(key: str, source: str, repository: Path) -> str:
    local = (repository / Path(source).expanduser()).resolve()
    if local.is_dir():
        return str(local)
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ConfigError(f"{key} is {source!r}, but {local} is no folder")
    return source


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
