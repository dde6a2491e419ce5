"""Throughput and latency of a served LLM against the number of concurrent streams, over gRPC, closed loop.

    scripts/serve --models llm
    .venv/bin/python load/llm_throughput.py --concurrency 1 4 16 32 64

Every level sends the same seeded workload: prompts of 10 to 100 tokens, lognormal output lengths (8 to 256 tokens),
greedy, EOS ignored, so that all levels do the same work for a request. Prints one Markdown row a level, with the
ratio to the first one. `--alone` sends each request of the last level once more by itself and compares the texts.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpc

TOPICS = ("the tides", "bicycles", "photosynthesis", "compilers", "sourdough", "black holes", "jazz", "volcanoes")


@dataclass(frozen=True)
class Work:
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Result:
    text: str
    tokens: int
    ttft: float  # time to first token, seconds
    itl: list[float]  # inter-token latencies: gaps between responses, seconds
    e2el: float  # end-to-end latency, seconds


def workload(count: int, seed: int) -> list[Work]:
    rng = random.Random(seed)
    works = []
    for index in range(count):
        filler = " ".join(rng.choice(TOPICS) for _ in range(rng.choice((0, 0, 8, 20, 30))))
        question = f"Request {index}. {filler} Explain {rng.choice(TOPICS)} to a student."
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        works.append(Work(prompt, max(8, min(256, int(rng.lognormvariate(4.2, 0.8))))))
    return works


def tensors(work: Work) -> list[Any]:
    sampling = {"temperature": 0, "max_tokens": work.max_tokens, "ignore_eos": True}
    made = []
    for name, value in (("text_input", work.prompt), ("sampling_parameters", json.dumps(sampling))):
        made.append(grpc.InferInput(name, [1], "BYTES"))
        made[-1].set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    for name in ("stream", "return_num_output_tokens"):
        made.append(grpc.InferInput(name, [1], "BOOL"))
        made[-1].set_data_from_numpy(np.array([True]))
    return made


async def run(client: grpc.InferenceServerClient, model: str, work: Work) -> Result:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": tensors(work)}

    started = time.perf_counter()
    stamps, text, tokens = [], [], 0
    async for result, error in client.stream_infer(requests()):
        if error:
            raise error
        stamps.append(time.perf_counter())
        text.append(result.as_numpy("text_output")[0].decode())
        tokens += int(result.as_numpy("num_output_tokens")[0])
    gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    return Result("".join(text), tokens, stamps[0] - started, gaps, stamps[-1] - started)


async def level(client: grpc.InferenceServerClient, model: str, works: list[Work], concurrency: int) -> list[Result]:
    """Closed loop: `concurrency` workers, each sends its next request when the last one has ended."""
    queue = list(reversed(list(enumerate(works))))
    results: dict[int, Result] = {}

    async def worker() -> None:
        while queue:
            index, work = queue.pop()
            results[index] = await run(client, model, work)
            print(f"\r{concurrency:3d} streams: {len(results)}/{len(works)}", end="", file=sys.stderr, flush=True)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    print(file=sys.stderr)
    return [results[index] for index in range(len(works))]


def percentile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=2, help="requests per stream at each level (at least 6 requests)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="compare the last level's texts with each request alone")
    args = parser.parse_args()
    async with grpc.InferenceServerClient(args.url) as client:
        await run(client, args.model, Work("Warm up.", 8))
        print("| streams | tok/s | ratio | TTFT p50/p99 ms | ITL p50/p99 ms | E2EL p50/p99 s |")
        print("|---|---|---|---|---|---|")
        base = None
        for concurrency in args.concurrency:
            works = workload(max(6, concurrency * args.rounds), args.seed)
            started = time.perf_counter()
            results = await level(client, args.model, works, concurrency)
            rate = sum(result.tokens for result in results) / (time.perf_counter() - started)
            base = base or rate
            ttft = [result.ttft * 1e3 for result in results]
            itl = [gap * 1e3 for result in results for gap in result.itl]
            e2el = [result.e2el for result in results]
            print(
                f"| {concurrency} | {rate:.1f} | {rate / base:.2f} | {statistics.median(ttft):.0f} /"
                f" {percentile(ttft, 0.99):.0f} | {statistics.median(itl):.1f} / {percentile(itl, 0.99):.1f} |"
                f" {statistics.median(e2el):.2f} / {percentile(e2el, 0.99):.2f} |",
                flush=True,
            )
        if args.alone:
            alone = [(await run(client, args.model, work)).text for work in works]
            same = sum(one == result.text for one, result in zip(alone, results, strict=True))
            print(f"\n{same} of {len(works)} texts are the same as when sent alone.")


if __name__ == "__main__":
    asyncio.run(main())
