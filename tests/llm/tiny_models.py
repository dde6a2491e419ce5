"""Random models of every kind of attention we support, small enough to run hundreds of requests in a second."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from engine.transformers_model import ATTENTION_NAME

VOCABULARY = 192
WINDOW = 9  # sliding window, tokens; far less than the contexts of the tests

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    # Ten times the usual: with small weights every prompt leads to the same few tokens, and no mistake would show.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_TWO_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def _config(name: str) -> Any:
    match name:
        case "llama" | "llama_transformers":
            return transformers.LlamaConfig(**_SHAPE)
        case "llama_biased":
            return transformers.LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True)
        case "llama3":
            rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
            rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
            return transformers.LlamaConfig(**_SHAPE | {"tie_word_embeddings": True}, rope_parameters=rope)
        case "mistral":
            return transformers.MistralConfig(**_SHAPE, sliding_window=WINDOW)
        case "qwen2":
            return transformers.Qwen2Config(**_SHAPE)
        case "qwen3":
            return transformers.Qwen3Config(**_SHAPE)
        case "gemma2":
            softcaps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 7}
            return transformers.Gemma2Config(**_SHAPE, **_TWO_WINDOWS, **softcaps)
        case "gemma3":
            return transformers.Gemma3TextConfig(**_SHAPE, **_TWO_WINDOWS, query_pre_attn_scalar=7)
    raise ValueError(name)


FUSED = ("llama", "llama_biased", "llama3")  # those with a decoder of our own
FAMILIES = (*FUSED, "llama_transformers", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")


@functools.cache
def reference_model(name: str) -> Any:
    """The model as transformers runs it."""
    torch.manual_seed(1)
    # sdpa has no soft cap
    how = "eager" if name == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(_config(name), attn_implementation=how, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # zero, as they begin, they would not be missed
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@functools.cache
def paged_model(name: str) -> Any:
    """The same weights with our attention."""
    config = copy.deepcopy(reference_model(name).config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
    )
    model.load_state_dict(reference_model(name).state_dict())
    return model.eval()


@functools.cache
def expected(name: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What transformers' own `generate` continues the prompt with."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference_model(name).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
    return out[0, len(prompt) :].tolist()


@dataclass
class Setting:
    """A scheduler and a runner that belong together."""

    family: str = "llama"
    budget: int = 512  # max_num_batched_tokens
    seats: int = 16  # max_num_seqs
    num_blocks: int = 256
    block_size: int = 4
    prefix_caching: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    quantization: str = "none"

    def __post_init__(self) -> None:
        config = EngineConfig(
            model=self.family,
            max_num_seqs=self.seats,
            max_num_batched_tokens=self.budget,
            block_size=self.block_size,
            quantization=self.quantization,
            decoder="fused" if self.family in FUSED else "transformers",
            num_kv_blocks=self.num_blocks,
        )
        self.runner = ModelRunner(paged_model(self.family), config, self.eos_token_ids)
        limits = Limits(self.seats, self.budget, 256, self.prefix_caching)
        self.scheduler = Scheduler(BlockPool(self.num_blocks, self.block_size), limits, self.eos_token_ids)

    def step(self) -> None:
        step = self.scheduler.schedule()
        output = self.runner.run(step)
        assert not output.failed
        self.scheduler.finish(step, {sequence: sampled.token for sequence, sampled in output.sampled.items()})

    def run(self, arrivals: list[tuple[int, Sequence]]) -> None:
        """Run until all are done; each request arrives before the step that stands beside it."""
        pending = sorted(arrivals, key=lambda arrival: arrival[0])
        now = 0
        while pending or not self.scheduler.is_idle:
            while pending and (pending[0][0] <= now or self.scheduler.is_idle):
                self.scheduler.add(pending.pop(0)[1])
            self.step()
            now += 1
        self.scheduler.pool.check_integrity()
        assert self.scheduler.pool.num_used == 0


def output_of(sequence: Sequence) -> list[int]:
    return sequence.tokens[len(sequence.prompt) :]
