"""When requests arrive: one seeded schedule for a whole run, whoever sends them.

    poisson:RATE                      each moment is as likely as any other
    gamma:RATE:BURSTINESS             vLLM's burstiness: 1 is Poisson, less is burstier, more is steadier
    constant:RATE                     equal gaps, the first request at once
    steps:RATExSECONDS,RATExSECONDS   Poisson at one rate after the other, then it ends
    spike:BASE:PEAK@START+LENGTH      Poisson at BASE, for LENGTH seconds from START on at PEAK

Rates are requests per second.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

FORMS = (
    "poisson:RATE, gamma:RATE:BURSTINESS, constant:RATE, steps:RATExSECONDS,... or spike:BASE:PEAK@START+LENGTH "
    "with numbers above 0 (a rate of 0 within steps is a pause)"
)


@dataclass(frozen=True)
class Piece:
    """A time during which the rate stays the same."""

    rate: float  # requests per second
    seconds: float = math.inf


@dataclass(frozen=True)
class Arrivals:
    spec: str
    pieces: tuple[Piece, ...]
    burstiness: float = 1.0  # shape of the gamma distribution of gaps; infinite: equal gaps

    @property
    def seconds(self) -> float:
        """How long requests keep arriving; infinite unless the spec says when to end."""
        return sum(piece.seconds for piece in self.pieces)

    def stream(self, seed: int) -> Iterator[float]:
        """Offsets from the start in seconds, rising. The same seed makes the same ones."""
        rng = random.Random(f"arrivals/{seed}")
        begin = 0.0
        for piece in self.pieces:
            if piece.rate > 0:
                yield from self._within(piece, begin, rng)
            begin += piece.seconds

    def times(self, seed: int, duration: float | None = None, count: int | None = None) -> list[float]:
        """The offsets of the stream that lie below `duration`, at most `count`. One of them must end it."""
        if duration is None and count is None and math.isinf(self.seconds):
            raise ValueError(f"arrivals is {self.spec!r}, which never ends; allowed: with a duration or a count")
        limit = math.inf if duration is None else duration
        return list(itertools.takewhile(lambda offset: offset < limit, itertools.islice(self.stream(seed), count)))

    def _within(self, piece: Piece, begin: float, rng: random.Random) -> Iterator[float]:
        # A Poisson process forgets: at the border of two pieces it may start afresh with the new rate.
        end = begin + piece.seconds
        offset = begin
        if math.isinf(self.burstiness):
            for number in itertools.count():
                yield begin + number / piece.rate
        while True:
            offset += rng.gammavariate(self.burstiness, 1 / (piece.rate * self.burstiness))
            if offset >= end:
                return
            yield offset


def parse(spec: str) -> Arrivals:
    """ValueError says what is wrong with the spec and what is allowed."""
    form, _, rest = spec.partition(":")
    try:
        match form:
            case "poisson":
                return Arrivals(spec, (Piece(_number(rest)),))
            case "constant":
                return Arrivals(spec, (Piece(_number(rest)),), burstiness=math.inf)
            case "gamma":
                rate, burstiness = rest.split(":")
                return Arrivals(spec, (Piece(_number(rate)),), _number(burstiness))
            case "steps":
                steps = [step.split("x") for step in rest.split(",")]
                pieces = tuple(Piece(_number(rate, zero=True), _number(seconds)) for rate, seconds in steps)
                if not any(piece.rate for piece in pieces):
                    raise ValueError("no step has a rate")
                return Arrivals(spec, pieces)
            case "spike":
                base, rest = rest.split(":")
                peak, rest = rest.split("@")
                start, length = rest.split("+")
                calm, spike = Piece(_number(base), _number(start)), Piece(_number(peak), _number(length))
                return Arrivals(spec, (calm, spike, Piece(calm.rate)))
            case _:
                raise ValueError("unknown form")
    except ValueError as error:
        raise ValueError(f"arrivals is {spec!r}; allowed: {FORMS}") from error


def _number(text: str, *, zero: bool = False) -> float:
    number = float(text)
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"{text} is not above 0")
    return number
