"""Paged attention on a CPU in float32: decodes by a kernel of our own, prompts by torch.

Gathering each sequence's keys and values into one tensor, as plain torch has to, moves them three times.
"""

import ctypes
from dataclasses import dataclass

import torch

from engine.attention import AttentionBatch
from engine.attention.reference import Group, ReferenceAttention


@dataclass(frozen=True)
class Plan:
    tables: torch.Tensor  # [B, width] int64, of the sequences that decode
    contexts: torch.Tensor  # [B] int64
    groups: list[Group]  # the prompts' chunks


class NativeAttention(ReferenceAttention):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def plan(self, batch: AttentionBatch) -> Plan:  # type: ignore[override]
        decodes = sum(queries == 1 for queries in batch.query_lens)
        contexts = list(batch.context_lens[:decodes])
        width = max((-(-context // batch.block_size) for context in contexts), default=0)
        tables = [[*table[:width], *[0] * (width - len(table))] for table in batch.block_tables[:decodes]]
        return Plan(
            torch.tensor(tables, dtype=torch.int64),
            torch.tensor(contexts, dtype=torch.int64),
            self.chunks(batch, decodes),
        )

    def attend(  # type: ignore[override]
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        self.attend_groups(out, query, keys, values, plan.groups, scale, window, softcap)
        batch = len(plan.contexts)
        if batch:
            if query.stride()[1:] != (query.shape[2], 1):
                query = query.contiguous()
            block_size, kv_heads = keys.shape[1:3]
            self._library.paged_decode(
                out.data_ptr(), query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(),
                plan.tables.data_ptr(), plan.contexts.data_ptr(), batch, plan.tables.shape[1], query.shape[1], kv_heads,
                query.shape[2], block_size, window or 0, scale, softcap or 0.0,
            )  # fmt: skip
        return out
