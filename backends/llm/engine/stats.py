"""What the engine counts and times. The loop's thread records; anyone reads the snapshots, which never change."""

import bisect
from dataclasses import dataclass, field

from engine.scheduler import Scheduler, Step
from engine.sequence import FinishReason, Sequence

# Upper bounds in seconds; the last bucket has none. Fine enough for percentiles of a CPU's steps and of a GPU's.
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


@dataclass(frozen=True)
class Distribution:
    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # of each bucket, one more than bounds
    total: float  # sum of all values


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


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
    ended: dict[FinishReason, int] = field(default_factory=dict)
    distributions: dict[str, Distribution] = field(default_factory=dict)


class Recorder:
    def __init__(self) -> None:
        self._steps = 0
        self._output_tokens = 0
        self._ended = dict.fromkeys(FinishReason, 0)
        self._step_began = 0.0
        self._histograms = {
            "ttft": Histogram(SECONDS),
            "itl": Histogram(SECONDS),
            "tpot": Histogram(SECONDS),
            "e2el": Histogram(SECONDS),
            "queue_time": Histogram(SECONDS),
            "prompt_tokens": Histogram(COUNTS),
            "output_tokens": Histogram(COUNTS),
            "n": Histogram(COUNTS),
            "step_time": Histogram(SECONDS),
            "step_tokens": Histogram(COUNTS),
            "step_requests": Histogram(COUNTS),
        }

    def seated(self, step: Step, now: float) -> None:
        """Before a step: whoever is in one for the first time has waited until now."""
        self._step_began = now
        for entry in step.scheduled:
            times = entry.sequence.times
            if times.seated is None:
                times.seated = now
                self._histograms["queue_time"].add(now - times.arrived)

    def stepped(self, step: Step, now: float) -> None:
        self._steps += 1
        self._histograms["step_time"].add(now - self._step_began)
        self._histograms["step_tokens"].add(step.num_tokens)
        self._histograms["step_requests"].add(len(step.scheduled))

    def token(self, sequence: Sequence, now: float) -> None:
        """A sequence got a token, perhaps its last."""
        self._output_tokens += 1
        times = sequence.times
        if times.last_token is None:
            times.first_token = now
            self._histograms["ttft"].add(now - times.arrived)
        else:
            self._histograms["itl"].add(now - times.last_token)
        times.last_token = now
        if sequence.finish_reason:
            self.ended(sequence.finish_reason)
            self._histograms["e2el"].add(now - times.arrived)
            self._histograms["prompt_tokens"].add(len(sequence.prompt))
            self._histograms["output_tokens"].add(sequence.num_output)
            if sequence.leader is None:
                self._histograms["n"].add(sequence.params.n)
            if sequence.num_output > 1:
                self._histograms["tpot"].add((now - times.first_token) / (sequence.num_output - 1))

    def ended(self, reason: FinishReason) -> None:
        self._ended[reason] += 1

    def snapshot(self, scheduler: Scheduler) -> Stats:
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks=scheduler.pool.num_blocks,
            kv_blocks_used=scheduler.pool.num_used,
            steps=self._steps,
            prompt_tokens=scheduler.num_prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            preemptions=scheduler.num_preemptions,
            ended=dict(self._ended),
            distributions={name: histogram.snapshot() for name, histogram in self._histograms.items()},
        )
