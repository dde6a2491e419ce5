"""The loop: `schedule`, `run`, `finish`, one step after the other, on a thread of its own."""

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.errors import Cancelled, EngineFailure, QueueFull, RequestError
from engine.generation import Generation
from engine.model_runner import StepOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, Step
from engine.sequence import FinishReason, Sequence
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# A device that fails this often in a row won't recover by itself (CUDA errors stay until the process ends).
FAILURES_IN_A_ROW = 3


class Runner(Protocol):
    def run(self, step: Step) -> StepOutput: ...


@dataclass(frozen=True)
class Stats:
    """One moment of the engine. Totals count since its start."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # found in the prefix cache
    preemptions: int = 0


class Engine:
    def __init__(self, runner: Runner, tokenizer: Tokenizer, scheduler: Scheduler, *, max_queue_size: int) -> None:
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.failure: Exception | None = None  # why the loop ended, if it failed
        self.stats = Stats(kv_blocks=scheduler.pool.num_blocks)
        self._runner = runner
        self._capacity = scheduler.limits.max_num_seqs + max_queue_size
        self._max_queue_size = max_queue_size
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._generations: dict[Sequence, Generation] = {}  # all that have not ended
        self._stopping = False
        self._failures_in_a_row = 0
        self._thread = threading.Thread(target=self._loop, name="llm-engine", daemon=True)
        self._thread.start()

    # Any thread

    def submit(self, prompt: list[int], params: SamplingParams, on_ready: Callable[[Generation], None]) -> Generation:
        """Queue a request. `on_ready` is called from the loop, so it must be quick.

        Raises:
            InvalidRequest: the prompt can never run.
            QueueFull: as many wait as may wait.
            EngineFailure: the engine has stopped.
        """
        self.scheduler.check(len(prompt))
        sequence = Sequence(prompt, params, secrets.randbits(63) if params.seed is None else params.seed)
        generation = Generation(sequence, self.tokenizer, on_ready, self.stop_early)
        with self._wake:
            if self.failure or self._stopping:
                raise EngineFailure(f"the engine has stopped: {self.failure or 'the model is being unloaded'}")
            held = len(self._generations)
            if held >= self._capacity:
                waiting = held - self.scheduler.limits.max_num_seqs
                raise QueueFull(f"the queue is full: {waiting} waiting; allowed: {self._max_queue_size}")
            self._generations[sequence] = generation
            self._inbox.append(lambda: self.scheduler.add(sequence))
            self._wake.notify()
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a request with `Cancelled`. Harmless on one that has ended."""
        self._post(lambda: self._end(generation, FinishReason.ABORT, Cancelled("the request was cancelled")))

    def stop_early(self, generation: Generation) -> None:
        """End a request whose consumer has seen a stop string."""
        self._post(lambda: self._end(generation, FinishReason.STOP))

    def close(self) -> None:
        """Finish what is running and waiting, then end the loop."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self.failure:
                self._inbox.append(command)
                self._wake.notify()

    # The loop's thread

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
        except Exception as error:
            log.exception("the engine's loop failed")
            self._fail_all(error)

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do. False when there will be nothing any more."""
        while True:
            self._read_inbox()
            if not self.scheduler.is_idle:
                return True
            self.scheduler.pool.check_integrity()
            if self.scheduler.pool.num_used:
                raise RuntimeError(f"{self.scheduler.pool.num_used} KV blocks are held, but no sequence is running")
            self._update_stats()
            with self._wake:
                if not self._inbox:
                    if self._stopping:
                        return False
                    self._wake.wait()

    def _read_inbox(self) -> None:
        with self._wake:
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()

    def _step(self) -> None:
        step = self.scheduler.schedule()
        if not step.scheduled:
            raise RuntimeError("the scheduler has sequences, but none can run")
        try:
            output = self._runner.run(step)
        except Exception as error:
            self._survive(step, error)
            return
        self._failures_in_a_row = 0
        self._read_inbox()  # a request cancelled while the step ran gets nothing of it
        for sequence, why in output.failed.items():
            self._end(self._generations.get(sequence), FinishReason.ERROR, EngineFailure(why))
        tokens = {sequence: sampled.token for sequence, sampled in output.sampled.items()}
        updated = self.scheduler.finish(step, tokens)
        # Before anyone hears of it, so that a client that has its answer finds it counted.
        self._update_stats(steps=1, output_tokens=len(updated))
        for sequence in updated:
            generation = self._generations[sequence]
            if sequence.finish_reason:
                self._forget(sequence)
            generation.put(output.sampled[sequence], sequence.finish_reason)

    def _survive(self, step: Step, error: Exception) -> None:
        """End the requests of a step that raised; the others never notice."""
        log.exception("a step of %d tokens failed", step.num_tokens)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            raise error
        failure = EngineFailure(f"the step that computed this request failed: {type(error).__name__}: {error}")
        for entry in step.scheduled:
            self._end(self._generations.get(entry.sequence), FinishReason.ERROR, failure)

    def _end(self, generation: Generation | None, reason: FinishReason, error: RequestError | None = None) -> None:
        if generation is None or generation.sequence not in self._generations:
            return
        self.scheduler.end(generation.sequence, reason)
        self._forget(generation.sequence)
        self._update_stats()
        generation.end(reason, error)

    def _forget(self, sequence: Sequence) -> None:
        with self._wake:
            del self._generations[sequence]

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            self.failure = error
            generations, self._generations = self._generations, {}
        failure = EngineFailure(f"the engine has stopped: {type(error).__name__}: {error}")
        for generation in generations.values():
            generation.end(FinishReason.ERROR, failure)

    def _update_stats(self, steps: int = 0, output_tokens: int = 0) -> None:
        scheduler, last = self.scheduler, self.stats
        self.stats = Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks=scheduler.pool.num_blocks,
            kv_blocks_used=scheduler.pool.num_used,
            steps=last.steps + steps,
            prompt_tokens=scheduler.num_prompt_tokens,
            output_tokens=last.output_tokens + output_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            preemptions=scheduler.num_preemptions,
        )
