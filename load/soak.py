"""Hours of everything that goes wrong: cancels, bad requests, connections that break, time limits, and too many of all.

    scripts/serve --models llm
    scripts/load soak --minutes 30 --users 128 --pid $(pgrep -x tritonserver)

Every request must end exactly once, in the way that its kind says; at the end no seat and no KV block may be held, and
with --pid the memory of the server and its models must not have grown. Prints a table; the exit status is 1 if
anything of this fails, and the log names each case.
"""

import argparse
import asyncio
import collections
import json
import random
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import psutil
import tritonclient.grpc.aio as grpc
from tritonclient.utils import InferenceServerException

from load.metrics_page import of_model, parse

SETTLE = 60.0  # seconds in which an idle server must have given everything back
WARM_UP = 0.2  # of the time; memory is compared with what it was then
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass
class Tally:
    """What happened, by kind of request; what should not have is in `broken`."""

    ended: collections.Counter[str] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)

    def note(self, kind: str, how: str) -> None:
        self.ended[f"{kind}: {how}"] += 1

    def wrong(self, kind: str, what: str) -> None:
        self.broken.append(f"{kind}: {what}")
        print(f"WRONG: {kind}: {what}", file=sys.stderr, flush=True)


class Clients:
    def __init__(self, addresses: list[str], model: str, tally: Tally) -> None:
        self._grpc_url, self._http_url, self._metrics_url = addresses
        self._model, self._tally = model, tally

    async def __aenter__(self) -> "Clients":
        self._grpc = grpc.InferenceServerClient(self._grpc_url)
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._grpc.close()
        await self._http.close()

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self._metrics_url}/metrics", timeout=10) as page:
            return of_model(parse(page.read().decode()), self._model)

    def _inputs(self, prompt: str, sampling: dict[str, Any]) -> list[Any]:
        made = []
        for name, value in (("text_input", prompt), ("sampling_parameters", json.dumps(sampling))):
            made.append(grpc.InferInput(name, [1], "BYTES"))
            made[-1].set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
        for name in ("stream", "return_num_output_tokens"):
            made.append(grpc.InferInput(name, [1], "BOOL"))
            made[-1].set_data_from_numpy(np.array([True]))
        return made

    async def ask(self, prompt: str, sampling: dict[str, Any], leave_after: int | None = None) -> tuple[int, int, str]:
        """(final responses, tokens, error). Leaves the stream after so many responses, if it is told to."""

        async def requests() -> AsyncIterator[dict[str, Any]]:
            asked = {"model_name": self._model, "inputs": self._inputs(prompt, sampling)}
            yield asked | {"enable_empty_final_response": True}

        finals, tokens, responses = 0, 0, 0
        answers = self._grpc.stream_infer(requests())
        async for result, error in answers:
            if error:
                return finals, tokens, str(error.message())
            finals += result.get_response().parameters["triton_final_response"].bool_param
            if (count := result.as_numpy("num_output_tokens")) is not None:
                tokens += int(count.sum())
            responses += 1
            if leave_after is not None and responses >= leave_after and not finals:
                answers.cancel()
                return finals, tokens, "left"
        return finals, tokens, ""

    async def answered(self, rng: random.Random) -> None:
        wanted = min(400, 1 + int(rng.expovariate(1 / 30)))
        sampling = {"max_tokens": wanted, "ignore_eos": True, "temperature": rng.choice([0, 0.8])}
        sampling |= {"priority": rng.choice([0, 0, 0, 1, -1])}
        if rng.random() < 0.2:
            sampling |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
        finals, tokens, error = await self.ask(_words(rng, rng.choice([5, 20, 200])), sampling)
        self._ended_once("answered", finals, error, tokens == wanted or f"{tokens} tokens of {wanted}")

    async def cancelled(self, rng: random.Random) -> None:
        sampling = {"max_tokens": 400, "ignore_eos": True}
        finals, _, error = await self.ask(_words(rng, 20), sampling, leave_after=rng.randint(1, 20))
        if error != "left" and not self._refused("cancelled", error):
            self._tally.wrong("cancelled", f"{finals} final responses and {error!r}, though it never ends by itself")
        elif error == "left":
            self._tally.note("cancelled", "left half-way")

    async def bad(self, rng: random.Random) -> None:
        name, value = rng.choice([("max_tokens", 0), ("temperature", 9), ("stop", [1]), ("guided_regex", "[a-")])
        finals, tokens, error = await self.ask("Hello", {name: value})
        if finals or tokens or not any(word in error for word in (name, "structured_outputs")):
            self._tally.wrong("bad", f"{name}={value!r}: {finals} final responses, {tokens} tokens, error {error!r}")
        else:
            self._tally.note("bad", "refused by name")

    async def impatient(self, rng: random.Random) -> None:
        sampling = {"max_tokens": 10_000, "ignore_eos": True, "max_time": rng.uniform(0.2, 2)}
        finals, _, error = await self.ask(_words(rng, 20), sampling)
        if self._refused("impatient", error):
            return
        if finals or "max_time" not in error:
            self._tally.wrong("impatient", f"{finals} final responses, error {error!r}")
        else:
            self._tally.note("impatient", "ended in time")

    async def disconnected(self, rng: random.Random) -> None:
        """An HTTP connection that breaks while the answer streams."""
        url = f"http://{self._http_url}/v2/models/{self._model}/generate_stream"
        body = {"text_input": _words(rng, 20), "stream": True, "max_tokens": 300, "ignore_eos": True}
        async with self._http.post(url, json=body) as response:
            left = rng.randint(1, 10)
            async for line in response.content:
                if b'"error"' in line and not self._refused("disconnected", json.loads(line[6:])["error"]):
                    self._tally.wrong("disconnected", line.decode())
                left -= 1
                if left == 0:
                    response.close()
                    self._tally.note("disconnected", "broke off")
                    return

    def _ended_once(self, kind: str, finals: int, error: str, right: bool | str) -> None:
        if self._refused(kind, error):
            return
        if error or finals != 1 or right is not True:
            self._tally.wrong(kind, f"{finals} final responses, error {error!r}; {right}")
        else:
            self._tally.note(kind, "once and whole")

    def _refused(self, kind: str, error: str) -> bool:
        if error.startswith("the queue is full"):
            self._tally.note(kind, "refused: the queue is full")
            return True
        return False


