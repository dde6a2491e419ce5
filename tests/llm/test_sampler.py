"""What is drawn, how often, and with which log probability."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from engine.sampler import CANDIDATES, Sampled, sample, uniforms
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

NO_EOS: frozenset[int] = frozenset()


def asking(seed: int = 0, length: int = 1, output: int = 0, **params: Any) -> Sequence:
    sequence = Sequence([1] * length, SamplingParams(max_tokens=10**6, **params), seed)
    sequence.tokens += [1] * output
    return sequence


def draws(logits: torch.Tensor, count: int, **params: Any) -> torch.Tensor:
    """How often each token is drawn, with as many seeds."""
    sequences = [asking(seed, **params) for seed in range(count)]
    sampled = sample(logits.repeat(count, 1), sequences, NO_EOS)
    tokens = [one.token for one in sampled if one]
    assert len(tokens) == count
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def restricted(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The distribution by the definitions: min_p, top_k, then the smallest set whose share reaches top_p."""
    probs = (logits.double() / temperature).softmax(0)
    probs[probs < min_p * probs.max()] = 0
    order = probs.argsort(descending=True)
    if top_k > 0:
        probs[order[top_k:]] = 0
    probs = probs / probs.sum()
    mass = 0.0
    for token in order.tolist():
        if mass >= top_p:
            probs[token] = 0
        mass += float(probs[token])
    return probs / probs.sum()


