"""Attention over a paged KV cache: packed queries in, packed outputs out. One implementation a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.native import kernels


@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one step stand. S sequences, T tokens packed without padding, one-token entries first."""

    query_lens: Sequence[int]  # [S] tokens of each sequence in this step
    context_lens: Sequence[int]  # [S] tokens of each sequence up to and including this step
    block_tables: Sequence[Sequence[int]]  # [S] each sequence's KV blocks, enough for its context
    slots: torch.Tensor  # [T] int64: where each token's K and V go, block * block_size + offset
    block_size: int


class Attention(Protocol):
    """Attention of one model's layers on one device."""

    def plan(self, batch: AttentionBatch) -> Any:
        """What all layers of a step share; computed once a step."""

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Any,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Causal attention of each token to its own sequence.

        Args:
            query: [T, H, D].
            keys, values: the cache of one layer, [blocks, block_size, H_kv, D]; this step's are in it already.
            plan: what `plan` made of this step.
            scale: factor on the scores.
            window: sliding window in tokens, the current one included, or None.
            softcap: scores become softcap * tanh(scores / softcap), or None.

        Returns:
            [T, H, D].
        """


@dataclass(frozen=True)
class KVCache:
    """K and V of all layers, allocated once. keys[l], values[l]: [blocks, block_size, H_kv, D]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        def make() -> torch.Tensor:
            shape = (num_blocks, block_size, num_kv_heads, head_dim)
            if device.type == "cpu":
                # numpy's zeros are the kernel's: they cost no memory before they are written to.
                size = num_blocks * block_size * num_kv_heads * head_dim * dtype.itemsize
                return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        # Zeros, not garbage: a masked slot still takes part in a product, and 0 * NaN is NaN.
        return cls([make() for _ in range(num_layers)], [make() for _ in range(num_layers)])

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero blocks in all layers."""
        for cache in (*self.keys, *self.values):
            cache.index_fill_(0, blocks, 0)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store this step's K and V, each [T, H_kv, D], at `slots` [T]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)


@dataclass(frozen=True)
class PagedAttention:
    """The attention of one step, as a model's layers see it."""

    cache: KVCache
    slots: torch.Tensor  # [T]
    attention: Attention
    plan: Any

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Stores key and value [T, H_kv, D], then attends with query [T, H, D]. Returns [T, H, D]."""
        self.cache.write(layer, self.slots, key, value)
        return self.attend(layer, query, scale, window, softcap)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """Where this step's keys and values are in the cache already. query: [T, H, D]. Returns [T, H, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return self.attention.attend(query, keys, values, self.plan, scale, window, softcap)


def attention_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    if device.type == "cuda":
        from engine.attention.varlen import VarlenAttention

        return VarlenAttention(device)
    if dtype == torch.float32:
        from engine.attention.native import NativeAttention

        if (library := kernels()) and library.paged_decode_fits(head_dim):
            return NativeAttention(library)
    from engine.attention.reference import ReferenceAttention

    return ReferenceAttention()
