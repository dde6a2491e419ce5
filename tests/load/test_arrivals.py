"""One schedule for a whole run: seeded, with the rates and the spread that its spec says."""

import itertools
import math
import re
import statistics

import pytest

from load.arrivals import parse


def gaps(offsets: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *offsets])]


@pytest.mark.parametrize("spec", ["poisson:5", "gamma:5:0.3", "constant:5", "steps:5x10,1x10", "spike:1:20@5+3"])
def test_seeds_reproduce_and_differ(spec: str) -> None:
    first = parse(spec).times(7, duration=20)
    assert first == parse(spec).times(7, duration=20)
    assert first == sorted(first)
    if not spec.startswith("constant"):
        assert first != parse(spec).times(8, duration=20)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gaps_as_in_vllm(burstiness: float, variation: float) -> None:
    # A gamma distribution of shape k varies by 1 / sqrt(k) of its mean.
    sample = gaps(parse(f"gamma:4:{burstiness}").times(1, count=40_000))
    assert statistics.fmean(sample) == pytest.approx(1 / 4, rel=0.04)
    assert statistics.pstdev(sample) / statistics.fmean(sample) == pytest.approx(variation, rel=0.04)


def test_poisson_is_gamma_of_burstiness_one() -> None:
    assert parse("poisson:3").times(5, count=100) == parse("gamma:3:1").times(5, count=100)


def test_constant_has_equal_gaps_and_begins_at_once() -> None:
    assert parse("constant:4").times(0, count=4) == [0.0, 0.25, 0.5, 0.75]


def test_steps_have_their_rates_a_pause_and_an_end() -> None:
    offsets = parse("steps:20x50,0x10,80x50").times(3)
    counts = [sum(begin <= offset < end for offset in offsets) for begin, end in ((0, 50), (50, 60), (60, 110))]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(1000, rel=0.1)  # the deviation of a Poisson count is its root: 32
    assert counts[2] == pytest.approx(4000, rel=0.05)
    assert sum(counts) == len(offsets)


def test_a_spike_rises_and_falls_again() -> None:
    offsets = parse("spike:5:100@40+10").times(3, duration=100)
    spike = sum(40 <= offset < 50 for offset in offsets)
    assert spike == pytest.approx(1000, rel=0.1)
    assert len(offsets) - spike == pytest.approx(450, rel=0.15)


def test_times_end_with_a_duration_a_count_or_both() -> None:
    arrivals = parse("constant:10")
    assert len(arrivals.times(0, duration=1)) == 10
    assert len(arrivals.times(0, count=7)) == 7
    assert len(arrivals.times(0, duration=1, count=7)) == 7
    assert math.isinf(arrivals.seconds)
    with pytest.raises(ValueError, match="never ends; allowed: with a duration or a count"):
        arrivals.times(0)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "poisson", "poisson:0", "poisson:-1", "poisson:nan", "poisson:inf", "poisson:x", "gamma:1", "gamma:1:0"),
        *("constant:", "steps:", "steps:1x0", "steps:0x5", "steps:1", "spike:1:2@3", "spike:0:2@3+1", "uniform:3"),
    ],
)
def test_a_bad_spec_is_named_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"arrivals is {spec!r}; allowed: poisson:RATE, gamma:")):
        parse(spec)