def _words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(["time", "water", "house", "music", "light"]) for _ in range(rng.randint(1, most)))


async def ride(clients: Clients, tally: Tally, rng: random.Random, until: float) -> None:
    """One user: one request after the other."""
    kinds: list[Callable[[random.Random], Awaitable[None]]] = [
        *[clients.answered] * 11, *[clients.cancelled] * 3, *[clients.bad] * 2, *[clients.disconnected] * 2,
        *[clients.impatient] * 2,
    ]  # fmt: skip
    while time.monotonic() < until:
        kind = rng.choice(kinds)
        try:
            await kind(rng)
        except (InferenceServerException, aiohttp.ClientError, OSError) as error:
            tally.wrong(kind.__name__, f"the connection failed: {error!r}")
            await asyncio.sleep(1)


def memory(pid: int) -> int:
    """Bytes that the server and its models hold for themselves."""
    process = psutil.Process(pid)
    return sum(each.memory_full_info().uss for each in [process, *process.children(recursive=True)])


async def watch(pid: int, seconds: float, readings: list[tuple[float, int]]) -> None:
    began = time.monotonic()
    while True:
        readings.append((time.monotonic() - began, memory(pid)))
        await asyncio.sleep(max(1.0, seconds / 200))


async def run(args: argparse.Namespace) -> int:
    tally, seconds = Tally(), args.minutes * 60
    readings: list[tuple[float, int]] = []
    async with Clients(args.url.split(","), args.model, tally) as clients:
        watching = asyncio.create_task(watch(args.pid, seconds, readings)) if args.pid else None
        until = time.monotonic() + seconds
        users = [ride(clients, tally, random.Random(f"{args.seed}/{user}"), until) for user in range(args.users)]
        await asyncio.gather(*users)
        deadline = time.monotonic() + SETTLE
        while any(clients.metrics().get(name) for name in (*HELD, "vllm:kv_cache_usage_perc")):
            if time.monotonic() > deadline:
                held = {name: value for name, value in clients.metrics().items() if value}
                tally.wrong("the server", f"is not idle {SETTLE:.0f} s after the last request: {held}")
                break
            await asyncio.sleep(0.5)
        if watching:
            watching.cancel()
    print(report(args, tally, readings, seconds))
    return 1 if tally.broken else 0


def report(args: argparse.Namespace, tally: Tally, readings: list[tuple[float, int]], seconds: float) -> str:
    lines = ["| what | requests |", "|---|---|"]
    lines += [f"| {what} | {count} |" for what, count in sorted(tally.ended.items())]
    lines += [f"| wrong | {len(tally.broken)} |"]
    warm = [size for moment, size in readings if moment >= WARM_UP * seconds]
    if warm:
        tenth = max(1, len(warm) // 10)
        begin, end = (sum(part) / len(part) / 2**20 for part in (warm[:tenth], warm[-tenth:]))
        lines.append(
            f"\nMemory of the server and its models: {begin:.0f} MiB after warming up, {end:.0f} MiB at the end."
        )
        if end > begin * (1 + args.growth):
            tally.wrong("the server", f"grew from {begin:.0f} to {end:.0f} MiB")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/load soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="localhost:8001,localhost:8000,localhost:8002", help="gRPC, HTTP and metrics")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--users", type=int, default=128, help="twice the model's seats, at least, to have a queue")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of tritonserver, to watch its memory")
    parser.add_argument("--growth", type=float, default=0.1, help="of memory, that is allowed (default: %(default)s)")
    return asyncio.run(run(parser.parse_args(argv)))
