"""From `model.json` to a running engine: weights from a folder, a GGUF file or a hub."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine import gguf_file
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.scheduler import Limits, Scheduler
from engine.tokenizer import Tokenizer
from engine.transformers_model import ATTENTION_NAME

log = logging.getLogger(__name__)


def load_engine(config: EngineConfig) -> Engine:
    """Raises ConfigError that names what can't be loaded, and why."""
    started = time.perf_counter()
    device = _device(config)
    dtype = _dtype(config, device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model, tokenizer = load_model(weights_folder(config, dtype), dtype, device)
    runner = ModelRunner(model, config, tokenizer.eos_token_ids)
    trained_for = model.config.get_text_config().max_position_embeddings
    if config.max_model_len and config.max_model_len > trained_for:
        raise ConfigError(f"max_model_len is {config.max_model_len}; allowed: at most {trained_for}, the model's own")
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or trained_for,
        prefix_caching=config.enable_prefix_caching,
    )
    pool = BlockPool(runner.num_blocks, runner.block_size)
    scheduler = Scheduler(pool, limits, tokenizer.eos_token_ids)
    seconds = time.perf_counter() - started
    log.info("loaded %s on %s in %s in %.1f s", config.model, device, dtype, seconds)
    log.info("%d KV blocks of %d tokens, %d seats", pool.num_blocks, pool.block_size, limits.max_num_seqs)
    return Engine(
        runner,
        tokenizer,
        scheduler,
        max_queue_size=config.max_queue_size,
        max_queued_tokens=config.max_queued_tokens,
    )


def weights_folder(config: EngineConfig, dtype: torch.dtype) -> str:
    """The model's own name, or for a GGUF file the transformers folder that it was converted to."""
    if not config.model.endswith(".gguf"):
        return config.model
    try:
        return str(gguf_file.as_folder(Path(config.model), dtype))
    except Exception as error:  # a broken file breaks its readers in many ways
        raise ConfigError(f"model {config.model!r} can't be loaded: {error}") from error


def load_model(source: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Tokenizer]:
    """A transformers causal LM with our attention, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        architecture = AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=architecture, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    except Exception as error:  # a broken file breaks its readers in many ways
        raise ConfigError(f"model {source!r} can't be loaded: {error}") from error
    if not getattr(type(model), "_supports_attention_backend", False):
        name = type(model).__name__
        raise ConfigError(f"model {source!r} is a {name}, whose attention transformers does not let us replace")
    if not tokenizer.is_fast:
        raise ConfigError(f"model {source!r} has no fast tokenizer (tokenizer.json)")
    model.eval().to(device)
    return model, Tokenizer(tokenizer, eos_token_ids(model, tokenizer))


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """What ends an answer: the generation config's word, else the model's, else the tokenizer's."""
    text = model.config.get_text_config()
    for value in (model.generation_config.eos_token_id, text.eos_token_id, tokenizer.eos_token_id):
        if value is not None:
            return frozenset(value if isinstance(value, Iterable) else [value])
    return frozenset()


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {config.device!r}, but torch sees no CUDA device; allowed here: cpu or auto")
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
