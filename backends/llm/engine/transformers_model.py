"""Any causal LM of transformers, its attention replaced by ours."""

from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from engine.attention import PagedAttention

ATTENTION_NAME = "triton_batching_paged"  # as transformers knows it


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    packed, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    return paged(layer, packed, keys, values, scaling, sliding_window, softcap)[None], None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)


class TransformersModel:
    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """tokens, positions [T]; the logits [R, vocabulary] of `rows` [R] among them."""
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            paged=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
