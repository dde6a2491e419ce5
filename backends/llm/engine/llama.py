"""The Llama family's decoder with fewer and larger operations than transformers' own, for the same weights.

Queries, keys and values are one product, gate and up another; rotary embedding is one complex multiplication.
"""

from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import PagedAttention
from engine.linear import KINDS, Linear

# Rotary embeddings whose angles are a function of the position alone. Others change with the sequence's length.
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


class Llama:
    def __init__(self, model: Any, quantization: str) -> None:
        """`model`: a transformers causal LM for which `fits` is true. Raises ConfigError."""
        config = model.config
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        self._embedding: torch.Tensor = model.model.embed_tokens.weight.detach()
        self._norm: torch.Tensor = model.model.norm.weight.detach()
        self._rotation = _rotation(model.model.rotary_emb, config.max_position_embeddings, self._embedding)
        kind = KINDS[quantization]
        self._layers = [
            _Layer(layer, kind, self._heads, self._kv_heads, self._head_dim) for layer in model.model.layers
        ]
        self._head: Linear = kind(model.lm_head.weight.detach(), None)

    @staticmethod
    def fits(model: Any) -> bool:
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            type(model).__name__ == "LlamaForCausalLM"
            and config.hidden_act == "silu"
            and rope.get("rope_type", "default") in STATIC_ROPE
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """tokens, positions [T]; the logits [R, vocabulary] of `rows` [R] among them."""
        hidden = self._embedding[tokens]
        rotation = self._rotation[positions][:, None]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normalised(hidden, layer.attention_norm))
            query, key, value = self._rotated(qkv, rotation)
            seen = attention(index, query, key, value, scale=self._head_dim**-0.5)
            hidden += layer.out(seen.flatten(1))
            gate, up = layer.gate_up(self._normalised(hidden, layer.mlp_norm)).chunk(2, -1)
            hidden += layer.down(F.silu(gate).mul_(up))
        return self._head(self._normalised(hidden[rows], self._norm))

    def _normalised(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._eps)

    def _rotated(self, qkv: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [T, H, D], key and value [T, H_kv, D] out of [T, (H + 2 * H_kv) * D]."""
        heads = qkv.unflatten(-1, (-1, self._head_dim))
        turned, value = heads.split((self._heads + self._kv_heads, self._kv_heads), 1)
        # float: there are no complex numbers of 16 bits.
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * rotation).flatten(-2).to(qkv.dtype)
        query, key = turned.split((self._heads, self._kv_heads), 1)
        return query, key, value


class _Layer:
    def __init__(self, layer: Any, kind: Any, heads: int, kv_heads: int, head_dim: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm: torch.Tensor = layer.input_layernorm.weight.detach()
        self.mlp_norm: torch.Tensor = layer.post_attention_layernorm.weight.detach()
        # transformers turns the pair (i, i + D / 2), a complex number is the pair (2i, 2i + 1): outputs change places,
        # those of queries and keys alike, so that their products stay what they were.
        order = torch.arange(head_dim).view(2, -1).T.flatten()
        turned = torch.cat([head * head_dim + order for head in range(heads)])
        turned_kv = turned[: kv_heads * head_dim]
        projections = [(attention.q_proj, turned), (attention.k_proj, turned_kv), (attention.v_proj, slice(None))]
        self.qkv: Linear = kind(*_joined(projections))
        self.out: Linear = kind(*_joined([(attention.o_proj, slice(None))]))
        self.gate_up: Linear = kind(*_joined([(mlp.gate_proj, slice(None)), (mlp.up_proj, slice(None))]))
        self.down: Linear = kind(*_joined([(mlp.down_proj, slice(None))]))


def _joined(projections: list[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights one above the other, each with its outputs in the given order, and biases likewise."""
    weight = torch.cat([linear.weight.detach()[order] for linear, order in projections])
    if projections[0][0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias.detach()[order] for linear, order in projections])


def _rotation(rotary: Any, length: int, like: torch.Tensor) -> torch.Tensor:
    """[length, D / 2] complex: what turns the pairs of a head at each position, from transformers' own angles."""
    positions = torch.arange(length, device=like.device)[None]
    cosine, sine = rotary(like.new_empty(0, dtype=torch.float32), positions)
    half = cosine.shape[-1] // 2
    return torch.complex(cosine[0, :, :half].float(), sine[0, :, :half].float())
