"""Exact percentiles of raw values. Locust's own statistics keep two digits, and none of the gaps between tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def percentile(values: Sequence[float], nth: float) -> float:
    """The value below which `nth` percent lie, interpolated between neighbours as NumPy (and so vLLM) does it.

    values: at least one, in any order; nth: 0 to 100.
    """
    return _of_sorted(sorted(values), nth)


def spread(values: Sequence[float]) -> Spread | None:
    """None when there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return Spread(mean, *(_of_sorted(ordered, nth) for nth in (50, 90, 95, 99)))


def _of_sorted(ordered: list[float], nth: float) -> float:
    place = (len(ordered) - 1) * nth / 100
    below = math.floor(place)
    if below == place:
        return ordered[below]
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)
