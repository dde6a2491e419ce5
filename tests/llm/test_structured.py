"""Whatever a model would like to say, its answer has the form that was asked for."""

import json
import re
from typing import Any

import pytest
import torch
from engine.errors import InvalidRequest
from engine.sampler import sample
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence, finish_reason
from engine.structured import Guides, Structure

from tests.llm.tiny_tokenizers import END, byte_level

TOKENIZER = byte_level()
EOS = frozenset([TOKENIZER.convert_tokens_to_ids(END)])
VOCABULARY = len(TOKENIZER) + 5  # logits are often wider than the tokenizer
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def written(guides: Guides, seed: int, **params: Any) -> tuple[str, FinishReason]:
    """What a model of pure noise says under these parameters."""
    wanted = SamplingParams.from_dict({"max_tokens": 200, "seed": seed, **params})
    assert wanted.structured_outputs
    sequence = Sequence([1], wanted, seed, guide=guides.make(wanted.structured_outputs))
    torch.manual_seed(seed)
    while True:
        (one,) = sample(torch.randn(1, VOCABULARY) * 3, [sequence], EOS)
        assert one is not None
        assert sequence.guide is not None
        assert sequence.guide.accept(one.token)
        sequence.tokens.append(one.token)
        if reason := finish_reason(sequence, EOS, 10**6):
            return TOKENIZER.decode(sequence.tokens[1:], skip_special_tokens=True), reason


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(TOKENIZER, EOS, VOCABULARY)


@pytest.mark.parametrize("seed", range(20))
def test_noise_becomes_what_was_asked_for(guides: Guides, seed: int) -> None:
    text, reason = written(guides, seed, structured_outputs={"json": PERSON})
    assert reason is FinishReason.STOP
    assert json.loads(text).keys() == {"name", "age"}
    assert 0 <= json.loads(text)["age"] <= 150
    text, reason = written(guides, seed, guided_regex="[a-f]{3}(-[0-9]{2,4})?")
    assert re.fullmatch("[a-f]{3}(-[0-9]{2,4})?", text)
    text, reason = written(guides, seed, guided_choice=["yes", "no", 'say "maybe"'])
    assert (text in ("yes", "no", 'say "maybe"'), reason) == (True, FinishReason.STOP)
    text, reason = written(guides, seed, guided_grammar='root ::= "a" ("b" | "c") "d"')
    assert text in ("abd", "acd")


def test_neighbours_without_a_form_are_free(guides: Guides) -> None:
    logits = torch.randn(2, VOCABULARY)
    bound = Sequence([1], SamplingParams(temperature=0), 0, guide=guides.make(Structure("choice", '["no"]')))
    free = Sequence([1], SamplingParams(temperature=0), 0)
    one, other = sample(logits.clone(), [bound, free], EOS)
    assert one
    assert other
    assert TOKENIZER.decode([one.token]) in ("n", "no")
    assert other.token == int(logits[1].argmax())


def test_a_form_that_is_asked_for_again_is_not_compiled_again(guides: Guides) -> None:
    structure = Structure("regex", "[a-f]{9}")
    first, second = guides.make(structure), guides.make(structure)
    assert first.accept(TOKENIZER.convert_tokens_to_ids("a"))
    assert (first.allowed() == second.allowed()).all(), "each answer has a guide of its own"
    compiled = guides._compiled[structure]
    guides.make(structure)
    assert guides._compiled[structure] is compiled


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": "{"}, r"structured_outputs.json is '{': "),
        ({"json": {"type": "nothing"}}, r"structured_outputs.json is "),
        ({"regex": "[a-"}, r"structured_outputs.regex is '\[a-': .*unclosed character class"),
        ({"grammar": "root ::= ("}, r"structured_outputs.grammar is "),
    ],
)
def test_a_form_that_can_not_be_is_refused_with_the_reason(guides: Guides, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s){message}"):
        guides.make(Structure.of("structured_outputs", given))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("structured_outputs", {"xml": "a"}, "structured_outputs is {'xml': 'a'}; allowed: an object with exactly one"),
        (
            "structured_outputs",
            {"json": "{}", "regex": "a"},
            "allowed: an object with exactly one of json, json_object",
        ),
        ("structured_outputs", "json", "structured_outputs is 'json'; allowed: an object"),
        (
            "structured_outputs",
            {"json_object": False},
            "structured_outputs is {'json_object': False}; allowed: an object",
        ),
        ("structured_outputs", {"json_object": 1}, "structured_outputs.json_object is 1; allowed: true"),
        ("guided_choice", [], "guided_choice.choice is \\[\\]; allowed: a list of non-empty strings"),
        ("guided_choice", "no list", "guided_choice.choice is 'no list'; allowed: a list of non-empty strings"),
        ("guided_regex", 5, "guided_regex.regex is 5; allowed: a non-empty string"),
        ("guided_json", [1], "guided_json.json is \\[1\\]; allowed: a JSON schema"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams.from_dict({name: value})


# What vLLM's own class makes of itself as JSON, which Triton's OpenAI frontend sends.
ALL_OF_VLLMS = dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern"))
ALL_OF_VLLMS |= {"structural_tag": None, "_backend": None, "_backend_was_auto": False, "disable_fallback": False}


def test_names_old_and_new_as_objects_or_as_json_mean_the_same() -> None:
    wanted = Structure("json", json.dumps(PERSON))
    for values in (
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": json.dumps({"json": PERSON})},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": json.dumps(ALL_OF_VLLMS | {"json": PERSON})},
    ):
        assert SamplingParams.from_dict(values).structured_outputs == wanted
    with pytest.raises(InvalidRequest, match="structured_outputs is given twice"):
        SamplingParams.from_dict({"guided_regex": "a", "guided_choice": ["b"]})
