"""Paged attention against one softmax at a time, on both devices' implementations.

CUDA's `varlen_attn` runs nowhere without a GPU. A stand-in that does what its documentation says takes its place here,
so that at least the arguments it gets are right.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.attention import Attention, AttentionBatch, KVCache, attention_for
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.varlen import VarlenAttention
from engine.native import kernels
from torch.nn.attention import varlen

CPU = torch.device("cpu")
HEAD_DIM = 16
BLOCK_SIZE = 4
NUM_BLOCKS = 100


def stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn with a block table, as documented, for causal windows.

    The last query of a sequence stands at the last of its used keys.
    """
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.device == query.device
    count, heads = len(seqused_k), query.shape[1]
    assert query.dim() == 3
    assert key.dim() == value.dim() == 4
    assert cu_seq_q.shape == cu_seq_k.shape == (count + 1,)
    assert block_table.shape[0] == count
    assert int(cu_seq_q[0]) == int(cu_seq_k[0]) == 0
    assert int(cu_seq_q[-1]) == len(query)
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k == int(cu_seq_k.diff().max())
    assert enable_gqa or heads == key.shape[2]
    assert num_splits == 1
    left, right = window_size
    assert right == 0
    out = torch.full_like(query, float("nan"))
    for index in range(count):
        first, end = int(cu_seq_q[index]), int(cu_seq_q[index + 1])
        used = int(seqused_k[index])
        keys = key[block_table[index].long()].flatten(0, 1)[:used].repeat_interleave(heads // key.shape[2], 1)
        values = value[block_table[index].long()].flatten(0, 1)[:used].repeat_interleave(heads // key.shape[2], 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end], keys) * scale
        at = torch.arange(used - (end - first), used)[:, None]
        other = torch.arange(used)[None, :]
        hidden = other > at + right
        if left >= 0:
            hidden = hidden | (other < at - left)
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)
    return out


class Case:
    """Sequences with contexts of their own in scattered blocks, some decoding, some in the middle of a prompt."""

    def __init__(self, query_lens: list[int], context_lens: list[int], *, heads: int, kv_heads: int) -> None:
        rng = random.Random(sum(context_lens))
        torch.manual_seed(sum(context_lens))
        blocks = list(range(NUM_BLOCKS))
        rng.shuffle(blocks)
        self.kv_heads = kv_heads
        self.tables = []
        for context in context_lens:
            # one block more than the context needs, as after a step that did not fill it
            self.tables.append([blocks.pop() for _ in range(-(-context // BLOCK_SIZE) + 1)])
        self.keys = [torch.randn(context, kv_heads, HEAD_DIM) for context in context_lens]
        self.values = [torch.randn(context, kv_heads, HEAD_DIM) for context in context_lens]
        self.query = torch.randn(sum(query_lens), heads, HEAD_DIM)
        self.query_lens, self.context_lens = query_lens, context_lens
        self.cache = KVCache.allocate(1, NUM_BLOCKS, BLOCK_SIZE, kv_heads, HEAD_DIM, torch.float32, CPU)
        # What others left behind must not matter.
        self.cache.keys[0].normal_(0, 100)
        self.cache.values[0].normal_(0, 100)
        new = []
        for index, (count, context) in enumerate(zip(query_lens, context_lens, strict=True)):
            slots = self.slots(index, range(context))
            self.cache.write(0, slots, self.keys[index], self.values[index])
            new.append(slots[context - count :])
        self.batch = AttentionBatch(query_lens, context_lens, self.tables, torch.cat(new), BLOCK_SIZE)

    def slots(self, index: int, positions: range) -> torch.Tensor:
        table = self.tables[index]
        return torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions])

    def by(self, attention: Attention, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
        plan = attention.plan(self.batch)
        return attention.attend(self.query, self.cache.keys[0], self.cache.values[0], plan, scale, window, softcap)

    def oracle(self, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
        """One query, one head at a time, from the unpaged keys and values."""
        rows = []
        row = 0
        for count, context, keys, values in zip(
            self.query_lens, self.context_lens, self.keys, self.values, strict=True
        ):
            for position in range(context - count, context):
                first = 0 if window is None else max(0, position - window + 1)
                seen = slice(first, position + 1)
                heads = []
                for head in range(self.query.shape[1]):
                    kv_head = head * self.kv_heads // self.query.shape[1]
                    scores = keys[seen, kv_head] @ self.query[row, head] * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    heads.append(scores.softmax(0) @ values[seen, kv_head])
                rows.append(torch.stack(heads))
                row += 1
        return torch.stack(rows)


def native() -> NativeAttention:
    library = kernels()
    if library is None:
        pytest.skip("no C++ compiler")
    return NativeAttention(library)


IMPLEMENTATIONS: dict[str, Callable[[], Any]] = {
    "torch": ReferenceAttention,
    "native": native,
    "cuda": lambda: VarlenAttention(CPU),
}
BATCHES = {
    "one_decode": ([1], [13]),
    "first_token": ([1], [1]),
    "decodes": ([1, 1, 1, 1, 1], [1, 3, 16, 17, 40]),
    "one_prompt": ([11], [11]),
    "chunk": ([6], [21]),
    "chunks": ([2, 9, 4], [2, 30, 16]),
    "many_decodes": ([1] * 19, list(range(1, 20))),
    "mixed": ([1, 1, 1, 5, 12, 3], [9, 33, 4, 5, 27, 8]),
}


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (8, 2)])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("device", ["torch", "torch_softcap", "native", "native_softcap", "cuda"])
def test_every_query_sees_its_own_past_and_nothing_else(
    device: str, name: str, heads: int, kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    attention = IMPLEMENTATIONS[device.partition("_")[0]]()
    softcap = 0.7 if device.endswith("softcap") else None
    case = Case(*BATCHES[name], heads=heads, kv_heads=kv_heads)
    result = case.by(attention, 0.4, window, softcap)
    torch.testing.assert_close(result, case.oracle(0.4, window, softcap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
def test_the_kernel_computes_what_plain_torch_computes(head_dim: int) -> None:
    torch.manual_seed(0)
    blocks = torch.randperm(60).tolist()
    lens = [1, 300, 511, 16]
    tables = [[blocks.pop() for _ in range(-(-length // 32))] for length in lens]
    batch = AttentionBatch([1] * 4, lens, tables, torch.zeros(4, dtype=torch.int64), 32)
    keys, values = torch.randn(2, 60, 32, 3, head_dim)
    query = 10 * torch.randn(4, 15, head_dim)[:, :9]  # sharp, and not contiguous, as a slice of a larger product is
    results = [
        attention.attend(query, keys, values, attention.plan(batch), head_dim**-0.5, None, None)
        for attention in (native(), ReferenceAttention())
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_the_kernel_does_not_hide_a_broken_sequence() -> None:
    case = Case([1, 1], [9, 33], heads=4, kv_heads=2)
    case.query[1, 2] = float("nan")
    result = case.by(native(), 0.4, None, None)
    assert result[1, 2].isnan().all()
    assert result[0].isfinite().all()


def test_without_a_compiler_plain_torch_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level("INFO"):
        monkeypatch.setattr("engine.attention.kernels", kernels.__wrapped__)
        assert type(attention_for(CPU, torch.float32, 64)) is ReferenceAttention
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_named_and_plain_torch_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr("engine.attention.kernels", kernels.__wrapped__)
    assert type(attention_for(CPU, torch.float32, 64)) is ReferenceAttention
    assert "could not be compiled" in caplog.text


def test_the_kernel_is_for_single_precision_and_heads_of_usual_sizes() -> None:
    native()  # where there is no kernel nothing is to be tested
    assert type(attention_for(CPU, torch.float32, 64)) is NativeAttention
    assert type(attention_for(CPU, torch.bfloat16, 64)) is ReferenceAttention
    assert type(attention_for(CPU, torch.float32, 12)) is ReferenceAttention


@pytest.mark.parametrize("attention", ["torch", "native"])
def test_a_plan_serves_layers_with_and_without_a_window(attention: Any) -> None:
    case = Case(*BATCHES["mixed"], heads=4, kv_heads=2)
    attention = IMPLEMENTATIONS[attention]()
    plan = attention.plan(case.batch)
    for window in (3, None, 5, 3):
        result = attention.attend(case.query, case.cache.keys[0], case.cache.values[0], plan, 1.0, window, None)
        torch.testing.assert_close(result, case.oracle(1.0, window, None), rtol=1e-5, atol=1e-5)


def test_decodes_read_less_padding_than_context() -> None:
    lens = [1, 2, 3, 5, 9, 17, 33, 60, 64]
    case = Case([1] * len(lens), lens, heads=4, kv_heads=2)
    groups = ReferenceAttention().plan(case.batch)
    read = sum(len(group.context_lens) * group.length for group in groups)
    assert read <= 2 * sum(lens) + BLOCK_SIZE * len(lens)


def test_cuda_refuses_a_soft_cap_instead_of_ignoring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    case = Case(*BATCHES["mixed"], heads=4, kv_heads=2)
    with pytest.raises(NotImplementedError, match="soft cap"):
        case.by(VarlenAttention(CPU), 1.0, None, 30.0)


def test_the_stand_in_takes_torchs_own_arguments() -> None:
    import inspect

    ours, torchs = inspect.signature(stand_in).parameters, inspect.signature(varlen.varlen_attn).parameters
    assert [p for p in torchs if p in ours] == list(ours)


def test_the_cache_keeps_layers_and_slots_apart() -> None:
    cache = KVCache.allocate(2, 3, 4, 1, 2, torch.float32, CPU)
    cache.write(1, torch.tensor([11, 4]), torch.full((2, 1, 2), 5.0), torch.full((2, 1, 2), 6.0))
    assert cache.keys[0].eq(0).all()
    assert cache.keys[1].sum() == 20
    assert cache.values[1][2, 3].tolist() == [[6.0, 6.0]]
    assert cache.keys[1][1, 0].tolist() == [[5.0, 5.0]]
