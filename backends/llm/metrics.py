"""The engine's numbers on Triton's metrics page, under vLLM's names where vLLM has one."""

import threading
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils
from engine.engine import Stats

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


class Metrics:
    """Copies the engine's statistics to Triton twice a second.

    One thread does all of it: Triton's metric objects are not safe to use from several.
    """

    def __init__(self, stats: Callable[[], Stats], labels: dict[str, str], period: float = 0.5) -> None:
        self._stats = stats
        self._period = period
        self._told = Stats(kv_blocks=1)
        self._families: list[Any] = []  # a metric dies with its family
        self._gauges = self._make(GAUGES, pb_utils.MetricFamily.GAUGE, labels)
        self._counters = self._make(COUNTERS, pb_utils.MetricFamily.COUNTER, labels)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llm-metrics", daemon=True)
        self._thread.start()

    def _make(self, table: Table, kind: Any, labels: dict[str, str]) -> dict[str, Any]:
        metrics = {}
        for name, (description, _) in table.items():
            family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
            self._families.append(family)
            metrics[name] = family.Metric(labels=labels)
        return metrics

    def close(self) -> None:
        """Triton is told that they are gone now, while it listens; metrics before their families."""
        self._stopping.set()
        self._thread.join()
        self._gauges.clear()
        self._counters.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._stopping.wait(self._period):
            self._publish()

    def _publish(self) -> None:
        now, before = self._stats(), self._told
        if now is before:
            return
        for name, (_, value) in GAUGES.items():
            self._gauges[name].set(value(now))
        for name, (_, value) in COUNTERS.items():
            self._counters[name].increment(value(now) - value(before))
        self._told = now
