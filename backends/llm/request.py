"""What a client asks for, read out of a Triton request and checked."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from engine.config import NOT_JSON
from engine.errors import InvalidRequest, shown
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from schema import LISTS, SAMPLING_TENSORS

# Request parameters that are Triton's own business; its HTTP front passes some of them on.
TRITONS_OWN = ("id", "binary_data_output", "sequence_id", "sequence_start", "sequence_end")

ReadTensor = Callable[[str], np.ndarray | None]


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    stream: bool
    prefix: str  # what stands before the generated text in a reply that is not streamed
    returns: frozenset[str]  # outputs wanted besides text_output
    show_logprobs: bool  # asked for by sampling parameter, not only needed for the cumulative one


def read_request(tensor: ReadTensor, parameters: str, tokenizer: Tokenizer) -> Request:
    """
    Args:
        tensor: an input's array by name, or None.
        parameters: the request's parameters, as Triton gives them: a JSON object.

    Raises:
        InvalidRequest: names the field, its value and what is allowed.
    """
    text, messages = _text(tensor, "text_input"), _text(tensor, "messages")
    if (text is None) == (messages is None):
        given = "neither is" if text is None else "both are"
        raise InvalidRequest(f"text_input and messages: {given} given; allowed: exactly one")
    stream = _flag(tensor, "stream", False)
    exclude_input = _flag(tensor, "exclude_input_in_output", stream)
    if stream and not exclude_input:
        # Word for word what vllm_backend says.
        raise InvalidRequest(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
        )
    params = _sampling_params(tensor, parameters)
    outputs = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    returns = frozenset(name for name in outputs if _flag(tensor, f"return_{name}", False))
    show_logprobs = params.logprobs is not None
    if "cumulative_logprob" in returns and not show_logprobs:
        params = replace(params, logprobs=0)
    if messages is not None:
        prompt = tokenizer.chat(_json("messages", messages))
    else:
        assert text is not None
        prompt = tokenizer.encode(text)
    prompt = prompt[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else prompt
    if not prompt:
        raise InvalidRequest("text_input is ''; allowed: a text of at least one token")
    prefix = "" if exclude_input or text is None else text
    return Request(prompt, params, stream, prefix, returns, show_logprobs)


def _sampling_params(tensor: ReadTensor, parameters: str) -> SamplingParams:
    """From the JSON tensor, from tensors of their own, from the request's parameters, or some from each."""
    text = _text(tensor, "sampling_parameters")
    values = _json("sampling_parameters", text) if text else {}
    if not isinstance(values, dict):
        raise InvalidRequest(f"sampling_parameters is {shown(text)}; allowed: a JSON object")
    own = {
        name: value
        for name, value in json.loads(parameters or "{}").items()
        if name not in TRITONS_OWN and not name.startswith("triton_")
    }
    tensors = {name: _plain(name, array) for name in SAMPLING_TENSORS if (array := tensor(name)) is not None}
    # Clients of Triton's own vllm_backend send them both ways at once.
    return SamplingParams.from_pairs([*values.items(), *own.items(), *tensors.items()])


def _plain(name: str, array: np.ndarray) -> Any:
    """One value, or a list of strings."""
    try:
        items = [item.decode("utf-8") if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
        if array.dtype == np.float32:
            items = [float(str(item)) for item in array.reshape(-1)]  # 0.1, as the client wrote it, not 0.10000000149
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8: {error}") from None
    if name in LISTS:
        return items
    if len(items) != 1:
        raise InvalidRequest(f"{name} has {len(items)} elements; allowed: 1")
    return items[0]


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except NOT_JSON as error:
        raise InvalidRequest(f"{name} is not JSON ({error}): {shown(text)}") from None


def _text(tensor: ReadTensor, name: str) -> str | None:
    value = _single(tensor, name)
    if value is None:
        return None
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8: {error}") from None


def _flag(tensor: ReadTensor, name: str, default: bool) -> bool:
    value = _single(tensor, name)
    return default if value is None else bool(value)


def _single(tensor: ReadTensor, name: str) -> Any:
    array = tensor(name)
    if array is None:
        return None
    if array.size != 1:
        raise InvalidRequest(f"{name} has {array.size} elements; allowed: 1")
    return array.reshape(-1)[0]
