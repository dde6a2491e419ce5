"""A seeded simulation of servers whose step takes as long as was measured: what load/size.py counts servers with.

For `llm` the rules are the scheduler's: seats, a budget of tokens for each step, decodes first, prompts in chunks. For
`sdxl` they are those of Triton's dynamic batching: a batch leaves when it is full or its first request has waited for
the delay, and all its steps are run. A request goes to the server that has the fewest.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from load import arrivals
from load.samples import Kind, Sample
from load.workload import Lengths


@dataclass(frozen=True)
class Curve:
    """Seconds of a step by its rows. Lines between the points; flat before the first, the last line goes on."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """text: ROWS:MILLISECONDS,... ValueError says what is wrong and what is allowed."""
        try:
            pairs = [tuple(map(float, part.split(":"))) for part in text.split(",")]
            points = tuple((rows, milliseconds / 1000) for rows, milliseconds in pairs)
        except ValueError as error:
            raise ValueError(f"curve is {text!r}; allowed: ROWS:MILLISECONDS,... with numbers") from error
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(points))
        if not rising or points[0][0] < 1 or points[0][1] <= 0:
            raise ValueError(f"curve is {text!r}; allowed: rows that rise from at least 1, times that don't fall")
        return cls(points)

    def __call__(self, rows: float) -> float:
        if rows <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        (x0, y0), (x1, y1) = next(
            (pair for pair in itertools.pairwise(self.points) if rows <= pair[1][0]), self.points[-2:]
        )
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


@dataclass
class Job:
    """A request. Tokens of a prompt that are not computed, tokens (or the one picture) that are not made."""

    index: int
    arrived: float
    prompt: int = 1
    output: int = 1
    stamps: list[float] = field(default_factory=list)

    def advance(self, tokens: int, now: float) -> bool:
        """After a step that computed so many of its tokens; says whether it is done."""
        self.prompt = max(0, self.prompt - tokens)
        if self.prompt == 0:  # the step that completes a prompt makes the first token
            self.stamps.append(now)
        return len(self.stamps) == self.output


class Server(Protocol):
    waiting: deque[Job]

    @property
    def requests(self) -> int: ...

    def ready(self, now: float) -> float:
        """When the next step may begin; infinite when there is nothing to do."""

    def begin(self) -> float:
        """Picks the next step; returns its seconds."""

    def end(self, now: float) -> None:
        """After that step."""


@dataclass
class Continuous:
    """The model `llm`."""

    curve: Curve
    seats: int
    budget: int  # tokens of a step
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    step: list[tuple[Job, int]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def ready(self, now: float) -> float:
        return now if self.requests else math.inf

    def begin(self) -> float:
        while self.waiting and len(self.running) < self.seats:
            self.running.append(self.waiting.popleft())
        left = self.budget
        self.step = []
        for job in sorted(self.running, key=lambda job: job.prompt > 0):  # stable: first come, first served
            if tokens := min(job.prompt or 1, left):
                self.step.append((job, tokens))
                left -= tokens
        return self.curve(self.budget - left)

    def end(self, now: float) -> None:
        done = {job.index for job, tokens in self.step if job.advance(tokens, now)}
        self.running = [job for job in self.running if job.index not in done]


@dataclass
class Dynamic:
    """The model `sdxl`."""

    curve: Curve
    seats: int  # max_batch_size
    delay: float  # seconds
    steps: int
    waiting: deque[Job] = field(default_factory=deque)
    batch: list[Job] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.batch)

    def ready(self, now: float) -> float:
        if not self.waiting:
            return math.inf
        return now if len(self.waiting) >= self.seats else max(now, self.waiting[0].arrived + self.delay)

    def begin(self) -> float:
        self.batch = [self.waiting.popleft() for _ in range(min(self.seats, len(self.waiting)))]
        return self.curve(len(self.batch)) * self.steps

    def end(self, now: float) -> None:
        for job in self.batch:
            job.advance(1, now)
        self.batch = []


@dataclass(frozen=True)
class Outcome:
    samples: list[Sample]
    busy: float  # share of the time in which a server computes


def simulate(servers: Sequence[Server], jobs: Sequence[Job], kind: Kind, seed: int = 0) -> Outcome:
    """jobs: by arrival. Ends when all are done."""
    rng = random.Random(f"queueing/{seed}")
    order = itertools.count()  # events of the same moment stay in the order in which they were made
    # A job that arrives; or a server whose step ends, or that was to be asked again then.
    events: list[tuple[float, int, Job | None, Server | None, bool]] = [
        (job.arrived, next(order), job, None, False) for job in jobs
    ]
    computing: set[int] = set()  # by id(): servers are not hashable
    now = spent = 0.0
    while events:
        now, _, job, server, ends = heapq.heappop(events)
        if job:
            fewest = min(one.requests for one in servers)
            server = rng.choice([one for one in servers if one.requests == fewest])
            server.waiting.append(job)
        assert server is not None
        if ends:
            server.end(now)
            computing.remove(id(server))
        if id(server) in computing:
            continue
        ready = server.ready(now)
        if ready <= now:
            seconds = server.begin()
            spent += seconds
            computing.add(id(server))
            heapq.heappush(events, (now + seconds, next(order), None, server, True))
        elif ready < math.inf and (ends or len(server.waiting) == 1):  # else it is to be asked already
            heapq.heappush(events, (ready, next(order), None, server, False))
    return Outcome([_sample(job, kind) for job in jobs], spent / (now * len(servers)) if now else 0.0)


def _sample(job: Job, kind: Kind) -> Sample:
    tokens = [1 if kind == "llm" else 0] * len(job.stamps)
    stamps = job.stamps
    return Sample(kind, kind, "grpc", job.index, job.arrived, job.arrived, stamps, tokens, None, stamps[-1], None)


def make_jobs(
    traffic: arrivals.Arrivals, count: int, seed: int, prompts: Lengths | None = None, outputs: Lengths | None = None
) -> list[Job]:
    """Requests for texts of these lengths, or for pictures."""
    lengths = [random.Random(f"queueing/{seed}/{index}") for index in range(count)]
    return [
        Job(index, moment, prompts.draw(rng) if prompts else 1, outputs.draw(rng) if outputs else 1)
        for index, (moment, rng) in enumerate(zip(traffic.times(seed, count=count), lengths, strict=True))
    ]
