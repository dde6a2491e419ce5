"""Answers of a given form: a JSON schema, a regular expression, one of several texts, or a grammar.

llguidance knows which tokens may come next; the sampler leaves the others out.
"""

import contextlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import InvalidRequest, shown

KINDS = ("json", "json_object", "regex", "choice", "grammar")
# vLLM's older names, and those of TensorRT-LLM's `guided_decoding_guide_type`.
OLDER_NAMES = {f"guided_{kind}": kind for kind in KINDS}
# What else vLLM's structured_outputs may hold, as long as it asks for nothing: null or false.
UNUSED = (
    *("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
    *("structural_tag", "_backend", "_backend_was_auto"),
)
CACHED = 128  # grammars, of which most requests of a service share a few


@dataclass(frozen=True)
class Structure:
    kind: str  # one of KINDS
    text: str  # a schema and a list of texts as JSON

    @classmethod
    def of(cls, name: str, given: Any) -> "Structure":
        """`given`: an object with one of KINDS, as vLLM's structured_outputs. Raises InvalidRequest."""
        allowed = f"an object with exactly one of {', '.join(KINDS)}"
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise InvalidRequest(f"{name} is {shown(given)}; allowed: {allowed}") from None
        if not isinstance(given, dict):
            raise InvalidRequest(f"{name} is {shown(given)}; allowed: {allowed}")
        known = (*KINDS, *UNUSED)
        asked = {key: value for key, value in given.items() if key not in known or value not in (None, False)}
        if len(asked) != 1 or not asked.keys() <= set(KINDS):
            raise InvalidRequest(f"{name} is {shown(given)}; allowed: {allowed}")
        ((kind, value),) = asked.items()
        return cls(kind, _text(f"{name}.{kind}", kind, value))


def _text(name: str, kind: str, value: Any) -> str:
    if kind == "json_object":
        if value is not True and value != "true":
            raise InvalidRequest(f"{name} is {shown(value)}; allowed: true")
        return '{"type": "object"}'
    if kind == "choice":
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise InvalidRequest(f"{name} is {shown(value)}; allowed: a list of non-empty strings")
        return json.dumps(value)
    if kind == "json" and isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str) or not value:
        allowed = "a JSON schema" if kind == "json" else "a non-empty string"
        raise InvalidRequest(f"{name} is {shown(value)}; allowed: {allowed}")
    return value


class Guide:
    """What one answer may still become. Used by the loop's thread alone."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> np.ndarray:
        """A bit for each token of the vocabulary, [bytes] uint8, the lowest bit first."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)

    def accept(self, token: int) -> bool:
        """Take the next token in. False if it can't follow, which a token that was allowed can."""
        return bool(self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        """Nothing can follow but the end."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        return str(self._matcher.get_error())


class Guides:
    """Makes guides for one tokenizer, and keeps what it has compiled. Any thread may ask."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        """`tokenizer`: a fast tokenizer of transformers. `vocab_size`: the width of the logits."""
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._words: Any = None  # llguidance's tokenizer, which takes a moment to make and is not always needed
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()

    def make(self, structure: Structure) -> Guide:
        """Raises InvalidRequest when the schema, expression or grammar can't be used."""
        with self._lock:
            if structure not in self._compiled:
                self._compiled[structure] = self._compile(structure)
                if len(self._compiled) > CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structure)
            return Guide(self._compiled[structure].deep_copy())

    def _compile(self, structure: Structure) -> Any:
        import llguidance
        import llguidance.hf

        if self._words is None:
            self._words = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        kind: Any = "json" if structure.kind == "json_object" else structure.kind
        try:
            matcher = llguidance.LLMatcher(self._words, llguidance.grammar_from(kind, structure.text), log_level=0)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise InvalidRequest(f"structured_outputs.{structure.kind} is {shown(structure.text)}: {problem.strip()}")
        return matcher
