"""Who sat where on the bus, and when: from the samples of a run to bars in lanes."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from load.samples import Sample


@dataclass(frozen=True)
class Ride:
    """One request from its first token to its last, in seconds since the run's start."""

    index: int
    lane: int
    begin: float
    end: float


def rides(samples: Sequence[Sample]) -> list[Ride]:
    """Each request takes the lowest lane that is free when its first token comes. Ordered by that moment.

    A lane is free again with the last token of who had it: nobody else's client can see how long a batch still held
    the seat, so a seat that rides along empty is one that is not drawn.
    """
    free: list[int] = []
    taken: list[tuple[float, int]] = []  # (end, lane)
    made: list[Ride] = []
    lanes = 0
    for sample in sorted((s for s in samples if len(s.stamps) > 1), key=lambda sample: sample.stamps[0]):
        begin, end = sample.stamps[0], sample.stamps[-1]
        while taken and taken[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
        heapq.heappush(taken, (end, lane))
        made.append(Ride(sample.index, lane, begin, end))
    return made


def seats_used(ridden: Sequence[Ride]) -> int:
    """Most lanes taken at once."""
    return max((ride.lane + 1 for ride in ridden), default=0)


def mean_seats(ridden: Sequence[Ride]) -> float:
    """Mean number of passengers over the time in which there was at least one. ridden: ordered by `begin`."""
    busy = 0.0
    until = float("-inf")
    for ride in ridden:
        busy += max(0.0, ride.end - max(ride.begin, until))
        until = max(until, ride.end)
    return sum(ride.end - ride.begin for ride in ridden) / busy if busy else 0.0
