"""From the samples of one run to its figures, under vLLM's names and exact."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load.percentiles import Spread, spread
from load.samples import Sample
from load.slo import Slo


@dataclass(frozen=True)
class Figures:
    """All times in seconds. A failed request is counted, but is in no rate and no latency."""

    requests: int  # with the failed ones
    failed: int
    seconds: float  # from the first intended start to the last end
    output_tokens: int
    images: int
    output_tokens_per_second: float
    requests_per_second: float
    images_per_second: float
    goodput: float | None  # requests/s that met the SLO; None without one
    slo_holds: bool | None  # whether the run as a whole kept to it
    ttft: Spread | None  # each None when no request has such a value
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(samples: Sequence[Sample], slo: Slo | None = None) -> Figures:
    """samples: of one run against one model."""
    succeeded = [sample for sample in samples if sample.error is None]
    seconds = duration(samples)
    output_tokens = sum(sample.output_tokens for sample in succeeded)
    images = sum(len(sample.stamps) for sample in succeeded if sample.kind == "sdxl")
    return Figures(
        requests=len(samples),
        failed=len(samples) - len(succeeded),
        seconds=seconds,
        output_tokens=output_tokens,
        images=images,
        output_tokens_per_second=_rate(output_tokens, seconds),
        requests_per_second=_rate(len(succeeded), seconds),
        images_per_second=_rate(images, seconds),
        goodput=slo.goodput(samples, seconds) if slo else None,
        slo_holds=slo.holds(samples) if slo else None,
        ttft=spread([sample.ttft for sample in succeeded if sample.ttft is not None]),
        tpot=spread([sample.tpot for sample in succeeded if sample.tpot is not None]),
        itl=spread([gap for sample in succeeded for gap in sample.itl]),
        e2el=spread([sample.e2el for sample in succeeded if sample.e2el is not None]),
    )


def duration(samples: Sequence[Sample]) -> float:
    """Seconds from the first intended start to the last end; 0 without samples."""
    if not samples:
        return 0.0
    return max(sample.ended for sample in samples) - min(sample.intended for sample in samples)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
