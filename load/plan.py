"""What a comparison consists of: models, the traffic that each of them gets, and the runs that follow from both."""

import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from load import arrivals
from load.samples import Kind

REQUESTS = 64  # of a run, where nothing else is said
HALF_AN_HOUR = 1_800_000_000  # microseconds; a queue delay this long is never meant to run out


@dataclass(frozen=True)
class Model:
    name: str
    kind: Kind
    seats: int  # max_batch_size; 0: the backend makes the batches
    waits_until_full: bool

    @classmethod
    def from_config(cls, name: str, config: Any) -> Self:
        """config: Triton's ModelConfig."""
        delay = config.dynamic_batching.max_queue_delay_microseconds
        kind: Kind = "sdxl" if config.backend == "sdxl" else "llm"
        return cls(name, kind, config.max_batch_size, waits_until_full=delay >= HALF_AN_HOUR)

    @classmethod
    def from_repository(cls, repository: Path, name: str) -> Self:
        """ValueError if the model isn't there."""
        file = repository / name / "config.pbtxt"
        if not file.is_file():
            there = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
            raise ValueError(f"models has {name!r}; allowed: {', '.join(there) or 'none: no model is there'}")
        return cls.from_config(name, read_config(file))


def read_config(file: Path) -> Any:
    """Triton's ModelConfig out of a config.pbtxt. ValueError says which line is wrong."""
    try:
        return text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"{file}: {error}") from error


@dataclass(frozen=True)
class Traffic:
    """Open loop with `arrivals`, closed loop with `concurrency`; one of them is None."""

    arrivals: str | None
    concurrency: int | None
    requests: int
    prompt_lengths: str | None  # of pictures None, as the next
    output_lengths: str | None
    steps: int | None = None  # of pictures; None: the model's own
    workload: str | None = None  # a file of prompts, instead of the lengths

    @property
    def loop(self) -> str:
        return "closed" if self.arrivals is None else "open"

    @property
    def load(self) -> str:
        """How much is asked, in words for tables."""
        if self.arrivals is None:
            return f"{self.concurrency} at once"
        shape, _, rate = self.arrivals.partition(":")
        return f"{float(rate):g}/s" if shape == "poisson" else self.arrivals

    @property
    def label(self) -> str:
        return self.load + (f", outputs {self.output_lengths}" if self.output_lengths else "")

    @property
    def rate(self) -> float:
        """What orders traffic by how much is asked: requests per second, or users."""
        if self.arrivals is None:
            return float(self.concurrency or 0)
        number = re.search(r"\d+(?:\.\d+)?", self.arrivals)
        return float(number[0]) if number else 0.0

    @property
    def slug(self) -> str:
        """For file names."""
        return re.sub(r"[^a-z0-9.@+]+", "-", f"{self.load} {self.output_lengths or ''}".lower()).strip("-")


@dataclass(frozen=True)
class Run:
    """One model under one traffic, once."""

    model: str
    kind: Kind
    traffic: Traffic
    repeat: int  # from 0
    seed: int

    @property
    def key(self) -> str:
        return f"{self.model}.{self.traffic.slug}.{self.repeat}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**(values | {"traffic": Traffic(**values["traffic"])}))


@dataclass(frozen=True)
class Asked:
    """The traffic that the user asked for, before it is made to fit the models of one kind."""

    arrivals: tuple[str, ...]
    concurrency: tuple[int, ...]
    requests: int | None
    duration: float | None  # seconds of arrivals
    prompt_lengths: str | None
    output_lengths: tuple[str | None, ...]
    steps: int | None = None
    workload: str | None = None

    def traffics(self, models: Sequence[Model], seed: int) -> list[Traffic]:
        """The same number of requests for all models, so that each has the same work.

        A model that waits until its bus is full would keep the last passengers of a number that doesn't fill it.
        """
        bus = math.lcm(*(model.seats for model in models if model.waits_until_full), 1)
        if self.concurrency and self.duration is not None:
            raise ValueError(
                "duration is given with concurrency; allowed: with an open loop, a closed one takes requests"
            )
        loads: list[tuple[str | None, int | None, int]] = [
            (spec, None, self._count(spec, seed)) for spec in self.arrivals
        ]
        loads += [(None, users, self.requests or REQUESTS) for users in self.concurrency]
        return [
            Traffic(
                arrivals=spec,
                concurrency=users,
                requests=max(bus, count // bus * bus),
                prompt_lengths=self.prompt_lengths,
                output_lengths=lengths,
                steps=self.steps,
                workload=self.workload,
            )
            for lengths in self.output_lengths
            for spec, users, count in loads
        ]

    def _count(self, spec: str, seed: int) -> int:
        parsed = arrivals.parse(spec)
        if self.duration is None and math.isinf(parsed.seconds):
            return self.requests or REQUESTS
        return len(parsed.times(seed, duration=self.duration, count=self.requests))


@dataclass(frozen=True)
class Plan:
    runs: list[Run]
    left_out: list[str]  # sentences


def plan(models: Sequence[Model], asked: dict[Kind, Asked], repeats: int, seed: int) -> Plan:
    """Repeat by repeat, in each one model after the other, every second time in reverse.

    So a machine whose speed drifts treats all models alike. All models get the same seed for the same traffic, and
    each traffic and repeat another one: prompts that a server has seen already would be in its prefix cache.
    """
    runs: list[Run] = []
    left_out: dict[str, None] = {}
    by_kind = {kind: asked[kind].traffics([m for m in models if m.kind == kind], seed) for kind in asked}
    for repeat in range(repeats):
        for model in models if repeat % 2 == 0 else reversed(models):
            for traffic in by_kind[model.kind]:
                if model.waits_until_full and traffic.concurrency is not None and traffic.concurrency < model.seats:
                    left_out[
                        f"{model.name} at {traffic.load}: it leaves with {model.seats} passengers, which never come."
                    ] = None
                    continue
                runs.append(Run(model.name, model.kind, traffic, repeat, run_seed(seed, traffic, repeat)))
    return Plan(runs, list(left_out))


def run_seed(seed: int, traffic: Traffic, repeat: int) -> int:
    """Depends on nothing but its arguments: a comparison that is continued, or gets more rates, keeps its schedules."""
    return zlib.crc32(f"{seed} {traffic.slug} {repeat}".encode()) % 1_000_000_000


def by_server(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Runs that follow one another on the same model and repeat share a fresh server."""
    group: list[Run] = []
    for run in runs:
        if group and (run.model, run.repeat) != (group[0].model, group[0].repeat):
            yield group[0].model, group
            group = []
        group.append(run)
    if group:
        yield group[0].model, group
