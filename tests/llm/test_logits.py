"""Biases, penalties and tokens that must not be chosen, against the definitions written out a row at a time."""

import random
from typing import Any

import pytest
import torch
from engine.errors import InvalidRequest
from engine.logits import process
from engine.sampler import Sampled, sample
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

VOCABULARY = 40
EOS = frozenset([3])


def asking(prompt: list[int], answer: list[int], banned: tuple[tuple[int, ...], ...] = (), **params: Any) -> Sequence:
    sequence = Sequence(prompt, SamplingParams(max_tokens=10**6, **params), 0, banned)
    sequence.tokens += answer
    return sequence


def by_definition(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """vLLM's documentation, a token at a time."""
    params, row = sequence.params, logits.clone()
    answer = sequence.tokens[len(sequence.prompt) :]
    for token in range(VOCABULARY):
        never = bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        never |= len(answer) < params.min_tokens and token in (*EOS, *params.stop_token_ids)
        for word in sequence.banned:
            never |= [*answer, token][-len(word) :] == list(word)
        if never:
            row[token] = float("-inf")
        row[token] += dict(params.logit_bias).get(token, 0.0)
        if token in sequence.tokens:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        row[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty * (token in answer)
    return row


def test_rows_with_any_rules_side_by_side_follow_the_definitions() -> None:
    rng = random.Random(0)
    sequences = []
    for _ in range(60):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))]
        cut = rng.randrange(1, len(tokens) + 1)
        params: dict[str, Any] = {}
        if rng.random() < 0.5:
            params |= {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}
        if rng.random() < 0.5:
            params["repetition_penalty"] = rng.uniform(0.5, 2)
        if rng.random() < 0.5:
            params["logit_bias"] = tuple((t, rng.uniform(-100, 100)) for t in rng.sample(range(VOCABULARY), 4))
        if rng.random() < 0.3:
            params["allowed_token_ids"] = tuple(rng.sample(range(VOCABULARY), 7))
        if rng.random() < 0.3:
            params |= {"min_tokens": rng.randrange(20), "stop_token_ids": (5, VOCABULARY + 7)}
        words = [tuple(rng.choices(tokens, k=rng.randrange(1, 4))) for _ in range(rng.randrange(5))]
        sequences.append(asking(tokens[:cut], tokens[cut:], tuple(words), **params))
    torch.manual_seed(0)
    logits = torch.randn(len(sequences), VOCABULARY) * 3
    together = logits.clone()
    process(together, sequences, EOS)
    expected = torch.stack([by_definition(row, one) for row, one in zip(logits, sequences, strict=True)])
    torch.testing.assert_close(together, expected)
    assert (expected != logits).any(-1).float().mean() > 0.8, "most rows have a rule"


def test_rows_without_rules_stay_as_they_are() -> None:
    logits = torch.randn(3, VOCABULARY)
    processed = logits.clone()
    process(processed, [asking([1], [2, 2], top_p=0.5), asking([3], []), asking([4], [5])], EOS)
    assert torch.equal(processed, logits)


def test_a_bad_word_is_stopped_at_its_last_token_only() -> None:
    logits = torch.zeros(1, VOCABULARY)
    for answer, banned in ([7], {9}), ([8], set()), ([], set()), ([9, 7], {9}):
        row = logits.clone()
        process(row, [asking([7], answer, ((7, 9),))], EOS)
        assert set(torch.isinf(row[0]).nonzero()[:, 0].tolist()) == banned, f"after {answer}; a prompt is no answer"


def test_rules_that_leave_nothing_fail_their_request_alone() -> None:
    sequences = [asking([1], [], ((4,),), allowed_token_ids=(4,), temperature=0.0), asking([1], [], temperature=0.0)]
    assert sample(torch.eye(2, VOCABULARY), sequences, EOS) == [None, Sampled(1)]


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_a_token_that_the_model_does_not_have_is_named(name: str) -> None:
    params = SamplingParams.from_dict({name: {"40": 1} if name == "logit_bias" else [40]})
    params.check_tokens(41)
    with pytest.raises(InvalidRequest, match=f"{name} holds 40; allowed: token ids below 40"):
        params.check_tokens(40)
