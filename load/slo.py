"""Service-level objectives: what a request, or a run, must keep to. `ttft=500ms,itl_p99=100ms,e2e_p99=2s`"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from load.percentiles import percentile
from load.samples import Sample

ALLOWED = (
    "METRIC=TIME with the metrics ttft, tpot, itl and e2e, each plain, with _mean or with _pNN, and a time in ms or s"
)
PART = re.compile(r"(ttft|tpot|itl|e2e)(?:_(mean|p\d+(?:\.\d+)?))?=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True)
class Threshold:
    metric: str
    statistic: str | None  # "mean", "p99" or as it was left
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}" if self.statistic else self.metric

    def values(self, sample: Sample) -> list[float]:
        """What the request has of this metric: many gaps, or one time, or nothing (TPOT of one token)."""
        if self.metric == "itl":
            return sample.itl
        value = {"ttft": sample.ttft, "tpot": sample.tpot, "e2e": sample.e2el}[self.metric]
        return [] if value is None else [value]

    def of_request(self, sample: Sample) -> float | None:
        """The request's own value. Of its many ITLs: the statistic, and the longest where none is stated."""
        values = self.values(sample)
        if not values:
            return None
        if self.statistic == "mean":
            return fmean(values)
        return percentile(values, float(self.statistic[1:]) if self.statistic else 100)

    def of_run(self, samples: Sequence[Sample]) -> float | None:
        """The statistic over all requests (of ITL: over all gaps), p99 where none is stated.

        A failed request counts as infinitely slow, or a server would look better for refusing work: with 1 % of them
        failed, the run's p99 is the slowest success, with more it is infinite, and so is any mean.
        None when successes have no such value.
        """
        succeeded = [sample for sample in samples if sample.error is None]
        if not succeeded:
            return math.inf
        values = [value for sample in succeeded for value in self.values(sample)]
        if self.statistic == "mean":
            if len(succeeded) < len(samples):
                return math.inf
            return fmean(values) if values else None
        nth = float((self.statistic or "p99")[1:]) * len(samples) / len(succeeded)
        if nth > 100:
            return math.inf
        return percentile(values, nth) if values else None


@dataclass(frozen=True)
class Slo:
    thresholds: tuple[Threshold, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """ValueError names the part that is wrong and what is allowed."""
        thresholds = []
        for part in text.split(","):
            match = PART.fullmatch(part.strip())
            if not match:
                raise ValueError(f"slo has the part {part.strip()!r}; allowed: {ALLOWED}")
            metric, statistic, number, unit = match.groups()
            if statistic not in (None, "mean") and not 0 <= float(statistic[1:]) <= 100:
                raise ValueError(f"slo has the percentile {statistic!r}; allowed: p0 to p100")
            thresholds.append(Threshold(metric, statistic, float(number) / (1000 if unit == "ms" else 1)))
        names = [threshold.name for threshold in thresholds]
        if len(set(names)) < len(names):
            raise ValueError(f"slo is {text!r}; allowed: each metric and statistic once")
        return cls(tuple(thresholds))

    def __str__(self) -> str:
        return ",".join(f"{threshold.name}={threshold.seconds * 1000:g}ms" for threshold in self.thresholds)

    def meets(self, sample: Sample) -> bool:
        """Whether one request kept to all thresholds. A failed one did not; a value that it has not is no breach."""
        if sample.error is not None:
            return False
        values = [(threshold.of_request(sample), threshold.seconds) for threshold in self.thresholds]
        return all(value is None or value <= limit for value, limit in values)

    def observed(self, samples: Sequence[Sample]) -> dict[str, float | None]:
        """What the run reached, by the thresholds' names (`ttft_p99`), in seconds."""
        return {threshold.name: threshold.of_run(samples) for threshold in self.thresholds}

    def holds(self, samples: Sequence[Sample]) -> bool:
        """Whether the run as a whole kept to all thresholds."""
        values = [(threshold.of_run(samples), threshold.seconds) for threshold in self.thresholds]
        return all(value is None or value <= limit for value, limit in values)

    def goodput(self, samples: Sequence[Sample], seconds: float) -> float:
        """Requests per second that met all thresholds."""
        return sum(map(self.meets, samples)) / seconds if seconds > 0 else 0.0
