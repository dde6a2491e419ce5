"""The next token of every sequence of a step, in one batch.

Randomness is a function of (seed, position) alone, so a result depends neither on the batch, nor on how the prompt was
cut into chunks, nor on preemption: one uniform number a token, and the inverse of the cumulative distribution.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch

from engine.logits import process
from engine.sequence import Sequence

# Nucleus sampling needs the likeliest tokens in order. This many nearly always hold top_p; if not, all are sorted.
CANDIDATES = 1024


class Sampled(NamedTuple):
    token: int
    logprob: float | None = None
    rank: int | None = None  # 1: the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), likeliest first


def sample(logits: torch.Tensor, sequences: Items[Sequence], eos_token_ids: frozenset[int]) -> list[Sampled | None]:
    """Args:
        logits: [R, vocabulary], a row for each sequence, in any float type; changed in place.

    Returns:
        For each row what was sampled, or None where the row holds NaN, or the request's own rules
        leave no token, so that one bad row harms no other.
    """
    logits = logits.float()
    raw = logits.log_softmax(-1) if any(s.params.logprobs is not None for s in sequences) else None
    process(logits, sequences, eos_token_ids)
    best, tokens = logits.max(-1)  # max passes NaN on
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(logits[rows].nan_to_num(0.0), [sequences[row] for row in drawn])
    good = best.isfinite().tolist()
    chosen = tokens.tolist()
    return [
        _with_logprobs(token, sequence, raw, row) if ok else None
        for row, (token, ok, sequence) in enumerate(zip(chosen, good, sequences, strict=True))
    ]


def _draw(logits: torch.Tensor, sequences: Items[Sequence]) -> torch.Tensor:
    """Temperature, then min_p, top_k and top_p; [R] tokens."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    params = [sequence.params for sequence in sequences]
    probs = (logits / column([p.temperature for p in params])).softmax(-1)
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]) * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0.0)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        size = probs.shape[-1]
        top_k = [p.top_k if 0 < p.top_k < size else size for p in params]
        probs = _restrict(probs, top_k, [p.top_p for p in params])
    cumulative = probs.double().cumsum(-1)
    uniform = uniforms([s.seed for s in sequences], [len(s.tokens) for s in sequences])
    target = torch.from_numpy(uniform).to(device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)


def _restrict(probs: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Zero what top_k and top_p leave out. Returns probabilities in the order of the vocabulary.

    The order matters: the same uniform number must pick the same token however many candidates there are.
    """
    size = probs.shape[-1]
    k = torch.tensor(top_k, device=probs.device)[:, None]
    p = torch.tensor(top_p, dtype=torch.float64, device=probs.device)[:, None]
    count = min(size, max(CANDIDATES, *[value for value in top_k if value < size], 1))
    ordered, ids = probs.topk(count, dim=-1)
    total = _kept_mass(probs, ordered, k)
    before = ordered.double().cumsum(-1) - ordered  # probability of all that are likelier
    keep = (before < p * total) & (torch.arange(count, device=probs.device) < k)
    undecided = keep[:, -1] & (k[:, 0] > count) & (p[:, 0] < 1)
    if count < size and bool(undecided.any()):
        ordered, ids = probs.sort(dim=-1, descending=True)
        before = ordered.double().cumsum(-1) - ordered
        keep = (before < p * total) & (torch.arange(size, device=probs.device) < k)
    kept = torch.zeros_like(probs).scatter_(-1, ids, torch.where(keep, ordered, 0.0))
    unrestricted = (k >= size) & (p >= 1)
    return torch.where(unrestricted, probs, kept)


def _kept_mass(probs: torch.Tensor, ordered: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What top_p is a share of: the probability of all that min_p and top_k left, [R, 1]."""
    inside = torch.arange(ordered.shape[-1], device=probs.device) < k
    within_k = torch.where(inside, ordered, 0.0).double().sum(-1, keepdim=True)
    return torch.where(k < probs.shape[-1], within_k, probs.double().sum(-1, keepdim=True))


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    """Numbers in [0, 1), a function of seed and position. SplitMix64 (Steele, Lea, Flood 2014), twice."""
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    mixed = _splitmix64(_splitmix64(seed) ^ position)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _with_logprobs(token: int, sequence: Sequence, raw: torch.Tensor | None, row: int) -> Sampled:
    wanted = sequence.params.logprobs
    if raw is None or wanted is None:
        return Sampled(token)
    logprob = raw[row, token]
    rank = int((raw[row] > logprob).sum()) + 1
    values, ids = raw[row].topk(min(wanted, raw.shape[-1]))
    return Sampled(token, float(logprob), rank, tuple(zip(ids.tolist(), values.tolist(), strict=True)))