def assert_drawn_from(counts: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square, at one in a million; the seeds are fixed, so it passes always or never."""
    assert int(counts[probs == 0].sum()) == 0, "a token was drawn that should have been left out"
    expected = probs[probs > 0] * counts.sum()
    observed = counts[probs > 0].double()
    rare = expected < 8  # too few to test one by one
    if rare.any():
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected.clamp(min=1)).sum())
    freedom = max(len(expected) - 1, 1)
    # Wilson and Hilferty's approximation of the quantile
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": -1},
        {"top_k": 1000},
        {"top_p": 0.7},
        {"top_p": 0.001},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 7, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should_be(params: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40) * 1.5
    probs = restricted(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params})
    assert_drawn_from(draws(logits, 12_000, **params), probs)


def test_the_distribution_test_notices_a_wrong_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40)
    with pytest.raises(AssertionError):
        assert_drawn_from(draws(logits, 20_000), (logits * 1.1).softmax(0).double())


@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_top_p_holds_where_the_likeliest_thousand_do_not_reach_it(top_p: float) -> None:
    # Nearly flat but for one token, over more tokens than are sorted at first.
    torch.manual_seed(0)
    logits = torch.randn(CANDIDATES + 300) * 0.01
    logits[7] = 6
    probs = restricted(logits, 1.0, 0, top_p, 0.0)
    assert (int((probs > 0).sum()) > CANDIDATES) == (top_p > 0.6)
    counts = sum(draws(logits, 500, top_p=top_p, length=length) for length in range(1, 21))
    assert isinstance(counts, torch.Tensor)
    assert_drawn_from(counts, probs)


def test_top_k_may_exceed_what_is_sorted_at_first() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4 * CANDIDATES) * 0.01
    kept = set(logits.topk(CANDIDATES + 500).indices.tolist())
    counts = draws(logits, 2000, top_k=CANDIDATES + 500)
    drawn = set(counts.nonzero()[:, 0].tolist())
    assert drawn <= kept
    assert not drawn <= set(logits.topk(CANDIDATES).indices.tolist())


def test_neighbours_with_other_parameters_change_nothing() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4 * CANDIDATES)
    sequences = [
        asking(1),
        asking(2, top_k=3),
        asking(3, top_p=0.5),
        asking(4, temperature=0),
        asking(5, top_k=2000, top_p=0.99, temperature=2.0),
        asking(6, min_p=0.1, logprobs=2),
    ]
    together = sample(logits.clone(), sequences, NO_EOS)
    for row, sequence in enumerate(sequences):
        alone = sample(logits[row : row + 1].clone(), [sequence], NO_EOS)[0]
        assert alone is not None
        assert together[row] is not None
        assert alone.token == together[row].token  # type: ignore[union-attr]


def test_greedy_takes_the_likeliest_and_so_does_top_k_1() -> None:
    # vllm#5404: top_k=1 differed from temperature 0
    torch.manual_seed(0)
    logits = torch.randn(50, 300)
    best = logits.argmax(-1).tolist()
    params: dict[str, Any]
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-6}, {"top_p": 1e-9}, {"min_p": 1.0}):
        sampled = sample(logits.clone(), [asking(seed, **params) for seed in range(50)], NO_EOS)
        assert [one and one.token for one in sampled] == best


@pytest.mark.parametrize("temperature", [1.0001e-5, 1e-4, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiny_temperature_is_finite_and_nearly_greedy(temperature: float, dtype: torch.dtype) -> None:
    # vllm#1623
    logits = torch.tensor([[-30.0, 10.0, 60.0, 59.0, -1e4]]).to(dtype)
    params: dict[str, Any]
    for params in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}):
        assert sample(logits.clone(), [asking(temperature=temperature, **params)], NO_EOS) == [Sampled(2)]


def test_a_top_k_of_any_size_is_taken() -> None:
    # One request's number must not fail the step for all others.
    logits = torch.tensor([[0.0, 50.0]])
    assert sample(logits, [asking(top_k=2**70)], NO_EOS) == [Sampled(1)]


def test_a_row_with_nan_or_infinity_is_none_and_harms_no_other() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[0.0, 5.0, 1.0], [0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf], [-inf, 5.0, -inf]])
    params: dict[str, Any]
    for params in ({"temperature": 0.0}, {"temperature": 0.01}, {"top_p": 0.5, "min_p": 0.3}, {"logprobs": 1}):
        sampled = sample(rows.clone(), [asking(**({"temperature": 0.01} | params)) for _ in rows], NO_EOS)
        assert [one and one.token for one in sampled] == [1, None, None, None, 1]


# min_tokens


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}])
def test_end_tokens_wait_for_min_tokens(params: dict[str, Any]) -> None:
    logits = torch.tensor([[50.0, 49.0, 1.0, 48.0]])
    too_early = asking(output=2, min_tokens=3, stop_token_ids=(1, 99), **params)
    assert sample(logits.clone(), [too_early], frozenset([0])) == [Sampled(3)]
    enough = asking(output=3, min_tokens=3, stop_token_ids=(1, 99), **{**params, "temperature": 0.0})
    assert sample(logits.clone(), [enough], frozenset([0])) == [Sampled(0)]


# Random numbers


def test_uniform_numbers_are_uniform_and_independent() -> None:
    count = 100_000
    by_seed = uniforms(list(range(count)), [5] * count)
    by_position = uniforms([5] * count, list(range(count)))
    for numbers in (by_seed, by_position):
        assert (numbers >= 0).all()
        assert (numbers < 1).all()
        assert len(np.unique(numbers)) == count
        # One in a million: 4.9 standard deviations of the mean, of the variance, and of every bin
        assert abs(numbers.mean() - 0.5) < 4.9 * math.sqrt(1 / 12 / count)
        assert abs(numbers.var() - 1 / 12) < 4.9 * math.sqrt(1 / 180 / count)
        bins = np.histogram(numbers, 100, (0, 1))[0]
        assert (abs(bins - count / 100) < 5.5 * math.sqrt(count / 100)).all()
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4.9 / math.sqrt(count)
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 4.9 / math.sqrt(count)


def test_uniform_numbers_are_the_same_on_every_machine() -> None:
    # SplitMix64's first output for seed 0 is e220a8397b1dcdaf; a seed must mean the same answer after an upgrade.
    from engine.sampler import _splitmix64

    assert hex(int(_splitmix64(np.array([0], dtype=np.uint64))[0])) == "0xe220a8397b1dcdaf"
    assert uniforms([2**63 - 1], [2**40]).tolist() == uniforms([2**63 - 1], [2**40]).tolist()


def test_seeds_and_positions_are_no_sums() -> None:
    # (seed, position + 1) must not be (seed + 1, position).
    grid = uniforms([seed for seed in range(100) for _ in range(100)], [p for _ in range(100) for p in range(100)])
    assert len(np.unique(grid)) == 10_000


# Log probabilities


def test_log_probabilities_are_the_models_own() -> None:
    """Before temperature, masks and restrictions, as vLLM's."""
    torch.manual_seed(0)
    logits = torch.randn(1, 30)
    raw = logits[0].log_softmax(0)
    sequence = asking(temperature=2.0, top_k=4, logprobs=3, min_tokens=5)
    sampled = sample(logits.clone(), [sequence], frozenset([int(raw.argmax())]))[0]
    assert sampled is not None
    assert sampled.logprob == pytest.approx(float(raw[sampled.token]))
    assert sampled.rank == 1 + int((raw > raw[sampled.token]).sum())
    best = raw.topk(3)
    assert [token for token, _ in sampled.top] == best.indices.tolist()
    assert [logprob for _, logprob in sampled.top] == pytest.approx(best.values.tolist())


def test_log_probabilities_come_to_those_who_ask() -> None:
    logits = torch.tensor([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    sequences = [asking(temperature=0), asking(temperature=0, logprobs=0), asking(temperature=0, logprobs=1)]
    none, chosen, one = sample(logits, sequences, NO_EOS)
    expected = pytest.approx(3 - math.log(math.e + math.e**3))
    assert none == Sampled(1)
    assert chosen is not None
    assert (chosen.logprob, chosen.rank, chosen.top) == (expected, 1, ())
    assert one is not None
    assert [(token, pytest.approx(logprob)) for token, logprob in one.top] == [(1, one.logprob)]


def test_more_log_probabilities_than_tokens_are_all_there_are() -> None:
    sampled = sample(torch.zeros(1, 4), [asking(temperature=0, logprobs=20)], NO_EOS)[0]
    assert sampled is not None
    assert len(sampled.top) == 4
