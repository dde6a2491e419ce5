"""Answers a file of prompts: planned work, for a model with static batching or any other.

    .venv/bin/python client_examples/batch_corpus.py prompts.jsonl answers.jsonl --model llm_static

Each line of prompts.jsonl is an object with "prompt" or "messages", and if wanted "id" (default: the line's number) and
"sampling_parameters". Answers are appended as they come, so that a run that was killed goes on where it ended when it
is started again. What failed is tried again, then named at the end; starting again tries it once more.

A model that waits for full batches gets full batches, the last one filled up with requests whose answers nobody reads.
Any other model gets as many requests at once as --concurrency says.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import tritonclient.grpc.aio as triton
from tqdm import tqdm
from tritonclient.utils import InferenceServerException

PATIENT = 1_000_000  # microseconds: a model whose timer is longer than this waits for full batches
OUTPUTS = ("finish_reason", "num_input_tokens", "num_output_tokens")


@dataclass
class Job:
    id: Any
    prompt: str | None
    messages: list[Any] | None
    sampling: dict[str, Any]
    is_filler: bool = False
    tries: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Model:
    name: str
    batched: bool  # tensors have a batch dimension
    batch_size: int | None  # of a model that waits until a batch is full


def read_jobs(path: Path, sampling: dict[str, Any]) -> list[Job]:
    jobs: dict[str, Job] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            sys.exit(f"error: {path}:{number} is not JSON: {error}")
        if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
            sys.exit(f'error: {path}:{number}: allowed: an object with either "prompt" or "messages"')
        job = Job(
            entry.get("id", number),
            entry.get("prompt"),
            entry.get("messages"),
            sampling | entry.get("sampling_parameters", {}),
        )
        if json.dumps(job.id) in jobs:
            sys.exit(f"error: {path}:{number}: id {job.id!r} was there before; allowed: each id once")
        jobs[json.dumps(job.id)] = job
    return list(jobs.values())


def read_done(path: Path) -> set[str]:
    """The ids that have an answer. A line that a kill cut short is taken off the file."""
    if not path.exists():
        return set()
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(path, len(whole))
    return {json.dumps(json.loads(line)["id"]) for line in whole.splitlines()}


async def describe(client: triton.InferenceServerClient, name: str) -> Model:
    config = (await client.get_model_config(name, as_json=True))["config"]
    batching = config.get("dynamic_batching", {})
    is_patient = int(batching.get("max_queue_delay_microseconds", 0)) > PATIENT
    size = max(batching.get("preferred_batch_size", [0])) if is_patient else None
    return Model(name, int(config.get("max_batch_size", 0)) > 0, size)


def tensors(job: Job, batched: bool) -> list[triton.InferInput]:
    """The same inputs with every request: Triton puts only those into one batch that have the same."""
    values: dict[str, str | bool] = {"sampling_parameters": json.dumps(job.sampling), "exclude_input_in_output": True}
    values |= {f"return_{name}": True for name in OUTPUTS}
    values |= {"text_input": job.prompt} if job.prompt is not None else {"messages": json.dumps(job.messages)}
    made = []
    for name, value in values.items():
        text = value.encode() if isinstance(value, str) else None
        array = np.array([value], dtype=np.bool_) if text is None else np.array([text], dtype=np.object_)
        made.append(triton.InferInput(name, [1, 1] if batched else [1], "BOOL" if text is None else "BYTES"))
        made[-1].set_data_from_numpy(array[None] if batched else array)
    return made


async def ask(client: triton.InferenceServerClient, model: Model, job: Job) -> dict[str, Any]:
    """The line for the file of answers."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model.name, "inputs": tensors(job, model.batched)}

    async for result, error in client.stream_infer(requests()):
        if error:
            raise error
        values = {name: result.as_numpy(name).reshape(-1)[0] for name in ("text_output", *OUTPUTS)}
        answer = {
            "text": values["text_output"].decode(),
            "finish_reason": values["finish_reason"].decode(),
            "num_input_tokens": int(values["num_input_tokens"]),
            "num_output_tokens": int(values["num_output_tokens"]),
        }
        return {"id": job.id} | answer
    raise InferenceServerException("the stream ended without an answer")


