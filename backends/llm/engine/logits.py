"""What requests change about their logits before a token is chosen, in vLLM's order: which tokens may be chosen at all,
biases, penalties. All rows at once: a step with many such requests costs a few index operations more."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import torch

from engine.sequence import Sequence

NEVER = float("-inf")


def process(logits: torch.Tensor, sequences: Items[Sequence], eos_token_ids: frozenset[int]) -> None:
    """logits: [R, vocabulary] float, a row for each sequence; changed in place."""
    _guide(logits, sequences)
    _allow(logits, sequences)
    _ban(logits, sequences, eos_token_ids)
    _bias(logits, sequences)
    _penalise(logits, sequences)


def _guide(logits: torch.Tensor, sequences: Items[Sequence]) -> None:
    guides = {row: sequence.guide for row, sequence in enumerate(sequences) if sequence.guide}
    if guides:
        bits = np.unpackbits(np.stack([guide.allowed() for guide in guides.values()]), axis=1, bitorder="little")
        shut = torch.from_numpy(bits[:, : logits.shape[-1]] == 0).to(logits.device)
        rows = list(guides)
        logits[rows] = logits[rows].masked_fill(shut, NEVER)


def _allow(logits: torch.Tensor, sequences: Items[Sequence]) -> None:
    choosy = [row for row, sequence in enumerate(sequences) if sequence.params.allowed_token_ids]
    if choosy:
        shut = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        shut[choosy] = True
        rows, tokens = _pairs((row, sequences[row].params.allowed_token_ids) for row in choosy)
        shut[rows, tokens] = False
        logits.masked_fill_(shut, NEVER)


def _ban(logits: torch.Tensor, sequences: Items[Sequence], eos_token_ids: frozenset[int]) -> None:
    banned: list[tuple[int, list[int]]] = []
    for row, sequence in enumerate(sequences):
        if sequence.num_output < sequence.params.min_tokens:
            banned.append((row, [*eos_token_ids, *sequence.params.stop_token_ids]))
        if sequence.banned:
            banned.append((row, [word[-1] for word in sequence.banned if _would_end(sequence, word)]))
    if banned:
        rows, tokens = _pairs((row, [t for t in tokens if t < logits.shape[-1]]) for row, tokens in banned)
        logits[rows, tokens] = NEVER


def _would_end(sequence: Sequence, word: tuple[int, ...]) -> bool:
    """Whether the answer stands one token before the end of this word."""
    before = len(word) - 1
    return before <= sequence.num_output and sequence.tokens[len(sequence.tokens) - before :] == list(word[:-1])


def _bias(logits: torch.Tensor, sequences: Items[Sequence]) -> None:
    biased = [(row, sequence.params.logit_bias) for row, sequence in enumerate(sequences) if sequence.params.logit_bias]
    if biased:
        rows, tokens = _pairs((row, [token for token, _ in bias]) for row, bias in biased)
        values = torch.tensor([value for _, bias in biased for _, value in bias], device=logits.device)
        logits.index_put_((rows, tokens), values, accumulate=True)


def _penalise(logits: torch.Tensor, sequences: Items[Sequence]) -> None:
    strict = [row for row, sequence in enumerate(sequences) if sequence.params.has_penalties]
    if not strict:
        return
    params = [sequences[row].params for row in strict]
    seen = [np.unique(np.array(sequences[row].tokens)) for row in strict]
    rows, tokens = _pairs(zip(strict, seen, strict=True))
    factor = _each(logits, [p.repetition_penalty for p in params], seen)
    before = logits[rows, tokens]
    logits[rows, tokens] = torch.where(before > 0, before / factor, before * factor)
    answers = [sequences[row].tokens[len(sequences[row].prompt) :] for row in strict]
    counted = [np.unique(np.array(answer, dtype=np.int64), return_counts=True) for answer in answers]
    rows, tokens = _pairs((row, known) for row, (known, _) in zip(strict, counted, strict=True))
    known = [known for known, _ in counted]
    counts = torch.from_numpy(np.concatenate([count for _, count in counted])).to(logits)
    penalty = counts * _each(logits, [p.frequency_penalty for p in params], known)
    logits[rows, tokens] -= penalty + _each(logits, [p.presence_penalty for p in params], known)


def _each(logits: torch.Tensor, values: list[float], groups: Items[np.ndarray]) -> torch.Tensor:
    """Each value as often as its group has members."""
    return torch.from_numpy(np.repeat(np.array(values), [len(group) for group in groups])).to(logits)


def _pairs(tokens_of: Iterable[tuple[int, Items[int] | np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index tensors for all (row, token)."""
    listed = list(tokens_of)
    rows = np.repeat(np.array([row for row, _ in listed], dtype=np.int64), [len(tokens) for _, tokens in listed])
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in listed])
    return torch.from_numpy(rows), torch.from_numpy(tokens)
