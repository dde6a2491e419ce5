"""How one request wants its tokens chosen: vLLM's names, ranges and meanings, checked once, then frozen."""

import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine.coercion import coerce
from engine.config import nearest
from engine.errors import InvalidRequest, shown
from engine.structured import OLDER_NAMES, Structure

GREEDY_BELOW = 1e-5  # temperatures under this would overflow when logits are divided by them

# TensorRT-LLM's names for what has another one here.
ALIASES = {
    "stop_words": "stop",
    "end_id": "stop_token_ids",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
}
# What other servers' clients send along, and what of it changes nothing here. None: anything.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "pad_id": None,
    "beam_width": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (0, 1),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
}


def option(default: Any, allowed: str, says: str) -> Any:
    """A field, with the words of its error message and of its documentation."""
    return field(default=default, metadata={"allowed": allowed, "says": says})


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = option(1.0, "a number in [0, 2]", "0 takes the likeliest token")
    top_p: float = option(
        1.0, "a number in (0, 1]", "only the likeliest tokens that together hold this share of the probability"
    )
    top_k: int = option(0, "an integer of at least -1 (0 and -1 switch it off)", "only so many likeliest tokens")
    min_p: float = option(0.0, "a number in [0, 1]", "only tokens with this share of the likeliest one's probability")
    presence_penalty: float = option(0.0, "a number in [-2, 2]", "taken off the logit of each token the answer holds")
    frequency_penalty: float = option(0.0, "a number in [-2, 2]", "the same, once for each time that it holds it")
    repetition_penalty: float = option(
        1.0, "a number above 0, up to 100", "divides positive logits of tokens in prompt or answer, multiplies negative"
    )
    seed: int | None = option(
        None,
        "an integer in [-2^63, 2^63)",
        "the same seed makes the same choices, whatever else is computed (but for rounding); null and -1: a new one",
    )
    max_tokens: int = option(16, "an integer of at least 1", "the longest answer")
    min_tokens: int = option(
        0, "an integer in [0, max_tokens]", "neither an end token nor a stop string ends the answer before"
    )
    stop: tuple[str, ...] = option((), "non-empty strings", "ends the answer before this text")
    stop_token_ids: tuple[int, ...] = option((), "token ids of at least 0", "ends the answer with this token")
    include_stop_str_in_output: bool = option(False, "true or false", "keeps what stopped the answer in it")
    ignore_eos: bool = option(False, "true or false", "goes on after the model's end token")
    bad_words: tuple[str, ...] = option((), "non-empty strings", "texts whose last token is never chosen")
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), "an object of token ids and numbers in [-100, 100]", "added to these tokens' logits"
    )
    allowed_token_ids: tuple[int, ...] = option((), "token ids of at least 0", "nothing but these; none: all tokens")
    structured_outputs: Structure | None = option(  # noqa: RUF009  (a field like the others; ruff knows not the type)
        None,
        "an object with exactly one of json, json_object, regex, choice, grammar",
        "the answer matches this JSON schema, expression, list of texts or grammar (GBNF or Lark)",
    )
    skip_special_tokens: bool = option(True, "true or false", "leaves tokens such as `<|im_end|>` out of the text")
    logprobs: int | None = option(
        None, "an integer in [0, 20]", "with `return_logprobs`: the chosen token and so many likeliest ones"
    )
    truncate_prompt_tokens: int | None = option(
        None, "an integer of at least 1", "only so many last tokens of the prompt; null: all"
    )
    priority: int = option(0, "an integer in [-2^31, 2^31)", "lower ones get a seat first; equals in order of arrival")
    max_queue_time: float | None = option(
        None, "a number above 0", "seconds; a request that has no seat by then fails; null: no limit"
    )
    max_time: float | None = option(
        None, "a number above 0", "seconds; a request that is not done by then fails; null: no limit"
    )
    n: int = option(
        1,
        "an integer in [1, 64], and 1 if the likeliest token is taken",
        "answers to one prompt, seeded seed + 0, 1, 2, ...",
    )

    def __post_init__(self) -> None:
        self._require("temperature", math.isfinite(self.temperature) and 0 <= self.temperature <= 2)
        self._require("top_p", 0 < self.top_p <= 1)
        self._require("top_k", self.top_k >= -1)
        self._require("min_p", 0 <= self.min_p <= 1)
        self._require("presence_penalty", -2 <= self.presence_penalty <= 2)
        self._require("frequency_penalty", -2 <= self.frequency_penalty <= 2)
        self._require("repetition_penalty", 0 < self.repetition_penalty <= 100)
        self._require("seed", self.seed is None or -(2**63) <= self.seed < 2**63)
        self._require("max_tokens", self.max_tokens >= 1)
        self._require("min_tokens", 0 <= self.min_tokens <= self.max_tokens)
        for name in ("stop", "bad_words"):
            self._require(name, all(getattr(self, name)))
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._require(name, all(token >= 0 for token in getattr(self, name)))
        self._require("logit_bias", all(token >= 0 and -100 <= bias <= 100 for token, bias in self.logit_bias))
        self._require("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20)
        self._require("truncate_prompt_tokens", self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1)
        self._require("priority", -(2**31) <= self.priority < 2**31)
        for name in ("max_queue_time", "max_time"):
            self._require(name, getattr(self, name) is None or 0 < getattr(self, name) < math.inf)
        self._require("n", 1 <= self.n <= 64 and (self.n == 1 or not self.greedy))

    def _require(self, name: str, ok: bool) -> None:
        if not ok:
            allowed = _METADATA[name]["allowed"].replace("max_tokens]", f"max_tokens ({self.max_tokens})]")
            raise InvalidRequest(f"{name} is {shown(plain(getattr(self, name)))}; allowed: {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def check_tokens(self, vocab_size: int) -> None:
        """Raises InvalidRequest where a token id is named that the model doesn't have."""
        named = {"logit_bias": [token for token, _ in self.logit_bias], "allowed_token_ids": self.allowed_token_ids}
        for name, tokens in named.items():
            for token in tokens:
                if token >= vocab_size:
                    raise InvalidRequest(f"{name} holds {token}; allowed: token ids below {vocab_size}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        return cls.from_pairs(values.items())

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, Any]]) -> "SamplingParams":
        """Values may come as strings (Triton clients often send them so); null means the default. A parameter may come
        twice, under one name or two, as long as both mean the same.

        Raises:
            InvalidRequest: unknown name, wrong type, out of range, given twice with different values.
        """
        kinds = typing.get_type_hints(cls)
        given: dict[str, tuple[str, Any, Any]] = {}  # by name: what the client wrote, and what it means
        for typed, value in pairs:
            name = ALIASES.get(typed, typed)
            if value is None or (typed in NEUTRAL and _is_neutral(typed, value)):
                continue
            meaning: Any
            if typed in OLDER_NAMES:
                name, meaning = "structured_outputs", Structure.of(typed, {OLDER_NAMES[typed]: value})
            elif name not in kinds:
                known = ", ".join(kinds)
                raise InvalidRequest(f"unknown parameter {shown(typed)}{nearest(typed, kinds)}; known: {known}")
            elif name == "structured_outputs":
                meaning = Structure.of(typed, value)
            elif name == "logprobs" and isinstance(value, bool):
                meaning = 1 if value else None  # OpenAI's chat has it so, and Triton's frontend used to pass it on
            else:
                meaning = coerce(name, kinds[name], value)
            if name in given and given[name][2] != meaning:
                first, before, _ = given[name]
                both = f"{first} as {shown(before)} and {typed} as {shown(value)}"
                raise InvalidRequest(f"{name} is given twice, {both}; allowed: one value")
            given[name] = typed, value, meaning
        return cls(**{name: meaning for name, (_, _, meaning) in given.items()})


_METADATA = {each.name: each.metadata for each in fields(SamplingParams)}


def _is_neutral(name: str, value: Any) -> bool:
    """Raises InvalidRequest where the value would have to change something."""
    allowed = NEUTRAL[name]
    if allowed is None or value in allowed or value in tuple(str(each).lower() for each in allowed):
        return True
    listed = " or ".join(str(each).lower() for each in allowed)
    raise InvalidRequest(f"{name} is {shown(value)}; allowed: {listed} (it is known from other servers, not supported)")


def plain(value: Any) -> Any:
    """As a client writes it: lists and objects."""
    if isinstance(value, tuple):
        return dict(value) if value and isinstance(value[0], tuple) else list(value)
    return value
