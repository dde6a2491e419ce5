"""From the tokens of one request to the deltas its consumer sees."""

from typing import Any

import pytest
from engine.errors import Cancelled
from engine.generation import Delta, Generation
from engine.sampler import Sampled
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence
from engine.tokenizer import Tokenizer

EOS = ord("$")


class Letters(Tokenizer):
    """A token is a letter's code; the codes of é's two bytes are 1 and 2."""

    def __init__(self) -> None:
        self.eos_token_ids = frozenset([EOS])

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        shown = (token for token in ids if not (skip_special and token == EOS))
        raw = b"".join({1: b"\xc3", 2: b"\xa9"}.get(token) or chr(token).encode() for token in shown)
        return raw.decode(errors="replace")


class Told:
    """A generation, and what it told whom."""

    def __init__(self, **params: Any) -> None:
        sequence = Sequence([ord("P")], SamplingParams(**{"max_tokens": 100, **params}), seed=0)
        self.ready = self.stopped = 0
        self.generation = Generation(sequence, Letters(), self.on_ready, self.on_stop)

    def on_ready(self, generation: Generation) -> None:
        assert generation is self.generation
        self.ready += 1

    def on_stop(self, generation: Generation) -> None:
        assert generation is self.generation
        self.stopped += 1

    def put(self, letters: str, reason: FinishReason | None = None) -> None:
        codes = [code for letter in letters for code in ((1, 2) if letter == "é" else (ord(letter),))]
        for index, code in enumerate(codes):
            self.generation.put(Sampled(code), reason if index == len(codes) - 1 else None)

    def drain(self) -> tuple[str, FinishReason | None] | None:
        delta = self.generation.drain()
        return (delta.text, delta.finish_reason) if delta else None


def test_there_is_nothing_to_drain_before_the_first_token() -> None:
    assert Told().drain() is None


def test_what_piled_up_comes_as_one_delta() -> None:
    told = Told()
    told.put("abc")
    assert told.ready == 1
    assert told.drain() == ("abc", None)
    assert told.drain() is None
    told.put("de", FinishReason.LENGTH)
    assert told.ready == 2
    assert told.drain() == ("de", FinishReason.LENGTH)
    assert told.drain() is None


def test_a_token_without_text_yet_comes_with_the_text_it_completes() -> None:
    # vllm#13087: no empty chunks
    told = Told()
    told.generation.put(Sampled(1))
    assert told.drain() is None
    told.generation.put(Sampled(2))
    assert told.generation.drain() == Delta("é", (Sampled(1), Sampled(2)))


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    told = Told()
    told.put("a")
    told.generation.put(Sampled(1), FinishReason.LENGTH)
    assert told.drain() == ("a\ufffd", FinishReason.LENGTH)


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    told = Told(stop=("STOP",))
    told.put("xST")
    assert told.drain() == ("x", None)
    told.put("O", FinishReason.LENGTH)
    assert told.drain() == ("STO", FinishReason.LENGTH)


def test_text_held_back_comes_when_it_was_no_stop_string() -> None:
    told = Told(stop=("STOP",))
    told.put("ST")
    assert told.drain() is None
    told.put("x")
    delta = told.generation.drain()
    assert delta == Delta("STx", tuple(Sampled(ord(letter)) for letter in "STx"))


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xSTOP")])
def test_a_stop_string_ends_it_and_says_so_once(include: bool, text: str) -> None:
    told = Told(stop=("STOP",), include_stop_str_in_output=include)
    told.put("xSTOPyz")
    delta = told.generation.drain()
    assert delta is not None
    assert (delta.text, delta.finish_reason, len(delta.tokens)) == (text, FinishReason.STOP, 5)
    assert told.stopped == 1
    told.put("more")
    told.generation.end(FinishReason.STOP)
    assert told.drain() is None
    assert told.stopped == 1


def test_a_stop_string_with_the_last_allowed_token_is_a_stop() -> None:
    told = Told(stop=("STOP",))
    told.put("xSTOP", FinishReason.LENGTH)
    assert told.drain() == ("x", FinishReason.STOP)


def test_a_stop_string_that_the_last_flush_completes_is_a_stop() -> None:
    told = Told(stop=("\ufffd",))
    told.put("x")
    told.generation.put(Sampled(1), FinishReason.LENGTH)
    assert told.drain() == ("x", FinishReason.STOP)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"include_stop_str_in_output": True}, "ab"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab$"),
    ],
)
def test_the_end_token_is_shown_on_request_only(params: dict[str, bool], text: str) -> None:
    told = Told(**params)
    told.put("ab$", FinishReason.STOP)
    delta = told.generation.drain()
    assert delta is not None
    assert (delta.text, delta.finish_reason) == (text, FinishReason.STOP)
    assert len(delta.tokens) == 3, "it was generated all the same"


def test_an_ordinary_stop_token_is_no_text_either() -> None:
    told = Told(stop_token_ids=(ord("b"),))
    told.put("ab", FinishReason.STOP)
    assert told.drain() == ("a", FinishReason.STOP)


def test_the_last_token_of_a_limit_is_text() -> None:
    told = Told()
    told.put("ab", FinishReason.LENGTH)
    assert told.drain() == ("ab", FinishReason.LENGTH)


def test_stop_strings_wait_for_min_tokens() -> None:
    told = Told(stop=("b",), min_tokens=4)
    told.put("abab")
    assert told.drain() == ("aba", FinishReason.STOP)


def test_an_error_comes_with_what_was_said_before() -> None:
    told = Told()
    told.put("ab")
    error = Cancelled("gone")
    told.generation.end(FinishReason.ABORT, error)
    assert told.ready == 1
    delta = told.generation.drain()
    assert delta == Delta("ab", (Sampled(97), Sampled(98)), FinishReason.ABORT, error)
    assert told.drain() is None


def test_log_probabilities_travel_with_their_tokens() -> None:
    told = Told(logprobs=1)
    token = Sampled(97, -0.5, 1, ((97, -0.5),))
    told.generation.put(token)
    assert told.generation.drain() == Delta("a", (token,))
