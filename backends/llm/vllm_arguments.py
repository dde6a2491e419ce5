"""model.json of Triton's vllm_backend, which holds vLLM's engine arguments: for models served in its place."""

import logging
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, naming, nearest, read_json
from engine.errors import ConfigError, shown

OURS_TOO = ("model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
DTYPES = {"half": "float16", "float": "float32"}
# Taken with any value: they tune what this engine does by itself or has not, and change no answer.
WITHOUT_EFFECT = (
    *("block_size", "cpu_offload_gb", "disable_custom_all_reduce", "disable_log_requests", "disable_log_stats"),
    *("distributed_executor_backend", "download_dir", "enable_chunked_prefill", "enable_log_requests", "enforce_eager"),
    *("gpu_memory_utilization", "load_format", "max_log_len", "max_logprobs", "max_seq_len_to_capture", "seed"),
    *("num_gpu_blocks_override", "swap_space", "tokenizer_mode", "use_v2_block_manager"),
)
# Others of their values would change what is served.
ONLY: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "enable_lora": (False,),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None,),
    "task": ("auto", "generate"),
    "runner": ("auto", "generate"),
    "trust_remote_code": (False,),
    "revision": (None,),
    "tokenizer": (None,),  # or the model itself
}
KNOWN = (*OURS_TOO, "dtype", *ONLY, *WITHOUT_EFFECT)


def read(path: Path, parameters: dict[str, Any], *, on_gpu: bool) -> tuple[EngineConfig, bool]:
    """
    Args:
        parameters: those of config.pbtxt.

    Returns:
        The config, and whether vllm_backend would have metrics reported.

    Raises:
        ConfigError: names the file, the argument and what is allowed.
    """
    values = read_json(path)
    with naming(path):
        config = EngineConfig.from_dict(translated(values, on_gpu=on_gpu))
    asked = str(parameters.get("REPORT_CUSTOM_METRICS", {}).get("string_value", "")).lower() in ("yes", "true")
    assert isinstance(values, dict)
    return config, asked and not values.get("disable_log_stats", False)


def translated(values: Any, *, on_gpu: bool) -> Any:
    """vLLM's arguments as those of EngineConfig. Raises ConfigError."""
    if not isinstance(values, dict):
        return values
    for name, value in values.items():
        if name not in KNOWN:
            raise ConfigError(f"unknown engine argument {name!r}{nearest(name, KNOWN)}; known: {', '.join(KNOWN)}")
        if name in ONLY and value not in ONLY[name] and not (name == "tokenizer" and value == values.get("model")):
            raise ConfigError(
                f"{name} is {shown(value)}; allowed: {' or '.join(shown(each) for each in ONLY[name])} "
                "(vLLM knows more, this engine does not)"
            )
    if idle := sorted(values.keys() & (set(WITHOUT_EFFECT) - ({"gpu_memory_utilization"} if on_gpu else set()))):
        logging.getLogger("engine").info("engine arguments of vLLM without effect here: %s", ", ".join(idle))
    ours = {name: values[name] for name in OURS_TOO if values.get(name) is not None}
    dtype = values.get("dtype", "auto")
    ours["dtype"] = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if "max_num_batched_tokens" not in ours and isinstance(seats := ours.get("max_num_seqs"), int):
        ours["max_num_batched_tokens"] = max(seats, EngineConfig.max_num_batched_tokens)
    if on_gpu and "gpu_memory_utilization" in values:
        # vLLM's share is of all memory, weights included; ours is of what the weights leave.
        ours["memory_fraction"] = values["gpu_memory_utilization"]
    return ours
