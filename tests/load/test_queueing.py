"""The simulation against what is known without one."""

import math

import pytest

from load import arrivals, size
from load.queueing import Continuous, Curve, Dynamic, Job, Server, make_jobs, simulate
from load.samples import Kind
from load.workload import Lengths

FLAT = Curve.parse("1:100")  # a step takes 100 ms, whatever is in it


def waits(servers: list[Server], jobs: list[Job], kind: Kind = "llm") -> list[float]:
    return [sample.ttft or math.nan for sample in simulate(servers, jobs, kind).samples]


def test_curve_is_straight_between_its_points_and_goes_on() -> None:
    curve = Curve.parse("1:10,11:20,31:60")
    assert [curve(rows) * 1000 for rows in (1, 6, 11, 21, 31, 41)] == pytest.approx([10, 15, 20, 40, 60, 80])
    assert FLAT(64) == 0.1


@pytest.mark.parametrize("text", ["", "1", "1:x", "4:10,1:20", "1:20,4:10", "0:1", "1:0"])
def test_a_wrong_curve_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^curve is .*; allowed: "):
        Curve.parse(text)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_seat_with_equal_requests_is_the_queue_of_the_textbook(load: float) -> None:
    """M/D/1: the mean wait is load * service / (2 * (1 - load)), by Pollaczek and Khinchine."""
    jobs = make_jobs(arrivals.parse(f"poisson:{load / 0.1}"), 60_000, seed=1)
    seen = waits([Continuous(FLAT, seats=1, budget=64)], jobs)
    expected = 0.1 + load * 0.1 / (2 * (1 - load))
    assert sum(seen) / len(seen) == pytest.approx(expected, rel=0.04)


def test_busy_is_what_the_load_says() -> None:
    jobs = make_jobs(arrivals.parse("poisson:8"), 20_000, seed=2)
    servers: list[Server] = [Continuous(FLAT, 1, 64), Continuous(FLAT, 1, 64)]
    assert simulate(servers, jobs, "llm").busy == pytest.approx(0.4, rel=0.03)


def test_a_long_prompt_takes_chunks_and_then_a_token_a_step() -> None:
    curve = Curve.parse("1:10,513:522")  # 9 ms and 1 ms a token
    (sample,) = simulate([Continuous(curve, 4, budget=512)], [Job(0, 0.0, prompt=700, output=3)], "llm").samples
    first = 0.009 + 0.512 + 0.009 + 0.188
    assert sample.stamps == pytest.approx([first, first + 0.010, first + 0.020])


def test_decodes_come_before_prompts_and_share_the_step() -> None:
    """The second request's long prompt slows the first one's tokens, as far as the budget allows, and stops none."""
    curve = Curve.parse("1:10,101:110")
    first, second = simulate(
        [Continuous(curve, 4, budget=100)], [Job(0, 0.0, 1, 6), Job(1, 0.005, 250, 1)], "llm"
    ).samples
    assert len(first.stamps) == 6
    assert first.itl[:3] == pytest.approx([curve(100), curve(100), curve(1 + 52)])  # 99 + 99 + 52 of the prompt
    assert second.ttft == pytest.approx(first.stamps[3] - 0.005)


def test_no_seat_means_to_wait_until_one_is_free() -> None:
    seen = waits([Continuous(FLAT, seats=2, budget=64)], [Job(i, 0.0, 1, 5) for i in range(3)])
    # The first begins at once, so the second joins it a step later; the third gets the seat that the first leaves.
    assert seen == pytest.approx([0.1, 0.2, 0.6])


def test_a_batch_leaves_when_it_is_full_or_its_first_has_waited() -> None:
    lone = [Job(0, 0.0)]
    assert waits([Dynamic(FLAT, seats=4, delay=0.05, steps=2)], lone, "sdxl") == pytest.approx([0.25])
    full = [Job(i, 0.0) for i in range(4)]
    assert waits([Dynamic(FLAT, seats=4, delay=9, steps=2)], full, "sdxl") == pytest.approx([0.2] * 4)
    # The fifth waits for the first four, and by then for longer than the delay.
    five = [Job(i, 0.0) for i in range(5)]
    assert waits([Dynamic(FLAT, seats=4, delay=0.05, steps=2)], five, "sdxl")[4] == pytest.approx(0.4)


def test_requests_go_to_the_server_that_has_the_fewest() -> None:
    servers: list[Server] = [Continuous(FLAT, 1, 64), Continuous(FLAT, 1, 64)]
    jobs = [Job(0, 0.0, 1, 50), *[Job(i, i * 0.2, 1, 1) for i in range(1, 20)]]
    assert max(waits(servers, jobs)[1:]) == pytest.approx(0.1), "none waits behind the long one"


def test_the_same_seed_gives_the_same_figures_and_no_request_is_lost() -> None:
    def run(seed: int) -> list[float]:
        lengths = Lengths.parse("uniform:8:64"), Lengths.parse("exponential:32")
        jobs = make_jobs(arrivals.parse("gamma:5:0.5"), 500, seed, *lengths)
        wanted = [job.output for job in jobs]
        outcome = simulate([Continuous(Curve.parse("1:10,64:30"), 8, 128) for _ in range(3)], jobs, "llm", seed)
        assert [sample.output_tokens for sample in outcome.samples] == wanted
        return [sample.ended for sample in outcome.samples]

    assert run(1) == run(1) != run(2)


def test_the_command_stops_at_the_first_number_that_keeps_to_the_slo(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--curve", "1:20,64:80", "--arrivals", "poisson:40", "--requests", "600", "--slo", "ttft_p99=300ms"]
    assert size.main(command) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) > 1
    assert [line.split("|")[-2].strip() for line in lines] == ["no"] * (len(lines) - 1) + ["yes"]


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        size.main(["--curve", "1:20", "--arrivals", "poisson"])
    assert "arrivals is 'poisson'; allowed:" in capsys.readouterr().err
