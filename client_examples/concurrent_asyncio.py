"""Sends many requests at once with asyncio and prints each answer, then how fast the tokens came in all.

    .venv/bin/python client_examples/concurrent_asyncio.py --concurrency 16

The server computes one token for all of them in each step, so 16 answers take far less than 16 times as long as one.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import tritonclient.grpc.aio as triton

PLACES = ["France", "Japan", "Egypt", "Peru", "Canada", "Kenya", "Norway", "India"]


def tensor(name: str, value: str | bool) -> triton.InferInput:
    is_text = isinstance(value, str)
    made = triton.InferInput(name, [1], "BYTES" if is_text else "BOOL")
    made.set_data_from_numpy(np.array([value], dtype=np.object_ if is_text else np.bool_))
    return made


async def ask(client: triton.InferenceServerClient, model: str, prompt: str, max_tokens: int) -> tuple[str, int]:
    inputs = [
        tensor("text_input", prompt),
        tensor("stream", True),
        tensor("sampling_parameters", json.dumps({"max_tokens": max_tokens, "temperature": 0})),
        tensor("return_num_output_tokens", True),
    ]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs}

    text, tokens = "", 0
    # A stream of its own for each request: it ends with the last response.
    async for result, error in client.stream_infer(requests()):
        if error:
            raise error
        text += result.as_numpy("text_output")[0].decode()
        tokens += int(result.as_numpy("num_output_tokens")[0])
    return text, tokens


async def run(args: argparse.Namespace) -> None:
    prompts = [f"The capital of {PLACES[i % len(PLACES)]} is" for i in range(args.concurrency)]
    async with triton.InferenceServerClient(args.url) as client:
        started = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, args.model, prompt, args.max_tokens) for prompt in prompts))
        seconds = time.perf_counter() - started
    for prompt, (text, _) in zip(prompts, answers, strict=True):
        print(prompt + text.replace("\n", " "))
    total = sum(tokens for _, tokens in answers)
    print(f"{len(answers)} answers, {total} tokens in {seconds:.1f} s: {total / seconds:.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends many requests at once.")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=30)
    args = parser.parse_args()
    try:
        asyncio.run(run(args))
    except triton.InferenceServerException as error:  # what the model says
        sys.exit(f"error: {args.url}: {error.message()}")
    except grpc.RpcError as error:  # what the connection says
        sys.exit(f"error: {args.url}: {error.details()}")


if __name__ == "__main__":
    main()
