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
        ("seed", -(2**63), -(2**63)),
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
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", "2", 2.0),
        ("repetition_penalty", 1.1, 1.1),
        ("bad_words", ["a", "b c"], ("a", "b c")),
        ("logit_bias", {"7": -100, "8": "1.5"}, ((7, -100.0), (8, 1.5))),
        ("logit_bias", '{"7": 3}', ((7, 3.0),)),
        ("logit_bias", {}, ()),
        ("allowed_token_ids", [0, 5], (0, 5)),
        ("truncate_prompt_tokens", 1, 1),
        ("priority", -3, -3),
        ("max_time", "0.5", 0.5),
        ("max_queue_time", 10, 10.0),
        ("stop", ['["a", "b"]'], ("a", "b")),
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
    ("seed", -(2**63) - 1, "an integer in [-2^63, 2^63)"),
    ("seed", 2**63, "an integer in [-2^63, 2^63)"),
    ("max_tokens", 0, "an integer of at least 1"),
    ("max_tokens", -5, "an integer of at least 1"),
    ("min_tokens", -1, "an integer in [0, max_tokens (16)]"),
    ("min_tokens", 17, "an integer in [0, max_tokens (16)]"),
    ("stop_token_ids", [3, -1], "token ids of at least 0"),
    ("stop", ["a", ""], "non-empty strings"),
    ("logprobs", -1, "an integer in [0, 20]"),
    ("logprobs", 21, "an integer in [0, 20]"),
    ("presence_penalty", 2.1, "a number in [-2, 2]"),
    ("presence_penalty", float("nan"), "a number in [-2, 2]"),
    ("frequency_penalty", -2.1, "a number in [-2, 2]"),
    ("repetition_penalty", 0.0, "a number above 0"),
    ("repetition_penalty", float("inf"), "a number above 0"),
    ("bad_words", [""], "non-empty strings"),
    ("logit_bias", {-1: 1.0}, "an object of token ids and numbers in [-100, 100]"),
    ("logit_bias", {1: 101.0}, "an object of token ids and numbers in [-100, 100]"),
    ("allowed_token_ids", [-1], "token ids of at least 0"),
    ("truncate_prompt_tokens", 0, "an integer of at least 1"),
    ("priority", 2**31, "an integer in [-2^31, 2^31)"),
    ("max_time", 0.0, "a number above 0"),
    ("max_queue_time", float("inf"), "a number above 0"),
    ("n", 65, "an integer in [1, 64], and 1 if"),
    ("n", 0, "an integer in [1, 64], and 1 if"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_field_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams.from_dict({name: value})
    assert str(refused.value).startswith(f"{name} is {value!r}; allowed: {allowed}")


WRONG_NUMBERS: list[Any] = [True, "much", "", [1], {}]
WRONG_INTEGERS: list[Any] = [False, "1.5", 1.5, "", [1], {}, 1e400]
WRONG_BOOLEANS: list[Any] = [1, 0, "yes", "", [], 1.0]
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "max_time")
INTEGERS = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "n", "priority", "truncate_prompt_tokens")
BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[(name, value, "a number") for name in NUMBERS for value in WRONG_NUMBERS],
        *[
            (name, value, "an integer")
            for name in INTEGERS
            for value in WRONG_INTEGERS
            if (name, value) != ("logprobs", False)
        ],
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
        ("logit_bias", [1], "logit_bias is [1] (list); allowed: an object of token ids and numbers"),
        ("logit_bias", {"a": 1}, "logit_bias is 'a' (str); allowed: an integer"),
        ("logit_bias", {"1": "a"}, "logit_bias is 'a' (str); allowed: a number"),
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


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ({"stop_words": ["a"]}, {"stop": ["a"]}),
        ({"end_id": 2}, {"stop_token_ids": [2]}),
        ({"random_seed": 5}, {"seed": 5}),
        ({"min_length": 4}, {"min_tokens": 4}),
        (
            {"num_return_sequences": 1, "beam_width": 1, "pad_id": 0, "use_beam_search": False, "length_penalty": "1"},
            {},
        ),
    ],
)
def test_other_servers_names_mean_the_same(values: dict[str, Any], same: dict[str, Any]) -> None:
    assert SamplingParams.from_dict(values) == SamplingParams.from_dict(same)


def test_what_other_servers_do_and_this_one_does_not_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"beam_width is 4; allowed: 1 \(it is known from other servers"):
        SamplingParams.from_dict({"beam_width": 4})
    with pytest.raises(InvalidRequest, match=r"stop is given twice, stop as \['a'\] and stop_words as \['b'\]"):
        SamplingParams.from_dict({"stop": ["a"], "stop_words": ["b"]})


def test_twice_the_same_is_once() -> None:
    once = SamplingParams.from_dict({"temperature": 0.5, "stop": ["a"], "seed": 1})
    pairs = [("temperature", 0.5), ("temperature", "0.5"), ("stop", "a"), ("stop_words", ["a"])]
    assert SamplingParams.from_pairs([*pairs, ("seed", "1"), ("random_seed", 1), ("seed", None)]) == once


def test_chat_frontends_may_say_logprobs_with_true_and_false() -> None:
    assert SamplingParams.from_dict({"logprobs": False}).logprobs is None
    assert SamplingParams.from_dict({"logprobs": True}).logprobs == 1
