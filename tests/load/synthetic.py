"""Samples, runs and folders of runs that nobody had to measure."""

import json
from collections.abc import Sequence
from pathlib import Path

from load import drive, report, samples
from load.plan import Run, Traffic
from load.samples import Kind, Sample


def text(index: int, intended: float, stamps: Sequence[float], error: str | None = None) -> Sample:
    """A request to an LLM: a token a stamp."""
    return Sample(
        model="llm",
        kind="llm",
        protocol="grpc",
        index=index,
        intended=intended,
        started=intended,
        stamps=list(stamps),
        tokens=[1] * len(stamps),
        input_tokens=4,
        ended=stamps[-1] if stamps else intended,
        error=error,
    )


def picture(index: int, intended: float, ended: float) -> Sample:
    return Sample("sdxl", "sdxl", "grpc", index, intended, intended, [ended], [0], None, ended, None)


def traffic(rate: float | None = 1, users: int | None = None, requests: int = 4, outputs: str | None = None) -> Traffic:
    spec = None if users else f"poisson:{rate:g}"
    return Traffic(spec, users, requests, None, outputs)


def run(model: str, load: Traffic, repeat: int = 0, kind: Kind = "llm") -> Run:
    return Run(model, kind, load, repeat, seed=7)


def store(folder: Path, one: Run, taken: Sequence[Sample], readings: Sequence[dict[str, float]] = ()) -> None:
    """As load/drive.py leaves a run that is complete."""
    target = folder / report.RUNS / one.key
    target.mkdir(parents=True)
    samples.write(target / drive.SAMPLES, taken)
    (target / drive.METRICS).write_text("".join(json.dumps(reading) + "\n" for reading in readings))
    (target / drive.RUN).write_text(json.dumps(one.as_dict()))
