"""Every parameter: what is taken, and in which words the rest is refused."""

from typing import Any

import pytest
from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams


def test_without_parameters_the_defaults_hold() -> None:
    assert SamplingParams.from_dict({}) == SamplingParams()
    assert SamplingParams.from_dict({}) == SamplingParams()
    assert SamplingParams.from_dict({"seed": None, "top_p": None, "stop": None}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("temperature", "0.7", 0.7),
        ("top_p", 1, 1.0),
        ("top_p", "0.5", 0.5),
        ("top_k", -1, -1),
        ("top_k", "40", 40),
        ("top_k", 40.0, 40),
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("seed", 0, 0),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("max_tokens", 1, 1),
        ("max_tokens", "100", 100),
        ("min_tokens", 16, 16),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "[DONE]", ("[DONE]",)),
        ("stop", [], ()),
        ("stop_token_ids", 7, (7,)),
        ("stop_token_ids", "7", (7,)),
        ("stop_token_ids", [7, "8"], (7, 8)),
        ("stop_token_ids", "[7, 8]", (7, 8)),
        ("include_stop_str_in_output", True, True),
        ("ignore_eos", "true", True),
        ("ignore_eos", "False", False),
        ("skip_special_tokens", False, False),
        ("logprobs", 0, 0),
        ("logprobs", "20", 20),
        ("n", "1", 1),
    ],
)
def test_a_value_is_taken(name: str, value: Any, taken: Any) -> None:
    got = getattr(SamplingParams.from_dict({name: value}), name)
    assert got == taken
    assert type(got) is type(taken)


OUT_OF_RANGE = [
    ("temperature", -0.1, "a number in [0, 2]"),
    ("temperature", 2.1, "a number in [0, 2]"),
    ("temperature", float("nan"), "a number in [0, 2]"),
    ("temperature", float("inf"), "a number in [0, 2]"),
    ("top_p", 0.0, "a number in (0, 1]"),
    ("top_p", 1.01, "a number in (0, 1]"),
    ("top_p", float("nan"), "a number in (0, 1]"),
    ("top_k", -2, "an integer of at least -1"),
    ("min_p", -0.01, "a number in [0, 1]"),
    ("min_p", 1.01, "a number in [0, 1]"),
    ("min_p", float("nan"), "a number in [0, 1]"),
    ("seed", -1, "an integer in [0, 2^63)"),
    ("seed", 2**63, "an integer in [0, 2^63)"),
    ("max_tokens", 0, "an integer of at least 1"),
    ("max_tokens", -5, "an integer of at least 1"),
    ("min_tokens", -1, "an integer in [0, max_tokens (16)]"),
    ("min_tokens", 17, "an integer in [0, max_tokens (16)]"),
    ("stop_token_ids", [3, -1], "token ids of at least 0"),
    ("stop", ["a", ""], "non-empty strings"),
    ("logprobs", -1, "an integer in [0, 20]"),
    ("logprobs", 21, "an integer in [0, 20]"),
    ("n", 2, "1 (several completions"),
    ("n", 0, "1 (several completions"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_field_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams.from_dict({name: value})
    assert str(refused.value).startswith(f"{name} is {value!r}; allowed: {allowed}")


WRONG_NUMBERS: list[Any] = [True, "much", "", [1], {}]
WRONG_INTEGERS: list[Any] = [False, "1.5", 1.5, "", [1], {}, 1e400]
WRONG_BOOLEANS: list[Any] = [1, 0, "yes", "", [], 1.0]
NUMBERS = ("temperature", "top_p", "min_p")
INTEGERS = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "n")
BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[(name, value, "a number") for name in NUMBERS for value in WRONG_NUMBERS],
        *[(name, value, "an integer") for name in INTEGERS for value in WRONG_INTEGERS],
        *[(name, value, "true or false") for name in BOOLEANS for value in WRONG_BOOLEANS],
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_field_value_and_type(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams.from_dict({name: value})
    assert str(refused.value) == f"{name} is {value!r} ({type(value).__name__}); allowed: {allowed}"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stop", 5, "stop holds 5 (int); allowed: a string or strings"),
        ("stop", ["a", 5], "stop holds 5 (int); allowed: a string or strings"),
        ("stop", {}, "stop holds {} (dict); allowed: a string or strings"),
        ("stop_token_ids", ["a"], "stop_token_ids is 'a' (str); allowed: an integer"),
        ("stop_token_ids", "[1, 2", "stop_token_ids is '[1, 2' (str); allowed: an integer"),
        ("stop_token_ids", [1.5], "stop_token_ids is 1.5 (float); allowed: an integer"),
        ("stop_token_ids", [True], "stop_token_ids is True (bool); allowed: an integer"),
    ],
)
def test_a_list_names_the_item_that_is_wrong(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams.from_dict({name: value})
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("stop_tokens_ids", "stop_token_ids"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"unknown parameter '{typed}' \\(did you mean '{meant}'\\?\\); known: temp"
    ):
        SamplingParams.from_dict({typed: 1})


def test_an_unknown_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(InvalidRequest, match=r"^unknown parameter 'zzz'; known: temperature, top_p, "):
        SamplingParams.from_dict({"zzz": 1})


@pytest.mark.parametrize("value", ["[" * 100_000, "[" + "9" * 5000 + "]"], ids=["nested", "huge"])
def test_a_list_that_no_parser_takes_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids is "):
        SamplingParams.from_dict({"stop_token_ids": value})


@pytest.mark.parametrize(
    ("values", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-6}, True),
        ({"top_k": 1}, True),
        ({}, False),
        ({"top_k": 2}, False),
    ],
)
def test_what_is_greedy(values: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams.from_dict(values).greedy is greedy
