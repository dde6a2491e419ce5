"""One pass over the weights for all tokens of a step. The only file of the engine that touches the device."""

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.attention import AttentionBatch, KVCache, PagedAttention, attention_for
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.linear import has_fast_kernel
from engine.llama import Llama
from engine.sampler import Sampled, sample
from engine.scheduler import Step
from engine.sequence import Sequence
from engine.transformers_model import TransformersModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutput:
    sampled: dict[Sequence, Sampled] = field(default_factory=dict)
    failed: dict[Sequence, str] = field(default_factory=dict)  # this sequence alone failed, and why


class Decoder(Protocol):
    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        """tokens, positions [T]; the logits [R, vocabulary] of `rows` [R] among them."""


def decoder_for(model: Any, config: EngineConfig) -> Decoder:
    """Ours where the architecture is one that it knows, transformers' own otherwise."""
    quantization = config.quantization
    if config.decoder != "transformers" and Llama.fits(model):
        if quantization == "auto":
            quantization = "int8" if has_fast_kernel(model.lm_head.weight) else "none"
        log.info("the fused decoder, quantization %s", quantization)
        return Llama(model, quantization)
    name = type(model).__name__
    if config.decoder == "fused":
        raise ConfigError(f"decoder is 'fused', but the model is a {name}; allowed: 'auto' or 'transformers'")
    if quantization == "int8":
        raise ConfigError(
            f"quantization is 'int8', but a {name} is run by transformers' decoder; allowed: 'none' or 'auto'"
        )
    log.info("transformers' decoder of a %s", name)
    return TransformersModel(model)


class ModelRunner:
    """A decoder, its KV cache, and the sampler."""

    def __init__(self, model: Any, config: EngineConfig, eos_token_ids: frozenset[int]) -> None:
        """`model`: a transformers causal LM."""
        self.decoder = decoder_for(model, config)
        self._dtype: torch.dtype = model.dtype
        self.eos_token_ids = eos_token_ids
        self.device: torch.device = model.device
        self.block_size = config.block_size or (256 if self.device.type == "cuda" else 16)
        text = model.config.get_text_config()
        heads = text.num_attention_heads
        self._kv_heads = getattr(text, "num_key_value_heads", None) or heads
        self._head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        self._num_layers = text.num_hidden_layers
        self.num_blocks = config.num_kv_blocks or self._affordable_blocks(config, text.max_position_embeddings)
        self.cache = KVCache.allocate(
            self._num_layers, self.num_blocks, self.block_size, self._kv_heads, self._head_dim, self._dtype, self.device
        )
        self.attention = attention_for(self.device, self._dtype, self._head_dim)
        self.vocab_size: int = text.vocab_size

    def _affordable_blocks(self, config: EngineConfig, trained_for: int) -> int:
        """As many blocks as the memory fraction pays for, and no more than all seats can fill."""
        block_bytes = 2 * self._num_layers * self.block_size * self._kv_heads * self._head_dim * self._dtype.itemsize
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            fraction = config.memory_fraction or 0.9
        else:
            free = _available_memory()
            fraction = config.memory_fraction or 0.1
        paid = int(free * fraction) // block_bytes
        length = config.max_model_len or trained_for
        usable = config.max_num_seqs * -(-length // self.block_size)
        if paid < 1:
            wanted = f"{block_bytes:,} bytes for one KV block, {free:,} are free"
            raise ConfigError(f"memory_fraction is {fraction}: too little for the KV cache ({wanted})")
        return min(paid, usable)

    @torch.inference_mode()
    def run(self, step: Step) -> StepOutput:
        """Compute the step and sample for every sequence whose last known token it computes."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_rows: list[int] = []
        sampling: list[Sequence] = []
        size = self.block_size
        for entry in step.scheduled:
            sequence = entry.sequence
            start, end = sequence.num_computed, sequence.num_computed + entry.num_tokens
            tokens += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [sequence.blocks[p // size] * size + p % size for p in range(start, end)]
            if entry.samples:
                last_rows.append(len(tokens) - 1)
                sampling.append(sequence)
        batch = AttentionBatch(
            query_lens=[entry.num_tokens for entry in step.scheduled],
            context_lens=[entry.sequence.num_computed + entry.num_tokens for entry in step.scheduled],
            block_tables=[entry.sequence.blocks for entry in step.scheduled],
            slots=self._on_device(slots),
            block_size=size,
        )
        # NaN that a failed request left in a block's masked slots would reach whoever holds it next.
        if fresh := [slot // size for slot in slots if slot % size == 0]:
            self.cache.clear(self._on_device(fresh))
        attention = PagedAttention(self.cache, batch.slots, self.attention, self.attention.plan(batch))
        # At least one row: slicing with nothing would mean all of them to some models.
        rows = self._on_device(last_rows or [len(tokens) - 1])
        logits = self.decoder.logits(self._on_device(tokens), self._on_device(positions), rows, attention)
        if not sampling:
            return StepOutput()
        result = StepOutput()
        for sequence, one in zip(sampling, sample(logits, sampling, self.eos_token_ids), strict=True):
            if one is None:
                result.failed[sequence] = _why_no_token(sequence)
            elif sequence.guide and not sequence.guide.accept(one.token):
                result.failed[sequence] = f"structured_outputs can't go on: {sequence.guide.error}"
            else:
                result.sampled[sequence] = one
        return result

    def _on_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def _why_no_token(sequence: Sequence) -> str:
    params = sequence.params
    rules = sequence.guide or params.allowed_token_ids or params.logit_bias or sequence.banned
    return "the model computed NaN or infinite logits" + (", or the request's rules leave no token" if rules else "")


def _available_memory() -> int:
    """Bytes that Linux would give a process without swapping, or the container's limit where that is less."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as current,
        ):
            available = min(available, int(limit.read()) - int(current.read()))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        pass
    return max(available, 0)
