"""This process's share of a run: hands requests to idle users at their time, and takes back what they met with.

Open loop: request k of the schedule belongs to process k mod n and is released at its intended moment, whether or not
earlier ones are answered. Closed loop: as many requests are out as there are users, and each answer releases the next.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import gevent
import gevent.event
import gevent.queue

from load.clients import Answer
from load.options import Options
from load.samples import Kind, Protocol, Sample
from load.workload import Work

logger = logging.getLogger(__name__)

LATE = 0.05  # seconds that an arrival may wait for an idle user
FLUSH_PERIOD = 0.25  # seconds between reports


@dataclass(frozen=True)
class Share:
    """Which requests of a run are this process's: `position`, `position + of`, `position + 2 of`, ..."""

    start: float  # common to all processes, by time.time()
    position: int
    of: int
    seconds: float | None  # requests arrive so long; None: no limit


@dataclass(frozen=True)
class Departure:
    """A request that is ready to be sent."""

    index: int
    intended: float | None  # seconds since the start; None: whenever it is taken
    released: float  # by time.perf_counter()
    work: Work
    measured: bool = True


class Dispatcher:
    """Its methods block greenlets, not the process. `send(type, data)` tells the conductor of the run."""

    def __init__(
        self, options: Options, kind: Kind, protocol: Protocol, send: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.options = options
        self._kind, self._protocol, self._send = kind, protocol, send
        self._departures: gevent.queue.SimpleQueue = gevent.queue.SimpleQueue()
        self._outbox: list[dict[str, Any]] = []
        self._out = 0  # released and not answered
        self._exhausted = False
        self._indices: Iterator[int] = iter(())
        self._seconds: float | None = None
        self._zero = 0.0  # time.perf_counter() at the common start
        self._arrivals = 0
        self._late = {"crowded": 0, "slow": 0}
        self._warm: gevent.event.Event | None = None
        self._greenlets: list[gevent.Greenlet] = []

    # What the process's life calls

    def warm_up(self) -> None:
        """Returns when all requests of the warm-up are answered."""
        count = self.options.warm_up
        if count:
            self._warm = gevent.event.Event()
            self._out = count
            for index in range(count):
                # Other prompts than the run's, or its first requests would find theirs in the server's prefix cache.
                work = self.options.work(-1 - index, self._kind)
                self._departures.put(Departure(index, None, time.perf_counter(), work, measured=False))
            self._warm.wait()

    def begin(self, share: Share, users: int) -> None:
        self._zero = time.perf_counter() + (share.start - time.time())
        self._seconds = share.seconds
        self._indices = itertools.count(share.position, share.of)
        self._greenlets = [gevent.spawn(self._release, share, users), gevent.spawn(self._report)]

    def stop(self) -> None:
        """Says what has not been said yet. Whoever still waits for a departure waits for ever."""
        gevent.killall(self._greenlets)
        self._flush()

    def fail(self, reason: str) -> None:
        self._send("load_failed", {"reason": reason})

    # What users call

    def take(self) -> Departure:
        """The next request, when its time has come and nobody else took it."""
        departure: Departure = self._departures.get()
        return departure

    def give_back(
        self, departure: Departure, started: float, answer: Answer, ended: float, error: str | None
    ) -> Sample:
        """started, ended: by time.perf_counter(). Returns what is recorded, unless it was part of the warm-up."""
        intended = started - self._zero if departure.intended is None else departure.intended
        sample = Sample(
            model=self.options.model,
            kind=self._kind,
            protocol=self._protocol,
            index=departure.index,
            intended=intended,
            started=started - self._zero,
            stamps=[stamp - self._zero for stamp in answer.stamps],
            tokens=answer.tokens,
            input_tokens=answer.input_tokens,
            ended=ended - self._zero,
            error=error,
        )
        self._out -= 1
        if not departure.measured:
            if error:
                self.fail(f"the warm-up failed: {error}")
            elif self._out == 0 and self._warm:
                self._warm.set()
            return sample
        if self.options.arrivals:
            self._judge(sample.intended, sample.started, started - departure.released)
        self._outbox.append(asdict(sample))
        if self.options.arrivals is None:
            self._release_next()
        return sample

    def _judge(self, intended: float, started: float, waited: float) -> None:
        """Counts an arrival that was not sent at its time: no user was idle, or this process was slow to release it."""
        if waited > LATE:
            self._late["crowded"] += 1
        elif started - intended > LATE:
            self._late["slow"] += 1

    def _release(self, share: Share, users: int) -> None:
        """Greenlet: puts out what is to be sent."""
        arrivals = self.options.arrivals
        if arrivals is None:
            gevent.sleep(max(0.0, self._zero - time.perf_counter()))
            for _ in range(users):
                self._release_next()
            return
        for index, offset in enumerate(arrivals.stream(self.options.seed)):
            if (self.options.requests is not None and index >= self.options.requests) or (
                share.seconds is not None and offset >= share.seconds
            ):
                break
            if index % share.of == share.position:
                gevent.sleep(max(0.0, self._zero + offset - time.perf_counter()))
                self._arrivals += 1
                self._put(index, offset)
        self._exhausted = True

    def _release_next(self) -> None:
        """Closed loop."""
        index = next(self._indices)
        over = self._seconds is not None and time.perf_counter() - self._zero >= self._seconds
        if over or (self.options.requests is not None and index >= self.options.requests):
            self._exhausted = True
        else:
            self._put(index, None)

    def _put(self, index: int, intended: float | None) -> None:
        self._out += 1
        work = self.options.work(index, self._kind)
        self._departures.put(Departure(index, intended, time.perf_counter(), work))

    def _report(self) -> None:
        """Greenlet: tells the conductor what came back, and at last that nothing more will."""
        while not (self._exhausted and self._out == 0):
            gevent.sleep(FLUSH_PERIOD)
            self._flush()
        self._flush()
        self._send("load_done", {"arrivals": self._arrivals, **self._late})

    def _flush(self) -> None:
        if self._outbox:
            samples, self._outbox = self._outbox, []
            self._send("load_samples", {"samples": samples})
