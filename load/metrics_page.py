"""Triton's metrics page: what the server says of itself while it is measured."""

import json
import re
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self, TextIO

Page = Mapping[tuple[str, frozenset[tuple[str, str]]], float]

NAMES = (
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_queue_duration_us",
    "nv_inference_pending_request_count",
    # Of our LLM backend, under vLLM's names where vLLM has one.
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total",
    "llm:steps_total",
)
LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """text: in Prometheus' exposition format."""
    page = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            name, labels, value = match.groups()
            page[name, frozenset(LABEL.findall(labels or ""))] = float(value)
    return page


def read(url: str, timeout: float = 5.0) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """url: host:port of the metrics, or a whole address. OSError when nobody answers."""
    whole = url if "//" in url else f"http://{url}/metrics"
    with urllib.request.urlopen(whole, timeout=timeout) as response:
        return parse(response.read().decode())


def of_model(page: Page, model: str) -> dict[str, float]:
    """The model's values of NAMES, added up over its versions and devices. What the page lacks is left out."""
    values: dict[str, float] = {}
    for (name, labels), value in page.items():
        if name in NAMES and ("model", model) in labels:
            values[name] = values.get(name, 0.0) + value
    return values


class Poller(threading.Thread):
    """Appends {"time": seconds since the run's start, name: value, ...} to a file, until it is stopped.

    A page that can't be read is left out: a server that is too busy to answer is no reason to end a measurement.
    Each time is the middle between asking and answer.
    """

    def __init__(
        self, url: str, model: str, path: Path | str, *, start: float | None = None, period: float = 0.25
    ) -> None:
        """start: the run's start by time.time(); None: now."""
        super().__init__(name="metrics", daemon=True)
        self._url, self._model, self._path, self._period = url, model, Path(path), period
        self._start_time = time.time() if start is None else start
        self._stopping = threading.Event()

    def run(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            due = time.monotonic()
            while True:
                self._poll(file)
                if self._stopping.is_set():
                    return  # once more after the end, so that what the last requests added is counted
                due = max(due + self._period, time.monotonic())
                self._stopping.wait(due - time.monotonic())

    def _poll(self, file: TextIO) -> None:
        asked = time.time()
        try:
            values = of_model(read(self._url), self._model)
        except (OSError, ValueError):
            return
        moment = (asked + time.time()) / 2 - self._start_time
        file.write(json.dumps({"time": moment, **values}) + "\n")
        file.flush()

    def stop(self) -> None:
        """Reads the page a last time and ends."""
        self._stopping.set()
        self.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
