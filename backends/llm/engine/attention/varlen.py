"""Paged attention on CUDA: torch's own `varlen_attn` with a block table (torch >= 2.13).

Not run on a GPU yet: the development machines have none. The arguments built here are tested against the reference by
a stand-in that does what `torch.nn.attention.varlen.varlen_attn` documents.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.attention import varlen

from engine.attention import AttentionBatch


@dataclass(frozen=True)
class VarlenPlan:
    cu_queries: torch.Tensor  # [S + 1] int32
    cu_contexts: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32
    block_tables: torch.Tensor  # [S, max_blocks] int32
    max_query: int
    max_context: int


class VarlenAttention:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def plan(self, batch: AttentionBatch) -> VarlenPlan:
        used = [-(-context // batch.block_size) for context in batch.context_lens]
        widest = max(used)
        tables = [
            [*table[:count], *[0] * (widest - count)] for table, count in zip(batch.block_tables, used, strict=True)
        ]
        return VarlenPlan(
            cu_queries=self._int32([0, *accumulate(batch.query_lens)]),
            cu_contexts=self._int32([0, *accumulate(batch.context_lens)]),
            context_lens=self._int32(batch.context_lens),
            block_tables=self._int32(tables),
            max_query=max(batch.query_lens),
            max_context=max(batch.context_lens),
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: VarlenPlan,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if softcap is not None:
            raise NotImplementedError("varlen_attn has no soft cap on scores; models that need one run on a CPU only")
        out = varlen.varlen_attn(
            query,
            keys,
            values,
            plan.cu_queries,
            plan.cu_contexts,
            plan.max_query,
            plan.max_context,
            scale=scale,
            # flash attention's window counts the tokens left of the current one
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=plan.context_lens,
            block_table=plan.block_tables,
            # One split: results don't depend on the batch (and pytorch#194167: NaN with automatic splits on SM8x).
            num_splits=1,
        )
        assert isinstance(out, torch.Tensor)  # a tuple only when asked for more
        return out

    def _int32(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device, non_blocking=True)
