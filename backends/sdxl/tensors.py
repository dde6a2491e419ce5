"""The tensors of a request and of a response. All settings but the prompt travel as request parameters.

Triton cuts a batch wherever the next request has another set of inputs, so every optional input would be one more way
to travel alone. `negative_prompt` is there for clients of NVIDIA's tutorial; who leaves it out pays nothing.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils
from pipeline.errors import InvalidRequest

if TYPE_CHECKING:  # Triton reads this file to complete config.pbtxt, which should not wait for torch
    from pipeline.pipeline import Picture
    from pipeline.request import Value

# name, type, shape, optional
INPUTS = (("prompt", "TYPE_STRING", [1], False), ("negative_prompt", "TYPE_STRING", [1], True))
OUTPUTS = (
    ("image", "TYPE_STRING", [1]),  # a PNG, JPEG or WebP file's bytes, or their base64
    ("generated_image", "TYPE_UINT8", [-1, -1, 3]),  # the pixels, where asked for
    ("seed", "TYPE_INT64", [1]),
)


def complete(config: Any) -> Any:
    """Add to a model's config.pbtxt what is the same for every model of this backend."""
    present = config.as_dict()
    inputs = {entry["name"] for entry in present["input"]}
    outputs = {entry["name"] for entry in present["output"]}
    for name, data_type, dims, optional in INPUTS:
        if name not in inputs:
            config.add_input({"name": name, "data_type": data_type, "dims": dims, "optional": optional})
    for name, data_type, dims in OUTPUTS:
        if name not in outputs:
            config.add_output({"name": name, "data_type": data_type, "dims": dims})
    return config


def read_texts(request: Any, name: str) -> list[str] | None:
    """One text for each picture, or None where there is no such input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    texts = []
    for value in tensor.as_numpy().flatten():
        try:
            texts.append(value.decode() if isinstance(value, bytes) else str(value))
        except UnicodeDecodeError:
            raise InvalidRequest(name, value, "text in UTF-8") from None
    return texts


def read_parameters(request: Any) -> "dict[str, Value]":
    parameters: dict[str, Value] = json.loads(request.parameters() or "{}")
    # gRPC's `timeout` is taken out by Triton; /generate leaves it among the parameters. It means the same either way.
    if request.timeout():
        parameters["timeout"] = request.timeout()
    return parameters


def write(request: Any, pictures: "Sequence[Picture]", seeds: Sequence[int], asked: bool, batched: bool) -> Any:
    """The response with what the request wants; `asked` is its own word that it wants the pixels."""
    wanted = set(request.requested_output_names())
    # A request that lists no outputs gets all, and that can't be told from one that lists all: pixels are many, so ask.
    if not asked and wanted == {name for name, _, _ in OUTPUTS}:
        wanted.remove("generated_image")
    arrays = {
        "image": np.array([[picture.file] for picture in pictures], dtype=np.object_),
        "generated_image": np.stack([picture.pixels for picture in pictures]),
        "seed": np.array([[seed] for seed in seeds], dtype=np.int64),
    }
    tensors = [
        pb_utils.Tensor(name, array if batched else array[0]) for name, array in arrays.items() if name in wanted
    ]
    return pb_utils.InferenceResponse(output_tensors=tensors)
