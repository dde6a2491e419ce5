"""Conducts a run over all processes: waits until each is ready, gives the common start, collects what they measure.

It lives in the master, or in the only process there is. Messages: a worker sends load_ready, then load_samples often,
then load_done; load_failed at any time. The master answers with load_begin, once. So the samples of all workers, on
whatever machines, come together in one file. Clocks of several machines must agree (NTP): the start is a moment of
time.time().
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from load.figures import Figures, summarise
from load.metrics_page import Poller
from load.options import Options
from load.percentiles import Spread
from load.samples import Sample, Writer

logger = logging.getLogger(__name__)

HEAD_START = 0.5  # seconds from the message to the start, so that it has reached everybody
LATE_SHARE = 0.01  # of all arrivals


class Conductor:
    def __init__(
        self, options: Options, seconds: float | None, send: Callable[[str, dict[str, Any], str], None]
    ) -> None:
        """seconds: how long requests may arrive. send(type, data, worker) reaches one worker."""
        self.failure: str | None = None
        self.ended = False
        self._options, self._seconds, self._send = options, seconds, send
        self._users: dict[str, int] = {}  # of each worker that is ready
        self._riding: set[str] = set()  # workers that have begun and not ended
        self._began = False
        self._late = {"arrivals": 0, "crowded": 0, "slow": 0}
        self._samples: list[Sample] = []
        self._writer = Writer(options.samples) if options.samples else None
        self._poller: Poller | None = None

    @property
    def finished(self) -> bool:
        return self.failure is not None or (self._began and not self._riding)

    def ready(self, worker: str, users: int, workers: Iterable[str]) -> None:
        """workers: all that must be ready."""
        self._users[worker] = users
        if self._began or not set(workers) <= self._users.keys():
            return
        self._began = True
        # Requests go to those who have users to send them.
        able = sorted(name for name, count in self._users.items() if count)
        self._riding = set(able)
        start = time.time() + HEAD_START
        logger.info("The run starts at %.3f with %d users in %d processes", start, sum(self._users.values()), len(able))
        if self._options.metrics_url:
            self._poller = Poller(self._options.metrics_url, self._options.model, self._options.metrics, start=start)
            self._poller.start()
        for position, name in enumerate(able):
            share = {"start": start, "position": position, "of": len(able), "seconds": self._seconds}
            self._send("load_begin", share, name)

    def collect(self, samples: Iterable[dict[str, Any]]) -> None:
        for values in samples:
            sample = Sample.from_dict(values)
            self._samples.append(sample)
            if self._writer:
                self._writer.write(sample)

    def done(self, worker: str, late: dict[str, int]) -> None:
        for name in self._late:
            self._late[name] += late[name]
        self._riding.discard(worker)
        if not self._riding:
            self._judge()

    def check(self, alive: Iterable[str]) -> None:
        """Fails the run if one of its workers is not among those alive."""
        if lost := self._riding - set(alive):
            self.fail(f"{len(lost)} of the processes that send requests ended, and their requests with them")

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            logger.error("error: %s", reason)

    def end(self) -> None:
        """The run is over, whether or not it was complete. When it was stopped, a few samples may still come."""
        self.ended = True
        if self._poller:
            self._poller.stop()
            self._poller = None
        if self._samples:
            for line in lines(summarise(self._samples, self._options.slo)):
                logger.info(line)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None

    def _judge(self) -> None:
        arrivals, crowded, slow = self._late["arrivals"], self._late["crowded"], self._late["slow"]
        if crowded > LATE_SHARE * arrivals:
            self.fail(
                f"not enough users: {crowded} of {arrivals} arrivals found no idle user within 50 ms; raise --users"
            )
        elif slow > LATE_SHARE * arrivals:
            # Their latencies count from the intended start as all do: too long rather than too short.
            logger.warning("%d of %d arrivals were sent more than 50 ms late: this machine is too busy", slow, arrivals)


def lines(figures: Figures) -> list[str]:
    """The figures of a run for people to read."""
    said = [
        f"{figures.requests} requests in {figures.seconds:.1f} s, {figures.failed} failed; per second: "
        f"{figures.requests_per_second:.2f} requests, {figures.output_tokens_per_second:.1f} output tokens, "
        f"{figures.images_per_second:.2f} images"
    ]
    if figures.goodput is not None:
        said[0] += (
            f", goodput {figures.goodput:.2f} requests; the run {'keeps to' if figures.slo_holds else 'breaks'} the SLO"
        )
    for name in ("ttft", "tpot", "itl", "e2el"):
        spread: Spread | None = getattr(figures, name)
        if spread:
            said.append(
                f"{name.upper():4} ms: mean {spread.mean * 1e3:.1f}, p50 {spread.p50 * 1e3:.1f}, "
                f"p90 {spread.p90 * 1e3:.1f}, p95 {spread.p95 * 1e3:.1f}, p99 {spread.p99 * 1e3:.1f}"
            )
    return said
