"""The engine's numbers on Triton's metrics page, under vLLM's names where vLLM has one."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import triton_python_backend_utils as pb_utils
from engine.sequence import FinishReason
from engine.stats import Stats

Counter = tuple[str, str, dict[str, str], float]  # name, description, labels, value
Table = dict[str, tuple[str, Callable[[Stats], float]]]  # name: description, value

GAUGES: Table = {
    "vllm:num_requests_running": ("Requests that have a seat", lambda s: s.running),
    "vllm:num_requests_waiting": ("Requests that wait for a seat", lambda s: s.waiting),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", lambda s: s.kv_blocks_used / s.kv_blocks),
    "llm:kv_blocks": ("KV blocks in all", lambda s: s.kv_blocks),
    "llm:kv_blocks_used": ("KV blocks that requests hold", lambda s: s.kv_blocks_used),
}
COUNTERS: Table = {
    "vllm:prompt_tokens_total": ("Prompt tokens taken in", lambda s: s.prompt_tokens),
    "vllm:generation_tokens_total": ("Tokens generated", lambda s: s.output_tokens),
    "vllm:num_preemptions_total": ("Requests put back into the queue for want of KV blocks", lambda s: s.preemptions),
    "llm:prefix_cached_tokens_total": ("Tokens found in the prefix cache", lambda s: s.cached_tokens),
    "llm:steps_total": ("Steps of the engine, each one pass over the weights", lambda s: s.steps),
}
# Made of counters, `NAME_bucket{le=...}`, `NAME_sum` and `NAME_count`, which is what Prometheus makes of a histogram:
# Triton's own kind takes values one by one, with a round trip to the server for each.
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token", "ttft"),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request", "itl"),
    "vllm:time_per_output_token_seconds": ("The same under vLLM's older name", "itl"),
    "vllm:request_time_per_output_token_seconds": ("Mean time of a request's tokens after the first", "tpot"),
    "vllm:e2e_request_latency_seconds": ("From a request's arrival to its last token", "e2el"),
    "vllm:request_queue_time_seconds": ("From a request's arrival to its first step", "queue_time"),
    "vllm:request_prompt_tokens": ("Prompt tokens of an answer that came to its end", "prompt_tokens"),
    "vllm:request_generation_tokens": ("Tokens of an answer that came to its end", "output_tokens"),
    "vllm:request_params_n": ("Answers that a request asked for", "n"),
    "llm:step_seconds": ("One pass over the weights", "step_time"),
    "llm:step_tokens": ("Tokens of a step", "step_tokens"),
    "llm:step_requests": ("Requests of a step: the batch", "step_requests"),
}
HISTOGRAM_PERIODS = 4
ENDED = "vllm:request_success_total"  # as vLLM has it, by `finished_reason`, failures among them


def totals(stats: Stats) -> Iterator[Counter]:
    for name, (description, value) in COUNTERS.items():
        yield name, description, {}, value(stats)
    for reason in FinishReason:
        yield ENDED, "Requests that ended, by the reason", {"finished_reason": reason.value}, stats.ended.get(reason, 0)


def histogram_counters(stats: Stats) -> Iterator[Counter]:
    for name, (description, key) in HISTOGRAMS.items():
        if distribution := stats.distributions.get(key):
            bounds = [*(f"{bound:g}" for bound in distribution.bounds), "+Inf"]
            for bound, count in zip(bounds, itertools.accumulate(distribution.counts), strict=True):
                yield f"{name}_bucket", description, {"le": bound}, count
            yield f"{name}_sum", description, {}, distribution.total
            yield f"{name}_count", description, {}, sum(distribution.counts)


class Metrics:
    """Copies the engine's statistics to Triton twice a second, its histograms every two seconds.

    One thread does all of it: Triton's metric objects are not safe to use from several.
    """

    def __init__(self, stats: Callable[[], Stats], labels: dict[str, str], period: float = 0.5) -> None:
        self._stats = stats
        self._period = period
        self._labels = labels
        self._seen: Stats | None = None
        self._seen_in_histograms: Stats | None = None
        self._families: dict[str, Any] = {}  # a metric dies with its family
        self._gauges = {
            name: self._metric(name, description, pb_utils.MetricFamily.GAUGE, {})
            for name, (description, _) in GAUGES.items()
        }
        self._counters: dict[tuple[str, ...], Any] = {}
        self._told: dict[tuple[str, ...], float] = {}  # what each counter was raised to
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llm-metrics", daemon=True)
        self._thread.start()

    def _metric(self, name: str, description: str, kind: Any, labels: dict[str, str]) -> Any:
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        return self._families[name].Metric(labels=self._labels | labels)

    def close(self) -> None:
        """Triton is told that they are gone now, while it listens; metrics before their families."""
        self._stopping.set()
        self._thread.join()
        self._gauges.clear()
        self._counters.clear()
        self._families.clear()

    def _run(self) -> None:
        for turn in itertools.count(1):
            if self._stopping.wait(self._period):
                return
            now = self._stats()
            if now is not self._seen:
                self._seen = now
                for name, (_, value) in GAUGES.items():
                    self._gauges[name].set(value(now))
                self._raise(totals(now))
            if turn % HISTOGRAM_PERIODS == 0 and now is not self._seen_in_histograms:
                self._seen_in_histograms = now
                self._raise(histogram_counters(now))

    def _raise(self, counters: Iterator[Counter]) -> None:
        """Counters to their values. Those that stay are left alone: each call is a round trip to the server."""
        for name, description, label, value in counters:
            key = (name, *label.values())
            if key not in self._counters:
                self._counters[key] = self._metric(name, description, pb_utils.MetricFamily.COUNTER, label)
            elif value == self._told[key]:
                continue
            self._counters[key].increment(value - self._told.get(key, 0.0))
            self._told[key] = value
