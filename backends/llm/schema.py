"""The tensors of a request and of a response: those of Triton's own vllm_backend, and `messages`."""

from typing import Any

# name, type, shape, optional
INPUTS = (
    ("text_input", "TYPE_STRING", [1], True),  # optional only because `messages` can stand in for it
    ("messages", "TYPE_STRING", [1], True),  # JSON: [{"role": ..., "content": ...}, ...]
    ("stream", "TYPE_BOOL", [1], True),
    ("sampling_parameters", "TYPE_STRING", [1], True),  # JSON object
    ("exclude_input_in_output", "TYPE_BOOL", [1], True),
    ("return_finish_reason", "TYPE_BOOL", [1], True),
    ("return_cumulative_logprob", "TYPE_BOOL", [1], True),
    ("return_logprobs", "TYPE_BOOL", [1], True),
    ("return_num_input_tokens", "TYPE_BOOL", [1], True),
    ("return_num_output_tokens", "TYPE_BOOL", [1], True),
)
# Sampling parameters may also be tensors of their own, under TensorRT-LLM's names and in its types: its clients send
# them so. And lists get here over HTTP's `generate` only as tensors, for Triton's request parameters are no lists.
SAMPLING_TENSORS = {
    "max_tokens": "TYPE_INT32",
    "min_tokens": "TYPE_INT32",
    "min_length": "TYPE_INT32",
    "end_id": "TYPE_INT32",
    "pad_id": "TYPE_INT32",
    "top_k": "TYPE_INT32",
    "top_p": "TYPE_FP32",
    "temperature": "TYPE_FP32",
    "repetition_penalty": "TYPE_FP32",
    "presence_penalty": "TYPE_FP32",
    "frequency_penalty": "TYPE_FP32",
    "seed": "TYPE_UINT64",
    "random_seed": "TYPE_UINT64",
    "stop": "TYPE_STRING",
    "stop_words": "TYPE_STRING",
    "bad_words": "TYPE_STRING",
}
LISTS = ("stop", "stop_words", "bad_words")
OUTPUTS = (
    ("text_output", "TYPE_STRING", [-1]),
    ("finish_reason", "TYPE_STRING", [-1]),
    ("cumulative_logprob", "TYPE_FP32", [-1]),
    ("logprobs", "TYPE_STRING", [-1]),
    ("num_input_tokens", "TYPE_UINT32", [1]),
    ("num_output_tokens", "TYPE_UINT32", [-1]),
)


def missing(config: dict[str, Any]) -> list[str]:
    """Inputs that a model's config lacks, since Triton was told not to let us complete it."""
    present = {entry["name"] for entry in config["input"]}
    return [name for name, *_ in INPUTS if name not in present]


def complete(config: Any) -> Any:
    """Add to a model's config.pbtxt what is the same for every model of this backend."""
    present = config.as_dict()
    inputs = {entry["name"] for entry in present["input"]}
    outputs = {entry["name"] for entry in present["output"]}
    for name, data_type, dims, optional in INPUTS:
        if name not in inputs:
            config.add_input({"name": name, "data_type": data_type, "dims": dims, "optional": optional})
    for name, data_type in SAMPLING_TENSORS.items():
        if name not in inputs:
            dims = [-1] if name in LISTS else [1]
            config.add_input({"name": name, "data_type": data_type, "dims": dims, "optional": True})
    for name, data_type, dims in OUTPUTS:
        if name not in outputs:
            config.add_output({"name": name, "data_type": data_type, "dims": dims})
    config.set_model_transaction_policy({"decoupled": True})
    # Unlike an optional tensor, a batch dimension is part of a request's shape, so it is the model's owner who decides.
    config.set_max_batch_size(present["max_batch_size"])
    return config
