"""What a request must keep to, and what a run must."""

import dataclasses

import pytest

from load.samples import Sample
from load.slo import Slo


def sample(ttft: float = 0.1, gaps: tuple[float, ...] = (0.05,) * 9, error: str | None = None) -> Sample:
    stamps = [ttft]
    for gap in gaps:
        stamps.append(stamps[-1] + gap)
    return Sample("llm", "llm", "grpc", 0, 0.0, 0.0, stamps, [1] * len(stamps), 5, stamps[-1], error)


@pytest.mark.parametrize(
    ("spec", "meets"),
    [
        ("ttft=100ms", True),
        ("ttft=99ms", False),
        ("ttft=0.1s,e2e_p99=550ms", True),
        ("ttft=0.1s,e2e_p99=549ms", False),
        ("tpot=51ms", True),
        ("tpot=49ms", False),
    ],
)
def test_a_request_meets_each_threshold_or_not(spec: str, meets: bool) -> None:
    assert Slo.parse(spec).meets(sample(gaps=(0.05,) * 9)) is meets


@pytest.mark.parametrize(
    ("spec", "meets"),
    [
        ("itl=0.9s", False),
        ("itl=1.1s", True),
        ("itl_p50=60ms", True),
        ("itl_mean=60ms", False),
        ("itl_mean=150ms", True),
    ],
)
def test_a_request_is_judged_by_its_own_percentile_of_itl(spec: str, meets: bool) -> None:
    assert Slo.parse(spec).meets(sample(gaps=(0.05,) * 9 + (1.0,))) is meets


def test_what_a_request_has_not_is_no_breach_but_failing_is() -> None:
    one_token = sample(gaps=())
    assert Slo.parse("tpot=1ms,itl=1ms").meets(one_token)
    assert not Slo.parse("e2e=100s").meets(dataclasses.replace(one_token, error="queue is full"))


def test_a_run_holds_by_the_stated_percentile_and_by_p99_where_none_is() -> None:
    run = [sample(ttft=0.1)] * 97 + [sample(ttft=1.0)] * 3
    assert Slo.parse("ttft_p95=200ms").holds(run)
    assert not Slo.parse("ttft=200ms").holds(run)
    assert Slo.parse("ttft_mean=130ms").holds(run)
    assert not Slo.parse("ttft_mean=120ms").holds(run)
    assert Slo.parse("ttft_p95=1s,ttft_mean=1s").observed(run) == pytest.approx({"ttft_p95": 0.1, "ttft_mean": 0.127})


def test_the_itl_of_a_run_is_over_all_gaps() -> None:
    run = [sample(gaps=(0.05,) * 99), sample(gaps=(1.0,))]
    assert Slo.parse("itl_p50=60ms").holds(run)
    # The longest of 100 gaps, and a hundredth of the way to it from the next.
    assert Slo.parse("itl_p99=60ms").observed(run)["itl_p99"] == pytest.approx(0.05 + 0.01 * 0.95)
    assert Slo.parse("itl_p100=1s").observed(run)["itl_p100"] == pytest.approx(1.0)


def test_refusing_work_does_not_make_a_run_look_better() -> None:
    failed = sample(error="queue is full")
    run = [sample(ttft=0.1)] * 96 + [failed] * 4
    assert not Slo.parse("ttft_p99=10s").holds(run)
    assert Slo.parse("ttft_p95=200ms").holds(run)
    assert not Slo.parse("ttft_mean=10s").holds(run)
    assert not Slo.parse("ttft_p50=10s").holds([failed])
    assert not Slo.parse("ttft_p50=10s").holds([])


def test_goodput_counts_requests_that_met_everything() -> None:
    run = [sample(ttft=0.1), sample(ttft=0.1, gaps=(0.5,)), sample(ttft=0.6), sample(error="queue is full")]
    assert Slo.parse("ttft=500ms,itl=100ms").goodput(run, 2.0) == 0.5
    assert Slo.parse("ttft=500ms").goodput(run, 2.0) == 1.0


@pytest.mark.parametrize(
    "spec", ["", "ttft", "ttft=5", "ttft=5m", "e2el=5s", "ttft_p=5s", "ttft_median=1s", "ttft=-1s"]
)
def test_a_bad_slo_is_named_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(ValueError, match=f"slo has the part {spec!r}; allowed: METRIC=TIME with the metrics ttft, "):
        Slo.parse(spec)


def test_percentiles_end_at_100_and_thresholds_come_once() -> None:
    with pytest.raises(ValueError, match="p0 to p100"):
        Slo.parse("ttft_p101=1s")
    with pytest.raises(ValueError, match="each metric and statistic once"):
        Slo.parse("ttft=1s,ttft=2s")
    assert str(Slo.parse("ttft=0.5s, itl_p99.9=100ms")) == "ttft=500ms,itl_p99.9=100ms"
