"""The engine's arguments: `model.json`, checked once, then frozen."""

import contextlib
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

# What json.loads raises: ValueError for bad syntax and integers too long, RecursionError for lists in lists in lists.
NOT_JSON = (ValueError, RecursionError)
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "auto")
DECODERS = ("auto", "fused", "transformers")


@dataclass(frozen=True)
class EngineConfig:
    """`None` means: chosen at load time from the model and the device."""

    model: str  # folder, .gguf file or hub id; relative paths start at the model repository
    dtype: str = "auto"  # auto: float32 on a CPU, bfloat16 on CUDA
    quantization: str = "none"  # int8: weights and activations in 8 bits, on x86 CPUs; auto: int8 where it is fast
    decoder: str = "auto"  # auto: fused where it knows the architecture, else transformers' own
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    max_num_seqs: int = 64  # seats: sequences that run at the same time
    max_num_batched_tokens: int = 512  # tokens of one step, decodes and prefill chunks together
    max_model_len: int | None = None  # prompt + output, tokens; None: what the model was trained for
    max_queue_size: int = 1024  # requests that may wait for a seat; one more is refused
    max_queued_tokens: int | None = None  # prompt tokens that may wait for a seat; None: no limit
    block_size: int | None = None  # tokens per KV block; None: 16 on a CPU, 256 on CUDA (its paged kernel's page)
    num_kv_blocks: int | None = None  # None: as many as memory_fraction pays for
    memory_fraction: float | None = None  # share of free memory for KV; None: 0.1 of a CPU's, 0.9 of a GPU's
    enable_prefix_caching: bool = True
    num_threads: int | None = None  # CPU threads of one step; None: torch's default

    def __post_init__(self) -> None:
        self._require("model", bool(self.model), "a folder, a .gguf file or a hub id")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        allowed = f"one of {', '.join(QUANTIZATIONS)}"
        self._require("quantization", self.quantization in QUANTIZATIONS, allowed)
        self._require("decoder", self.decoder in DECODERS, f"one of {', '.join(DECODERS)}")
        device, _, index = self.device.partition(":")
        known = device in ("auto", "cpu", "cuda") and (not index or (device == "cuda" and index.isdigit()))
        self._require("device", known and not self.device.endswith(":"), "auto, cpu, cuda or cuda:N")
        for name in ("max_num_seqs", "max_queue_size"):
            self._require(name, getattr(self, name) >= 1, "an integer of at least 1")
        for name in ("max_model_len", "max_queued_tokens", "num_kv_blocks", "block_size", "num_threads"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "null or an integer of at least 1")
        # With fewer tokens than seats a decoding sequence could miss a step.
        allowed = f"an integer of at least max_num_seqs ({self.max_num_seqs})"
        self._require("max_num_batched_tokens", self.max_num_batched_tokens >= self.max_num_seqs, allowed)
        fraction = self.memory_fraction
        self._require("memory_fraction", fraction is None or 0 < fraction <= 1, "null or a number in (0, 1]")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")

    @classmethod
    def from_file(cls, path: Path) -> "EngineConfig":
        """Read `model.json`. Raises ConfigError that names the file and what is wrong in it."""
        values = read_json(path)
        with naming(path):
            return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: object) -> "EngineConfig":
        if not isinstance(values, dict):
            raise ConfigError(f"expected a JSON object, got {type(values).__name__}")
        kinds = typing.get_type_hints(cls)
        for name, value in values.items():
            if name not in kinds:
                raise ConfigError(f"unknown key {name!r}{nearest(name, kinds)}; known: {', '.join(kinds)}")
            allowed = typing.get_args(kinds[name]) if isinstance(kinds[name], types.UnionType) else (kinds[name],)
            # bool is a subclass of int, and an int is as good as a float
            fits = type(value) in allowed or (float in allowed and type(value) is int)
            if not fits:
                wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
                raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); allowed: {wanted}")
        if "model" not in values:
            raise ConfigError("model is missing; allowed: a folder, a .gguf file or a hub id")
        return cls(**values)

    def resolved(self, repository: Path) -> "EngineConfig":
        """A relative path made absolute. What names nothing on disk and looks like `org/name` stays a hub id."""
        local = (repository / self.model).resolve()
        if local.exists():
            return dataclasses.replace(self, model=str(local))
        is_path = self.model.startswith((".", "/", "~")) or self.model.endswith(".gguf") or self.model.count("/") != 1
        if is_path:
            raise ConfigError(f"model is {self.model!r}, but {local} does not exist")
        return self


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A ConfigError inside also names the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_json(path: Path) -> object:
    """Raises ConfigError that names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f'{path} is missing; it names the model: {{"model": "..."}}') from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    try:
        return json.loads(text)
    except NOT_JSON as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """` (did you mean 'x'?)` or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
