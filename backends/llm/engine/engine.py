"""The loop: `schedule`, `run`, `finish`, one step after the other, on a thread of its own."""

import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from engine.errors import Cancelled, EngineFailure, QueueFull, RequestError, TimedOut
from engine.generation import Generation
from engine.model_runner import StepOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, Step
from engine.sequence import FinishReason, Sequence, Status
from engine.stats import Recorder, Stats
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# A device that fails this often in a row won't recover by itself (CUDA errors stay until the process ends).
FAILURES_IN_A_ROW = 3


class Runner(Protocol):
    vocab_size: int

    def run(self, step: Step) -> StepOutput: ...


class Engine:
    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        *,
        max_queue_size: int,
        max_queued_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.failure: Exception | None = None  # why the loop ended, if it failed
        self._recorder = Recorder()
        self.stats: Stats = self._recorder.snapshot(scheduler)  # zeros, so that dashboards have series
        self._runner = runner
        self._guides = functools.cache(lambda: tokenizer.guides(runner.vocab_size))
        self._capacity = scheduler.limits.max_num_seqs + max_queue_size
        self._max_queue_size = max_queue_size
        self._max_queued_tokens = max_queued_tokens
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._generations: dict[Sequence, Generation] = {}  # all that have not ended
        self._impatient: set[Generation] = set()  # those of them that have a time limit
        self._stopping = False
        self._failures_in_a_row = 0
        self._thread = threading.Thread(target=self._loop, name="llm-engine", daemon=True)
        self._thread.start()

    # Any thread

    def submit(
        self, prompt: list[int], params: SamplingParams, on_ready: Callable[[Generation], None]
    ) -> list[Generation]:
        """Queue a request: one generation for each of its `n` answers. `on_ready` is called from the loop, so it must
        be quick.

        Raises:
            InvalidRequest: the prompt can never run, or a parameter names a token that the model doesn't have.
            QueueFull: as many wait as may wait, or as many tokens.
            EngineFailure: the engine has stopped.
        """
        self.scheduler.check(len(prompt))
        params.check_tokens(self._runner.vocab_size)
        seed = secrets.randbits(63) if params.seed in (None, -1) else params.seed
        banned = tuple(tokens for word in params.bad_words for tokens in self.tokenizer.spellings(word))
        generations: list[Generation] = []
        for index in range(params.n):
            guide = self._guides().make(params.structured_outputs) if params.structured_outputs else None
            leader = generations[0].sequence if generations else None
            sequence = Sequence(prompt, params, (seed + index) % 2**64, banned, guide, leader)
            generations.append(Generation(sequence, self.tokenizer, on_ready, self.stop_early, index))
        with self._wake:
            if self.failure or self._stopping:
                raise EngineFailure(f"the engine has stopped: {self.failure or 'the model is being unloaded'}")
            self._check_room(params.n, len(prompt))
            self._generations |= {generation.sequence: generation for generation in generations}
            self._inbox.append(lambda: self._add(generations))
            self._wake.notify()
        return generations

    def _check_room(self, answers: int, num_tokens: int) -> None:
        seats = self.scheduler.limits.max_num_seqs
        held = len(self._generations)
        if held + answers > self._capacity:
            waiting = max(0, held - seats)
            raise QueueFull(f"the queue is full: {waiting} waiting; allowed: {self._max_queue_size}")
        if self._max_queued_tokens and held >= seats:
            tokens = sum(len(sequence.tokens) for sequence in self._generations if sequence.status is Status.WAITING)
            if tokens + num_tokens > self._max_queued_tokens:
                raise QueueFull(
                    f"the queue is full: {held - seats} waiting with {tokens} tokens, and this request has "
                    f"{num_tokens}; allowed: {self._max_queued_tokens} (max_queued_tokens)"
                )

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
            self._end_late_ones()
            if not self.scheduler.is_idle:
                return True
            self.scheduler.grow_back()
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

    def _add(self, generations: list[Generation]) -> None:
        for generation in generations:
            self.scheduler.add(generation.sequence)
            params = generation.sequence.params
            if params.max_time or params.max_queue_time:
                self._impatient.add(generation)

    def _end_late_ones(self) -> None:
        now = time.perf_counter()
        for generation in list(self._impatient):
            sequence = generation.sequence
            waited = now - sequence.times.arrived
            queued = sequence.status is Status.WAITING and not sequence.num_output
            if (limit := sequence.params.max_time) and waited > limit:
                error = TimedOut(f"the request was not done after {waited:.2f} s; max_time is {limit:g}")
            elif queued and (limit := sequence.params.max_queue_time) and waited > limit:
                error = TimedOut(f"the request had no seat after {waited:.2f} s; max_queue_time is {limit:g}")
            else:
                continue
            self._end(generation, FinishReason.ABORT, error)

    def _step(self) -> None:
        step = self.scheduler.schedule()
        self._recorder.seated(step, time.perf_counter())
        if not step.scheduled:
            raise RuntimeError("the scheduler has sequences, but none can run")
        try:
            output = self._runner.run(step)
        except Exception as error:
            self._survive(step, error)
            return
        self._failures_in_a_row = 0
        now = time.perf_counter()
        self._recorder.stepped(step, now)
        self._read_inbox()  # a request cancelled while the step ran gets nothing of it
        for sequence, why in output.failed.items():
            self._end(self._generations.get(sequence), FinishReason.ERROR, EngineFailure(why))
        tokens = {sequence: sampled.token for sequence, sampled in output.sampled.items()}
        updated = self.scheduler.finish(step, tokens)
        for sequence in updated:
            self._recorder.token(sequence, now)
        # Before anyone hears of it, so that a client that has its answer finds it counted.
        self._update_stats()
        for sequence in updated:
            generation = self._generations[sequence]
            if sequence.finish_reason:
                self._forget(sequence)
            generation.put(output.sampled[sequence], sequence.finish_reason)

    def _survive(self, step: Step, error: Exception) -> None:
        """Try a step that ran out of memory again, smaller; else end its requests. The others never notice."""
        if _out_of_memory(error) and self.scheduler.shrink(step):
            log.warning("a step of %d tokens ran out of memory (%s): trying half of it", step.num_tokens, error)
            return
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
        self._recorder.ended(reason)
        self._forget(generation.sequence)
        self._update_stats()
        generation.end(reason, error)

    def _forget(self, sequence: Sequence) -> None:
        with self._wake:
            self._impatient.discard(self._generations.pop(sequence))

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            self.failure = error
            generations, self._generations = self._generations, {}
            self._impatient.clear()
        failure = EngineFailure(f"the engine has stopped: {type(error).__name__}: {error}")
        for generation in generations.values():
            generation.end(FinishReason.ERROR, failure)

    def _update_stats(self) -> None:
        self.stats = self._recorder.snapshot(self.scheduler)


def _out_of_memory(error: Exception) -> bool:
    # On a CPU torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
