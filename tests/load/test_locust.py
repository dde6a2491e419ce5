"""Locust with our users against a server whose delays are known: what is measured is what happened."""

import json
import socket
import subprocess
from pathlib import Path

import pytest

from load import drive, samples
from load.arrivals import parse
from load.figures import summarise
from load.percentiles import percentile
from load.plan import Run, Traffic
from load.samples import Kind, Sample
from load.server import ROOT, Addresses
from load.slo import Slo
from tests.load.fake_triton import FakeTriton, Pace

ALLOWED_ERROR = 0.02
# A machine that is busy with something else at that moment makes delays longer, and says nothing of the tool.
TRIES = 3


def measured(server: FakeTriton, run: Run, folder: Path, protocol: str = "grpc") -> list[Sample]:
    drive.drive(run, Addresses(server.grpc, server.http, server.metrics), folder, protocol, limit=120)
    return samples.read(folder / drive.SAMPLES)


def open_loop(spec: str, requests: int, tokens: int = 1, model: str = "llm") -> Run:
    return Run(model, "llm", Traffic(spec, None, requests, "fixed:4", f"fixed:{tokens}"), 0, seed=5)


def closed_loop(users: int, requests: int) -> Run:
    return Run("llm", "llm", Traffic(None, users, requests, "fixed:4", "fixed:1"), 0, seed=5)


def test_times_percentiles_and_goodput_are_right_within_two_percent(tmp_path: Path) -> None:
    """The server stalls until 2.5 s after the start: what arrives early gets its first token late, beyond the SLO."""
    spec, count, tokens = "poisson:15", 40, 5
    arrivals = parse(spec).times(5, count=count)
    stalled = [max(0.0, 2.5 - (at + 1.0)) for at in arrivals]
    expected = {
        "ttft": [1.0 + held for held in stalled],
        "e2el": [1.0 + (tokens - 1) * 0.25 + max(0.0, held - (tokens - 1) * 0.25) for held in stalled],
    }
    errors: dict[str, float] = {}
    for number in range(TRIES):
        # The stall counts from the first request, which arrives at arrivals[0].
        pace = Pace(first=1.0, gap=0.25, stall=(0.5, 2.0 - arrivals[0]))
        with FakeTriton(pace) as server:
            taken = measured(server, open_loop(spec, count, tokens), tmp_path / str(number))
        assert [sample.index for sample in taken] == list(range(count))
        assert all(sample.error is None and sample.output_tokens == tokens for sample in taken)
        assert [sample.intended for sample in taken] == pytest.approx(arrivals), "the schedule, not when it was sent"
        figures = summarise(taken, Slo.parse("ttft=1.1s"))
        errors = {}
        for name in expected:
            spread = getattr(figures, name)
            for nth in (50, 90, 99):
                right = percentile(expected[name], nth)
                errors[f"{name} p{nth}"] = abs(getattr(spread, f"p{nth}") / right - 1)
        met = sum(ttft <= 1.1 for ttft in expected["ttft"])
        errors["goodput"] = abs((figures.goodput or 0.0) * figures.seconds / met - 1)
        if max(errors.values()) < ALLOWED_ERROR:
            break
    assert max(errors.values()) < ALLOWED_ERROR, errors


def test_an_open_loop_sees_a_stall_in_full_and_a_closed_one_omits_it(tmp_path: Path) -> None:
    """Coordinated omission: a client that waits for its answer sends nothing while the server stands still."""
    pace = Pace(first=0.02, stall=(1.0, 2.0))
    with FakeTriton(pace) as server:
        taken = measured(server, open_loop("constant:10", 40), tmp_path / "open")
    slow = [sample.e2el or 0.0 for sample in taken if (sample.e2el or 0.0) > 0.2]
    # One arrival each tenth of a second from 1.0 to 2.8 waits for the rest of the stall.
    assert 17 <= len(slow) <= 20
    assert percentile(slow, 50) == pytest.approx(1.1, abs=0.15)
    with FakeTriton(pace) as server:
        taken = measured(server, closed_loop(1, 80), tmp_path / "closed")
    assert sum((sample.e2el or 0.0) > 0.2 for sample in taken) == 1


@pytest.mark.parametrize(
    ("model", "kind", "protocol"),
    [("llm", "llm", "http"), ("llm_batched", "llm", "grpc"), ("llm_batched", "llm", "http"),
     ("sdxl", "sdxl", "grpc"), ("sdxl", "sdxl", "http")],
)  # fmt: skip
def test_every_user_class_brings_home_whole_answers(model: str, kind: Kind, protocol: str, tmp_path: Path) -> None:
    texts, pictures = Traffic(None, 3, 6, "fixed:4", "fixed:3"), Traffic(None, 3, 6, None, None, steps=2)
    run = Run(model, kind, texts if kind == "llm" else pictures, 0, seed=5)
    with FakeTriton(Pace(first=0.02, gap=0.01)) as server:
        taken = measured(server, run, tmp_path / "run", protocol)
    assert [sample.index for sample in taken] == list(range(6))
    assert all(sample.error is None for sample in taken)
    assert {sample.output_tokens for sample in taken} == {3 if kind == "llm" else 0}
    assert {sample.input_tokens for sample in taken} == {4 if kind == "llm" else None}
    assert len({request.prompt for request in server.requests}) > 1


def test_an_error_in_the_middle_is_kept_with_what_came_before_it(tmp_path: Path) -> None:
    work = [{"prompt": f"{word} of the request", "max_tokens": 3} for word in ("good", "bad", "good", "bad")]
    (tmp_path / "work.jsonl").write_text("".join(json.dumps(line) + "\n" for line in work))
    traffic = Traffic(None, 2, 4, None, None, workload=str(tmp_path / "work.jsonl"))
    for protocol in ("grpc", "http"):
        with FakeTriton(Pace(first=0.02, gap=0.01, refuses=("bad", "no room"))) as server:
            taken = measured(server, Run("llm", "llm", traffic, 0, 5), tmp_path / protocol, protocol)
        assert [sample.error for sample in taken] == [None, "no room", None, "no room"], protocol
        assert [sample.output_tokens for sample in taken] == [3, 1, 3, 1], protocol


def test_several_processes_share_one_schedule(tmp_path: Path) -> None:
    count = 30
    with FakeTriton(Pace(first=0.05)) as server:
        run = open_loop("poisson:15", count)
        addresses = Addresses(server.grpc, server.http, server.metrics)
        asked = drive.command(run, addresses, "grpc", tmp_path / "samples.jsonl", users=20)
        port = free_port()
        asked += ["--processes", "2", "--master-bind-port", port, "--master-port", port]
        done = subprocess.run(asked, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    taken = samples.read(tmp_path / "samples.jsonl")
    assert [sample.index for sample in taken] == list(range(count))
    assert [sample.intended for sample in taken] == pytest.approx(parse("poisson:15").times(5, count=count))
    assert "20 users in 2 processes" in done.stderr


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
