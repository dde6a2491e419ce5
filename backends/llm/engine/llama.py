"""The Llama family's decoder with fewer and larger operations than transformers' own, for the same weights.

Queries, keys and values are one product, gate and up another; rotary embedding is one complex multiplication, or, on
a CPU with a compiler, one function together with the writing of keys and values.
"""

from typing import Any

import torch

from engine.attention import PagedAttention
from engine.linear import Linear, linear
from engine.native import kernels

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
        self._layers = [
            _Layer(layer, quantization, self._heads, self._kv_heads, self._head_dim) for layer in model.model.layers
        ]
        self._head: Linear = linear(model.lm_head.weight.detach(), None, quantization)
        on_cpu = self._embedding.device.type == "cpu" and self._embedding.dtype == torch.float32
        self._library = kernels() if on_cpu else None

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
        scale = self._head_dim**-0.5
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.normed(hidden, layer.attention_norm, self._eps)
            query = self._turned_and_stored(qkv, positions, attention, index)
            layer.out.add_to(hidden, attention.attend(index, query, scale).flatten(1))
            layer.down.add_to(hidden, layer.gate_up.gated(hidden, layer.mlp_norm, self._eps))
        return self._head.normed(hidden[rows], self._norm, self._eps)

    def _turned_and_stored(
        self, qkv: torch.Tensor, positions: torch.Tensor, attention: PagedAttention, layer: int
    ) -> torch.Tensor:
        """The queries [T, H, D] of qkv [T, (H + 2 * H_kv) * D]; its keys and values go into the cache."""
        heads = qkv.unflatten(-1, (-1, self._head_dim))
        if self._library:
            keys, values = attention.cache.keys[layer], attention.cache.values[layer]
            self._library.rotate_and_store(
                qkv.data_ptr(), len(qkv), self._heads, self._kv_heads, self._head_dim, self._rotation.data_ptr(),
                positions.data_ptr(), attention.slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
            )  # fmt: skip
            return heads[:, : self._heads]
        turned, value = heads.split((self._heads + self._kv_heads, self._kv_heads), 1)
        # float: there are no complex numbers of 16 bits.
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self._rotation[positions][:, None]).flatten(-2).to(qkv.dtype)
        query, key = turned.split((self._heads, self._kv_heads), 1)
        attention.cache.write(layer, attention.slots, key, value)
        return query


class _Layer:
    def __init__(self, layer: Any, quantization: str, heads: int, kv_heads: int, head_dim: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm: torch.Tensor = layer.input_layernorm.weight.detach()
        self.mlp_norm: torch.Tensor = layer.post_attention_layernorm.weight.detach()
        # transformers turns the pair (i, i + D / 2), a complex number is the pair (2i, 2i + 1): outputs change places,
        # those of queries and keys alike, so that their products stay what they were.
        order = torch.arange(head_dim).view(2, -1).T.flatten()
        turned = torch.cat([head * head_dim + order for head in range(heads)])
        turned_kv = turned[: kv_heads * head_dim]
        projections = [(attention.q_proj, turned), (attention.k_proj, turned_kv), (attention.v_proj, slice(None))]
        self.qkv = linear(*_joined(projections), quantization)
        self.out = linear(*_joined([(attention.o_proj, slice(None))]), quantization)
        both = [(mlp.gate_proj, slice(None)), (mlp.up_proj, slice(None))]
        self.gate_up = linear(*_joined(both), quantization, gated=True)
        self.down = linear(*_joined([(mlp.down_proj, slice(None))]), quantization)


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
