"""Pictures from prompts, over HTTP or gRPC. Several prompts go out as one request and come back as one batch.

python client_examples/txt2img.py "a red circle on a blue background"
python client_examples/txt2img.py --grpc --sheet all.png "a blue star" "two red squares on a white background"
"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw prompts with the model sdxl.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="at most 16")
    parser.add_argument("--grpc", action="store_true", help="speak gRPC instead of HTTP")
    parser.add_argument("--url", help="host:port (default: localhost:8000, with --grpc localhost:8001)")
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--negative-prompt", help="what the pictures should not show")
    parser.add_argument("--seed", type=int, help="of the first picture, the others count up (default: drawn)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance-scale", type=float)
    parser.add_argument("--scheduler", help="euler, euler_a, dpm++_2m, ddim, turbo or lcm")
    parser.add_argument("--width", type=int)
    parser.add_argument("--height", type=int)
    parser.add_argument("--format", choices=["png", "jpeg", "webp"], default="png")
    parser.add_argument("--output", type=Path, default=Path(), help="the folder for the pictures")
    parser.add_argument("--sheet", type=Path, help="write all pictures into this one file as well")
    arguments = parser.parse_args()

    # Everything but the prompt is a request parameter: Triton batches requests whatever their parameters are.
    names = ("negative_prompt", "seed", "steps", "guidance_scale", "scheduler", "width", "height", "format")
    parameters = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    # Not every version of the protocols carries fractions; text always arrives.
    parameters = {name: str(value) if isinstance(value, float) else value for name, value in parameters.items()}

    kind: Any = tritonclient.grpc if arguments.grpc else tritonclient.http
    url = arguments.url or ("localhost:8001" if arguments.grpc else "localhost:8000")
    options = {} if arguments.grpc else {"network_timeout": 600.0}
    prompt = kind.InferInput("prompt", [len(arguments.prompts), 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[text.encode()] for text in arguments.prompts], dtype=np.object_))
    with kind.InferenceServerClient(url, **options) as client:
        result = client.infer(arguments.model, [prompt], parameters=parameters)

    arguments.output.mkdir(parents=True, exist_ok=True)
    images = []
    for file, seed in zip(result.as_numpy("image")[:, 0], result.as_numpy("seed")[:, 0], strict=True):
        path = arguments.output / f"{seed}.{arguments.format}"
        path.write_bytes(file)
        print(path)
        images.append(Image.open(io.BytesIO(file)))
    if arguments.sheet:
        contact_sheet(images).save(arguments.sheet)
        print(arguments.sheet)


def contact_sheet(images: Sequence[Image.Image], columns: int = 4) -> Image.Image:
    width, height = images[0].size
    columns = min(columns, len(images))
    sheet = Image.new("RGB", (columns * width, -(-len(images) // columns) * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image, (i % columns * width, i // columns * height))
    return sheet


if __name__ == "__main__":
    main()
