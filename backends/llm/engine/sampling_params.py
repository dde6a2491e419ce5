"""How one request wants its tokens chosen: vLLM's names, ranges and meanings, checked once, then frozen."""

import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import NOT_JSON, nearest
from engine.errors import InvalidRequest, shown

GREEDY_BELOW = 1e-5  # temperatures under this would overflow when logits are divided by them


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one is drawn
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: the chosen token's and the k likeliest
    n: int = 1

    def __post_init__(self) -> None:
        finite = math.isfinite
        self._require("temperature", finite(self.temperature) and 0 <= self.temperature <= 2, "a number in [0, 2]")
        self._require("top_p", 0 < self.top_p <= 1, "a number in (0, 1]")
        self._require("top_k", self.top_k >= -1, "an integer of at least -1 (0 and -1 switch it off)")
        self._require("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]")
        self._require("seed", self.seed is None or 0 <= self.seed < 2**63, "an integer in [0, 2^63)")
        self._require("max_tokens", self.max_tokens >= 1, "an integer of at least 1")
        allowed = f"an integer in [0, max_tokens ({self.max_tokens})]"
        self._require("min_tokens", 0 <= self.min_tokens <= self.max_tokens, allowed)
        self._require("stop", all(self.stop), "non-empty strings")
        self._require("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "token ids of at least 0")
        self._require("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "an integer in [0, 20]")
        self._require("n", self.n == 1, "1 (several completions of one prompt are not supported: send it n times)")

    def _require(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            value = getattr(self, name)
            value = list(value) if isinstance(value, tuple) else value
            raise InvalidRequest(f"{name} is {shown(value)}; allowed: {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Values may come as strings (Triton clients often send them so); null means the default.

        Raises:
            InvalidRequest: unknown name, wrong type, out of range.
        """
        kinds = typing.get_type_hints(cls)
        unknown = [name for name in values if name not in kinds]
        if unknown:
            known = ", ".join(kinds)
            raise InvalidRequest(f"unknown parameter {shown(unknown[0])}{nearest(unknown[0], kinds)}; known: {known}")
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**{name: _coerce(name, kinds[name], value) for name, value in given.items()})


def _coerce(name: str, kind: Any, value: Any) -> Any:
    if kind == tuple[str, ...]:
        return _strings(name, value)
    if kind == tuple[int, ...]:
        items = _unpacked(value)
        return tuple(_number(name, int, item) for item in (items if isinstance(items, list) else [items]))
    if kind is bool:
        return _boolean(name, value)
    return _number(name, float if kind is float else int, value)


def _unpacked(value: Any) -> Any:
    """A list may arrive as JSON text, since request parameters can't hold lists."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return json.loads(value)
        except NOT_JSON:
            return value
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = _unpacked(value)
    items = items if isinstance(items, list) else [items]
    for item in items:
        if not isinstance(item, str):
            raise InvalidRequest(f"{name} holds {shown(item)} ({type(item).__name__}); allowed: a string or strings")
    return tuple(items)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidRequest(f"{name} is {shown(value)} ({type(value).__name__}); allowed: true or false")


def _number(name: str, kind: type[int] | type[float], value: Any) -> int | float:
    wanted = "an integer" if kind is int else "a number"
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = kind(value)
        if kind is int and isinstance(value, float) and number != value:
            raise ValueError
        return number
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} is {shown(value)} ({type(value).__name__}); allowed: {wanted}") from None