class Corpus:
    """A queue of jobs. A job leaves it answered, or failed for good."""

    def __init__(self, jobs: list[Job], answers: TextIO, bar: tqdm, retries: int, timeout: float) -> None:
        # Prompts and messages are different inputs, so Triton never puts them into one batch.
        self._queues = [deque(job for job in jobs if (job.prompt is None) is chat) for chat in (False, True)]
        self._answers = answers
        self._bar = bar
        self._retries = retries
        self._timeout = timeout
        self.failed: list[Job] = []

    async def in_batches(self, client: triton.InferenceServerClient, model: Model, size: int) -> None:
        while queue := self._next_queue():
            batch = [queue.popleft() for _ in range(min(size, len(queue)))]
            last = batch[-1]
            filler = Job(None, last.prompt, last.messages, last.sampling | {"max_tokens": 1, "min_tokens": 0}, True)
            await asyncio.gather(*(self._do(client, model, job) for job in batch + [filler] * (size - len(batch))))

    async def side_by_side(self, client: triton.InferenceServerClient, model: Model, count: int) -> None:
        async def worker() -> None:
            while queue := self._next_queue():
                await self._do(client, model, queue.popleft())

        await asyncio.gather(*(worker() for _ in range(count)))

    def _next_queue(self) -> deque[Job] | None:
        return next((queue for queue in self._queues if queue), None)

    async def _do(self, client: triton.InferenceServerClient, model: Model, job: Job) -> None:
        try:
            answer = await asyncio.wait_for(ask(client, model, job), self._timeout)
        except TimeoutError:
            await self._failed(job, f"no answer in {self._timeout:.0f} s")
        except InferenceServerException as error:
            await self._failed(job, f"{error.status() or ''} {error.message()}".strip())
        else:
            if not job.is_filler:
                self._answers.write(json.dumps(answer, ensure_ascii=False) + "\n")
                self._answers.flush()
                self._bar.update()

    async def _failed(self, job: Job, error: str) -> None:
        if job.is_filler:
            return
        job.tries, job.error = job.tries + 1, error
        if job.tries > self._retries:
            self.failed.append(job)
        else:
            await asyncio.sleep(0.25 * 2**job.tries)  # a server that is restarted needs a moment
            self._queues[job.prompt is None].append(job)


async def run(args: argparse.Namespace) -> list[Job]:
    jobs = read_jobs(args.prompts, {"max_tokens": args.max_tokens, "temperature": args.temperature})
    done = read_done(args.answers)
    todo = [job for job in jobs if json.dumps(job.id) not in done]
    async with triton.InferenceServerClient(args.url) as client:
        model = await describe(client, args.model)
        with (
            args.answers.open("a", encoding="utf-8") as answers,
            tqdm(total=len(jobs), initial=len(jobs) - len(todo), unit="prompt", mininterval=0.5) as bar,
        ):
            corpus = Corpus(todo, answers, bar, args.retries, args.timeout)
            if model.batch_size:
                await corpus.in_batches(client, model, model.batch_size)
            else:
                await corpus.side_by_side(client, model, args.concurrency)
            return corpus.failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    parser.add_argument("--model", default="llm_static")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once, if the model takes no batches")
    parser.add_argument("--retries", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one answer may take")
    args = parser.parse_args()
    try:
        failed = asyncio.run(run(args))
    except InferenceServerException as error:
        sys.exit(f"error: {args.url}: {error.message()}")
    except KeyboardInterrupt:
        sys.exit("stopped; start it again to go on")
    for job in failed:
        print(f"error: id {job.id!r}, tried {job.tries} times: {job.error}", file=sys.stderr)
    if failed:
        sys.exit(f"{len(failed)} prompts have no answer; start it again to try them again")


if __name__ == "__main__":
    main()
