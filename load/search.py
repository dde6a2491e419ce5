"""Finds the best of many settings with few measurements: a coarse grid, then neighbours of the best until none is
better. That finds the best one where a result rises towards it from all sides, as goodput does for seats and delays.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from load.settings import Setting, Space, canonical


@dataclass(frozen=True)
class Outcome:
    """What was measured of one setting. Times in seconds."""

    setting: dict[str, int]
    goodput: float = 0.0  # requests per second that kept to the SLO
    holds: bool = False  # whether the run as a whole did
    throughput: float = 0.0  # output tokens, or images, per second
    observed: tuple[tuple[str, float | None], ...] = ()  # what the SLO speaks of, by its names
    e2el_p99: float = float("inf")
    mean_batch: float | None = None
    failure: str | None = None

    @property
    def merit(self) -> tuple[float, bool, float]:
        """More is better. Goodput to two digits, for the rest is noise; among equals what holds, then the fastest."""
        return (float(f"{self.goodput:.2g}"), self.holds, -self.e2el_p99)


Measure = Callable[[dict[str, int]], Outcome]


def search(space: Space, measure: Measure, budget: int) -> Iterator[Outcome]:
    """Yields each outcome as it is measured, at most `budget`; no setting twice."""
    seen: dict[tuple[int, ...], Outcome] = {}
    names = list(space)

    def unseen(places: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        for place in places:
            if all(0 <= at < len(space[name]) for at, name in zip(place, names, strict=True)):
                reduced = _place(space, canonical(_setting(space, place)))
                if reduced not in seen and len(seen) < budget:
                    yield reduced

    def tried(place: tuple[int, ...]) -> Outcome:
        seen[place] = measure(_setting(space, place))
        return seen[place]

    for place in unseen(itertools.product(*(_coarse(len(space[name])) for name in names))):
        yield tried(place)
    while seen and len(seen) < budget:
        best = max(seen, key=lambda place: seen[place].merit)
        for place in unseen(_neighbours(best)):
            outcome = tried(place)
            yield outcome
            if outcome.merit > seen[best].merit:
                break
        else:
            return


def _coarse(length: int) -> list[int]:
    """Three of a long list, two of a short one, none at its edges."""
    places = {length // 6, length // 2, length - 1 - length // 6} if length > 7 else {length // 3, 2 * length // 3}
    return sorted(places)


def _neighbours(place: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for axis, at in enumerate(place):
        for step in (1, -1):
            yield (*place[:axis], at + step, *place[axis + 1 :])


def _setting(space: Space, place: tuple[int, ...]) -> dict[str, int]:
    return {name: values[at] for (name, values), at in zip(space.items(), place, strict=True)}


def _place(space: Space, setting: Setting) -> tuple[int, ...]:
    return tuple(values.index(setting[name]) for name, values in space.items())
