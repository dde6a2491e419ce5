"""Paged attention in plain torch, for any device: the others' yardstick, and what a CPU falls back on."""

import math
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention import AttentionBatch


@dataclass
class Group:
    """Sequences computed by one call: B of them, Q queries each, contexts padded to L = blocks * block_size.

    Decodes with contexts of a similar length share a group, so that less than half of what is read is padding.
    A prompt's chunk is a group of its own.
    """

    rows: torch.Tensor | slice  # the queries' places in the packed batch, B * Q
    blocks: torch.Tensor  # [B * blocks]
    context_lens: torch.Tensor  # [B]
    num_queries: int
    length: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, Q, L]: 0 where a query may look, -inf elsewhere. The same for all layers with this window."""
        if window not in self.masks:
            device = self.context_lens.device
            first = (self.context_lens - self.num_queries)[:, None, None]
            query = first + torch.arange(self.num_queries, device=device)[None, :, None]
            key = torch.arange(self.length, device=device)[None, None, :]
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
            self.masks[window] = mask[:, None]
        return self.masks[window]


class ReferenceAttention:
    def __init__(self) -> None:
        # Gathered keys and values, for one layer after the other. Fresh memory for each would cost far more than the
        # copying: what is this large comes from the kernel, page by page.
        self._gathered = [torch.empty(0), torch.empty(0)]

    def plan(self, batch: AttentionBatch) -> list[Group]:
        device = batch.slots.device
        decodes: dict[int, list[int]] = {}
        count = sum(queries == 1 for queries in batch.query_lens)
        for index in range(count):  # one-token entries come first: a sequence's place is its row
            decodes.setdefault((batch.context_lens[index] - 1).bit_length(), []).append(index)
        together = [
            _group(batch, indices, torch.tensor(indices, device=device), device) for indices in decodes.values()
        ]
        return together + self.chunks(batch, count)

    def chunks(self, batch: AttentionBatch, first: int) -> list[Group]:
        """The prompts' chunks: all sequences from the `first` on."""
        groups, row = [], first
        for index in range(first, len(batch.query_lens)):
            end = row + batch.query_lens[index]
            groups.append(_group(batch, [index], slice(row, end), batch.slots.device))
            row = end
        return groups

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: list[Group],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self.attend_groups(out, query, keys, values, plan, scale, window, softcap)
        return out

    def attend_groups(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        groups: list[Group],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """As `attend`, into the groups' rows of `out`."""
        for group in groups:
            size = len(group.context_lens)
            q = query[group.rows].unflatten(0, (size, group.num_queries)).transpose(1, 2)  # [B, H, Q, D]
            k, v = (self._gather(which, cache, group, size) for which, cache in enumerate((keys, values)))
            mask = group.mask(window, query.dtype)
            # Queries that share a KV head stand beside one another as further queries, so that K and V are read once.
            heads, kv_heads = q.shape[1], k.shape[1]
            repeats = heads // kv_heads
            q = q.reshape(size, kv_heads, repeats * group.num_queries, q.shape[-1])
            if group.num_queries > 1:
                mask = mask.repeat(1, 1, repeats, 1)
            if softcap is None:
                result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            else:
                scores = softcap * torch.tanh(torch.matmul(q, k.transpose(-1, -2)) * (scale / softcap))
                result = torch.matmul(torch.softmax((scores + mask).float(), dim=-1).to(q.dtype), v)
            result = result.reshape(size, heads, group.num_queries, -1)
            out[group.rows] = result.transpose(1, 2).flatten(0, 1)

    def _gather(self, which: int, cache: torch.Tensor, group: Group, size: int) -> torch.Tensor:
        """[B, H_kv, L, D] out of a layer's cache. Good until the next call for keys, or for values."""
        shape = (len(group.blocks), *cache.shape[1:])
        needed = math.prod(shape)
        buffer = self._gathered[which]
        if buffer.numel() < needed or buffer.dtype != cache.dtype or buffer.device != cache.device:
            buffer = self._gathered[which] = torch.empty(needed, dtype=cache.dtype, device=cache.device)
        found = torch.index_select(cache, 0, group.blocks, out=buffer[:needed].view(shape))
        return found.view(size, group.length, *cache.shape[2:]).transpose(1, 2)


def _group(batch: AttentionBatch, indices: list[int], rows: torch.Tensor | slice, device: torch.device) -> Group:
    lens = [batch.context_lens[index] for index in indices]
    num_blocks = -(-max(lens) // batch.block_size)
    blocks = []
    for index in indices:
        table = batch.block_tables[index][:num_blocks]
        # What stands in the padding is masked; any block will do.
        blocks.extend([*table, *[table[0]] * (num_blocks - len(table))])
    return Group(
        rows=rows,
        blocks=torch.tensor(blocks, device=device),
        context_lens=torch.tensor(lens, device=device),
        num_queries=batch.query_lens[indices[0]],
        length=num_blocks * batch.block_size,
    )
