"""What one request met with, and the file that keeps it.

Names and definitions are those of vLLM's `bench serve`, with one difference: latencies count from the moment at which
the request was meant to start, not from when a client got round to sending it. A server that stalls would otherwise
stop its own clock (coordinated omission: while it stalls, nobody sends, so nobody waits).
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

Kind = Literal["llm", "sdxl"]
Protocol = Literal["grpc", "http"]


@dataclass(frozen=True)
class Sample:
    """One request. All times are seconds since the run's common start."""

    model: str
    kind: Kind
    protocol: Protocol
    index: int  # of the arrival in the schedule
    intended: float  # in a closed loop the same as `started`
    started: float
    stamps: list[float]  # when each response came that carried tokens or a picture
    tokens: list[int]  # that each of them carried; of pictures all 0
    input_tokens: int | None
    ended: float  # when nothing more could come
    error: str | None

    @property
    def output_tokens(self) -> int:
        return sum(self.tokens) if self.kind == "llm" else 0

    @property
    def ttft(self) -> float | None:
        """Time to first token (or to the picture); None if there was none."""
        return self.stamps[0] - self.intended if self.stamps else None

    @property
    def e2el(self) -> float | None:
        """End-to-end latency: up to the last token; None if there was none."""
        return self.stamps[-1] - self.intended if self.stamps else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first one; None if there were not two."""
        if self.output_tokens < 2:
            return None
        return (self.stamps[-1] - self.stamps[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between responses. One that carries several tokens ends one gap."""
        return [later - earlier for earlier, later in itertools.pairwise(self.stamps)]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """ValueError says what is missing, unknown or not allowed."""
        names = {field.name for field in fields(cls)}
        if names != values.keys():
            raise ValueError(f"a sample has the keys {', '.join(sorted(names))}, not {', '.join(sorted(values))}")
        for name, allowed in (("kind", get_args(Kind)), ("protocol", get_args(Protocol))):
            if values[name] not in allowed:
                raise ValueError(f"{name} is {values[name]!r}; allowed: {', '.join(allowed)}")
        if values["kind"] == "llm" and len(values["stamps"]) != len(values["tokens"]):
            raise ValueError(f"{len(values['stamps'])} stamps but {len(values['tokens'])} tokens; allowed: as many")
        return cls(**values)


class Writer:
    """Writes samples to a new file, one JSON object a line. A line is on disk once `write` returns."""

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (open as long as the writer is)

    def write(self, sample: Sample) -> None:
        self._file.write(json.dumps(asdict(sample)) + "\n")
        self._file.flush()  # a run that is killed keeps what it has measured

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write(path: Path | str, samples: Iterable[Sample]) -> None:
    with Writer(path) as writer:
        for sample in samples:
            writer.write(sample)


def read(path: Path | str) -> list[Sample]:
    """All samples of a file, by index. What a killed writer left of a last line is no sample."""
    samples = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        try:
            samples.append(Sample.from_dict(json.loads(line)))
        except ValueError as error:
            if not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number}: {error}") from error
    return sorted(samples, key=lambda sample: sample.index)
