"""What batching is worth: pictures per second of 16 concurrent requests, with Triton's dynamic batching and without.

scripts/serve --models sdxl,sdxl_unbatched        in one terminal
python load/sdxl_batching.py                      in another

The two models are the same but for their config.pbtxt. They take turns, so that whatever else the machine does meets
both, and the middle of the rounds' ratios is reported beside each model's own rate.
"""

import argparse
import json
import statistics
import threading
import time
from typing import Any

import numpy as np
import tritonclient.grpc

PROMPTS = [
    f"a {colour} {shape} on a {background} background"
    for colour, background in (("red", "blue"), ("yellow", "green"), ("white", "purple"), ("black", "white"))
    for shape in ("circle", "square", "star", "cross")
]


def one_round(client: Any, model: str, concurrency: int, steps: int, first_seed: int) -> float:
    """Seconds until `concurrency` requests, sent at once, are all answered. Raises the first error."""
    done = threading.Semaphore(0)
    errors: list[Exception] = []

    def receive(result: Any, error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
        done.release()

    began = time.perf_counter()
    for i in range(concurrency):
        prompt = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
        prompt.set_data_from_numpy(np.array([[PROMPTS[i % len(PROMPTS)].encode()]], dtype=np.object_))
        client.async_infer(model, [prompt], receive, parameters={"seed": first_seed + i, "steps": steps})
    for _ in range(concurrency):
        done.acquire()
    if errors:
        raise errors[0]
    return time.perf_counter() - began


def executions(client: Any, model: str) -> int:
    stats = client.get_inference_statistics(model, as_json=True)["model_stats"][0]
    return int(stats.get("execution_count", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a model with batching and one without, in turns.")
    parser.add_argument("--url", default="localhost:8001", help="host:port of gRPC")
    parser.add_argument("--models", nargs=2, default=["sdxl", "sdxl_unbatched"], metavar=("BATCHED", "UNBATCHED"))
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()

    seconds: dict[str, list[float]] = {model: [] for model in arguments.models}
    with tritonclient.grpc.InferenceServerClient(arguments.url) as client:
        for model in arguments.models:  # not measured: the first pass of a batch size picks its kernels
            one_round(client, model, arguments.concurrency, 2, 0)
        time.sleep(0.5)  # answers leave before their batch is counted
        before = {model: executions(client, model) for model in arguments.models}
        for number in range(arguments.rounds):
            for model in arguments.models:
                seconds[model].append(one_round(client, model, arguments.concurrency, arguments.steps, 100 * number))
        time.sleep(0.5)
        batches = {model: executions(client, model) - before[model] for model in arguments.models}

    pictures = arguments.rounds * arguments.concurrency
    rates = {model: pictures / sum(seconds[model]) for model in arguments.models}
    batched, unbatched = arguments.models
    ratios = [slow / fast for fast, slow in zip(seconds[batched], seconds[unbatched], strict=True)]
    figures = {
        "concurrency": arguments.concurrency,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "images_per_second": {model: round(rate, 2) for model, rate in rates.items()},
        "mean_batch": {model: round(pictures / batches[model], 1) for model in arguments.models},
        "ratio": round(statistics.median(ratios), 2),
        "ratio_lowest": round(min(ratios), 2),
        "ratio_highest": round(max(ratios), 2),
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    for model in arguments.models:
        print(f"{model:20} {rates[model]:6.2f} images/s, mean batch {pictures / batches[model]:.1f}")
    print(f"{'ratio':20} {figures['ratio']:6.2f} (from {figures['ratio_lowest']} to {figures['ratio_highest']})")


if __name__ == "__main__":
    main()
