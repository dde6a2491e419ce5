"""Many pictures from one process: keeps 32 requests under way, so that the server's batches are full.

Each prompt is a request of its own with its own answer, its own error and its own seed; Triton puts them together.

python client_examples/txt2img_async.py --output pictures < prompts.txt        (one prompt a line)
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException


async def draw(client: triton.InferenceServerClient, model: str, text: str, seed: int, steps: int | None) -> bytes:
    prompt = triton.InferInput("prompt", [1, 1], "BYTES")
    prompt.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
    parameters = {"seed": seed} | ({"steps": steps} if steps else {})
    result = await client.infer(model, [prompt], parameters=parameters)
    file: bytes = result.as_numpy("image")[0, 0]
    return file


async def run(arguments: argparse.Namespace, prompts: list[str]) -> int:
    """Returns how many failed."""
    numbered = list(enumerate(prompts))[::-1]
    failed = 0
    async with triton.InferenceServerClient(arguments.url) as client:

        async def passenger() -> None:
            nonlocal failed
            while numbered:
                number, text = numbered.pop()
                try:
                    seed = arguments.seed + number
                    file = await draw(client, arguments.model, text, seed, arguments.steps)
                except InferenceServerException as error:
                    failed += 1
                    print(f"{text!r}: {error.message()}", file=sys.stderr)
                else:
                    (arguments.output / f"{number:04}.png").write_bytes(file)

        # Twice a full batch: while one is drawn the next one gathers.
        await asyncio.gather(*(passenger() for _ in range(arguments.concurrency)))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw every line of standard input with the model sdxl.")
    parser.add_argument("--url", default="localhost:8001", help="host:port of gRPC")
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--concurrency", type=int, default=32, help="requests under way at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the first picture, the others count up")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--output", type=Path, default=Path("pictures"))
    arguments = parser.parse_args()
    prompts = [line.strip() for line in sys.stdin if line.strip()]
    arguments.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failed = asyncio.run(run(arguments, prompts))
    seconds = time.monotonic() - began
    print(f"{len(prompts) - failed} pictures in {seconds:.1f} s, {(len(prompts) - failed) / seconds:.2f} a second")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
