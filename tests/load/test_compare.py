"""A comparison gives all models the same work, loses no run that is complete, and goes on where it stopped."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from load import compare, drive, report
from load.compare import Bench, measure
from load.drive import Progress, RunFailed
from load.plan import Asked, Model, Run, plan
from load.server import ROOT, Addresses, Server, ServerError, StopError
from tests.load.fake_triton import FakeTriton, Pace
from tests.load.synthetic import run, store, text, traffic

UNBATCHED = Model("llm_unbatched", "llm", 1, waits_until_full=False)
STATIC = Model("llm_static", "llm", 16, waits_until_full=True)
DYNAMIC = Model("llm_dynamic", "llm", 16, waits_until_full=False)
LLM = Model("llm", "llm", 0, waits_until_full=False)
PICTURES = Model("sdxl", "sdxl", 16, waits_until_full=False)
NOWHERE = Addresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


def asked(
    rates: Sequence[float] = (), users: Sequence[int] = (), requests: int | None = 40, duration: float | None = None
) -> Asked:
    return Asked(
        tuple(f"poisson:{rate:g}" for rate in rates), tuple(users), requests, duration, "fixed:8", ("fixed:16",)
    )


# What is planned


def test_all_models_get_the_same_work_in_turns() -> None:
    runs = plan([UNBATCHED, LLM], {"llm": asked(rates=(1, 2))}, repeats=2, seed=0).runs
    order = [(one.repeat, one.model, one.traffic.load) for one in runs]
    assert order == [
        (0, "llm_unbatched", "1/s"),
        (0, "llm_unbatched", "2/s"),
        (0, "llm", "1/s"),
        (0, "llm", "2/s"),
        (1, "llm", "1/s"),
        (1, "llm", "2/s"),
        (1, "llm_unbatched", "1/s"),
        (1, "llm_unbatched", "2/s"),
    ]
    work = {(one.repeat, one.traffic): set[int]() for one in runs}
    for one in runs:
        work[one.repeat, one.traffic].add(one.seed)
    assert all(len(seeds) == 1 for seeds in work.values()), "the same for all models"
    assert len(set.union(*work.values())) == 4, "and another one for each traffic and repeat"


def test_more_rates_leave_the_schedules_of_others_as_they_are() -> None:
    def seeds(*rates: float) -> dict[str, int]:
        return {one.key: one.seed for one in plan([LLM], {"llm": asked(rates)}, repeats=1, seed=3).runs}

    assert seeds(1, 2).items() <= seeds(0.5, 1, 2).items()


def test_a_bus_that_waits_until_it_is_full_is_filled() -> None:
    (traffic_of_40,) = asked(rates=(1,), requests=40).traffics([STATIC, LLM], 0)
    assert traffic_of_40.requests == 32
    (traffic_of_5,) = asked(rates=(1,), requests=5).traffics([STATIC, LLM], 0)
    assert traffic_of_5.requests == 16
    (untouched,) = asked(rates=(1,), requests=40).traffics([DYNAMIC, LLM], 0)
    assert untouched.requests == 40


def test_too_few_users_for_a_bus_that_waits_are_left_out() -> None:
    made = plan([STATIC, LLM], {"llm": asked(users=(4, 16))}, repeats=2, seed=0)
    assert {(one.model, one.traffic.concurrency) for one in made.runs} == {
        ("llm_static", 16), ("llm", 4), ("llm", 16)
    }  # fmt: skip
    assert made.left_out == ["llm_static at 4 at once: it leaves with 16 passengers, which never come."]


def test_duration_says_how_many_requests_there_are() -> None:
    (made,) = Asked(("constant:4",), (), None, 10, None, (None,)).traffics([LLM], 0)
    assert made.requests == 40
    (ends_itself,) = Asked(("steps:2x5,8x5",), (), None, None, None, (None,)).traffics([LLM], 0)
    assert 20 < ends_itself.requests < 100
    with pytest.raises(ValueError, match=r"duration is given with concurrency; allowed: .*"):
        asked(users=(4,), duration=10).traffics([LLM], 0)


def test_the_models_of_this_repository_are_what_they_should_be() -> None:
    names = ["llm_unbatched", "llm_static", "llm_dynamic", "llm", "sdxl"]
    assert compare.find_models(names, ROOT / "model_repository", None) == [UNBATCHED, STATIC, DYNAMIC, LLM, PICTURES]
    with pytest.raises(ValueError, match=r"models has 'lm'; allowed: llm, .*sdxl_unbatched"):
        compare.find_models(["lm"], ROOT / "model_repository", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1,x"], "rate is '1,x'; allowed: numbers above 0"),
        (["--concurrency", "0"], "concurrency is '0'; allowed: numbers above 0"),
        (["--rate", "nan"], "rate is 'nan'; allowed: numbers above 0"),
        (["--requests", "0"], "requests is 0; allowed: at least 1"),
        (["--arrivals", "often"], "arrivals is 'often'; allowed: "),
        (["--output-lengths", "long"], "output_lengths is 'long'; allowed: "),
        (["--models", "nobody"], "models has 'nobody'; allowed: "),
        (["--url", "localhost:8001"], "url is 'localhost:8001'; allowed: "),
        (["--slo", "fast"], "invalid parse value: 'fast'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main([*arguments, "--name", str(tmp_path / "new")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_pictures_may_get_other_traffic_than_texts() -> None:
    given = ["--rate", "1,2", "--output-lengths", "fixed:8,exponential:32", "--sdxl-concurrency", "16"]
    both = compare.asked(compare.parser().parse_args(given))
    assert [made.label for made in both["llm"].traffics([LLM], 0)] == [
        "1/s, outputs fixed:8",
        "2/s, outputs fixed:8",
        "1/s, outputs exponential:32",
        "2/s, outputs exponential:32",
    ]
    assert [made.label for made in both["sdxl"].traffics([PICTURES], 0)] == ["16 at once"]
    same = compare.asked(compare.parser().parse_args(["--rate", "3"]))
    assert [made.label for made in same["sdxl"].traffics([PICTURES], 0)] == ["3/s"]


# What is measured, with nothing that measures


class Fake:
    """Stands in for servers and Locust, and notes what is asked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[str] = []
        self.trouble: dict[str, BaseException] = {}  # by what is noted at that moment

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.trouble:
            raise self.trouble.pop(what)

    @contextlib.contextmanager
    def serve(self, model: str) -> Iterator[Addresses]:
        self.note(f"start {model}")
        try:
            yield NOWHERE
        finally:
            self.note(f"stop {model}")

    def warm_up(self, one: Run, addresses: Addresses) -> None:
        self.note(f"warm {one.model}")

    def drive(self, one: Run, addresses: Addresses, target: Path, progress: Progress) -> None:
        self.note(one.key)
        store(self.folder, one, [text(0, 0.0, [0.1, 0.2])])
        progress(one.traffic.requests)

    @property
    def bench(self) -> Bench:
        return Bench(self.serve, self.warm_up, self.drive)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


RUNS = [run(model, traffic(rate), repeat) for repeat in (0, 1) for model in ("a", "b") for rate in (1, 2)]


def test_each_model_and_repeat_gets_a_fresh_warm_server(fake: Fake) -> None:
    assert measure(RUNS, fake.folder, fake.bench) == {}
    assert fake.log == [
        *("start a", "warm a", "a.1-s.0", "a.2-s.0", "stop a"),
        *("start b", "warm b", "b.1-s.0", "b.2-s.0", "stop b"),
        *("start a", "warm a", "a.1-s.1", "a.2-s.1", "stop a"),
        *("start b", "warm b", "b.1-s.1", "b.2-s.1", "stop b"),
    ]


def test_an_interrupted_comparison_goes_on_with_what_is_left(fake: Fake) -> None:
    fake.trouble["b.2-s.0"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        measure(RUNS, fake.folder, fake.bench)
    assert fake.log[-1] == "stop b", "the server is ended first"
    assert {one.run.key for one in report.read(fake.folder)} == {"a.1-s.0", "a.2-s.0", "b.1-s.0"}
    fake.log.clear()
    assert measure(RUNS, fake.folder, fake.bench) == {}
    driven = [entry for entry in fake.log if entry[-1].isdigit()]
    assert driven == ["b.2-s.0", "a.1-s.1", "a.2-s.1", "b.1-s.1", "b.2-s.1"]
    fake.log.clear()
    assert measure(RUNS, fake.folder, fake.bench) == {}
    assert fake.log == [], "a comparison that is complete needs no server"


def test_a_failed_run_is_named_and_the_next_one_gets_a_fresh_server(fake: Fake) -> None:
    fake.trouble["a.1-s.0"] = RunFailed("not enough users")
    assert measure(RUNS[:4], fake.folder, fake.bench) == {"a.1-s.0": "not enough users"}
    assert fake.log == [
        *("start a", "warm a", "a.1-s.0", "stop a"),
        *("start a", "warm a", "a.2-s.0", "stop a"),
        *("start b", "warm b", "b.1-s.0", "b.2-s.0", "stop b"),
    ]


@pytest.mark.parametrize("when", ["start a", "warm a"])
def test_a_server_that_does_not_start_costs_its_own_runs_only(fake: Fake, when: str) -> None:
    fake.trouble[when] = ServerError("no such weights\nmore") if when == "start a" else RunFailed("no such weights")
    failures = measure(RUNS[:4], fake.folder, fake.bench)
    assert failures == {"a.1-s.0": "no such weights", "a.2-s.0": "no such weights"}
    assert {one.run.model for one in report.read(fake.folder)} == {"b"}


def test_a_server_that_does_not_end_well_costs_no_run(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.trouble["stop a"] = StopError("it had to be killed")
    assert measure(RUNS[:4], fake.folder, fake.bench) == {}
    assert len(report.read(fake.folder)) == 4
    assert "it had to be killed" in capsys.readouterr().err


def describe(folder: Path, *arguments: str, models: Sequence[Model] = (LLM,)) -> None:
    args = compare.parser().parse_args(arguments)
    args.command = list(arguments)
    (folder / "run.json").write_text(json.dumps(compare.about(args, folder, models, [])))


def test_a_comparison_may_get_more_rates_and_models(tmp_path: Path) -> None:
    describe(tmp_path, "--rate", "1", models=[UNBATCHED])
    describe(tmp_path, "--rate", "1,2", "--slo", "ttft=1s", models=[LLM])
    kept = json.loads((tmp_path / "run.json").read_text())
    assert kept["commands"] == ["scripts/load compare --rate 1", "scripts/load compare --rate 1,2 --slo ttft=1s"]
    assert {model["name"] for model in kept["models"]} == {"llm", "llm_unbatched"}
    assert kept["machine"]["cores"] >= 1
    assert kept["versions"]["locust"]


def test_a_comparison_must_not_change_its_work(tmp_path: Path) -> None:
    describe(tmp_path, "--requests", "64")
    with pytest.raises(ValueError, match=r"requests is 32, but .* was measured with 64; allowed: the same, or another"):
        describe(tmp_path, "--requests", "32")


# Locust, against a server with known delays


def command(server: FakeTriton, folder: Path, rates: str) -> list[str]:
    url = f"127.0.0.1:{server.grpc.split(':')[1]},{server.http.split(':')[1]},{server.metrics.split(':')[1]}"
    made = [sys.executable, "-m", "load", "compare", "--url", url, "--models", "llm", "--requests", "20"]
    return [*made, "--output-lengths", "fixed:5", "--rate", rates, "--name", str(folder)]


def locusts(folder: Path) -> list[int]:
    """Processes that write below `folder`."""
    running = psutil.process_iter(["cmdline"])
    return [process.pid for process in running if f"--samples {folder}" in " ".join(process.info["cmdline"] or ())]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_ctrl_c_ends_locust_and_reports_what_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    second = folder / "runs" / "llm.0.5-s-fixed-5.0.part" / "samples.jsonl"
    with FakeTriton(Pace(first=0.05, gap=0.05)) as server:
        process = subprocess.Popen(
            command(server, folder, "20,0.5"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A test run in the background of a script ignores Ctrl-C, and what it starts would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            wait_for(lambda: second.exists() or process.poll() is not None)
            assert locusts(folder)
        finally:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    assert b"to go on: scripts/load compare" in said
    assert locusts(folder) == []
    assert "| `llm` | 20/s |" in (folder / "table.md").read_text()
    assert (folder / "report.html").exists()
    (one,) = report.read(folder)
    assert [sample.index for sample in one.samples] == list(range(20))
    assert all(sample.output_tokens == 5 for sample in one.samples)
    assert one.readings[-1]["nv_inference_count"] - one.readings[0]["nv_inference_count"] == 20, "no warm-up"


def test_too_few_users_are_a_failure_in_locusts_words(tmp_path: Path) -> None:
    with FakeTriton(Pace(first=1.0)) as server:
        where = Addresses(server.grpc, server.http, server.metrics)
        one = run("llm", traffic(50, requests=20, outputs="fixed:1"))
        with pytest.raises(RunFailed, match=r"not enough users: \d+ of 20 arrivals .*; raise --users"):
            drive.drive(one, where, tmp_path / "run", users=1)
    assert not (tmp_path / "run").exists()


def test_a_run_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with FakeTriton(Pace(first=6.0)) as server:
        where = Addresses(server.grpc, server.http, server.metrics)
        with pytest.raises(RunFailed, match=r"given up after 3 s with 0 requests answered"):
            drive.drive(run("llm", traffic(50, outputs="fixed:1")), where, tmp_path / "run", limit=3)


# The server


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport http.server, os, signal, subprocess, sys, time\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


READY = """
port = next(int(a.partition("=")[2]) for a in sys.argv if a.startswith("--http-port="))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v2/models/llm/ready" else 404)
        self.end_headers()
print(sys.argv[1:], flush=True)
"""
LISTEN = 'http.server.HTTPServer(("127.0.0.1", port), Ready).serve_forever()\n'


def test_a_server_is_ready_for_the_block_and_gone_after_it(tmp_path: Path) -> None:
    serve = script(tmp_path / "serve", READY + LISTEN)
    server = Server(["llm"], tmp_path / "log", tmp_path / "models", serve=serve)
    with server as addresses:
        assert addresses.http.startswith("127.0.0.1:")
        assert server._is_ready("llm")
        assert not server._is_ready("other")
    assert not server._is_ready("llm")
    said = (tmp_path / "log").read_text()
    assert "'--models', 'llm'" in said
    assert f"--model-repository={tmp_path}/models" in said


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    serve = script(tmp_path / "serve", 'sys.exit("error: port 8000 is in use")')
    with (
        pytest.raises(ServerError, match=r"(?s)ended with status 1.*port 8000 is in use"),
        Server(["llm"], tmp_path / "log", serve=serve),
    ):
        pass
    slow = script(tmp_path / "slow", "time.sleep(60)")
    with (
        pytest.raises(ServerError, match="not ready in 1 s"),
        Server(["llm"], tmp_path / "log", serve=slow, ready_timeout=1),
    ):
        pass


def test_what_a_server_leaves_behind_is_ended_and_named(tmp_path: Path) -> None:
    child = f"""child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
"""
    serve = script(tmp_path / "serve", child + READY + LISTEN)
    with (
        pytest.raises(StopError, match="left processes behind"),
        Server(["llm"], tmp_path / "log", serve=serve),
    ):
        pass
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    serve = script(tmp_path / "serve", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + LISTEN)
    server = Server(["llm"], tmp_path / "log", serve=serve, stop_timeout=1)
    with pytest.raises(StopError, match="SIGTERM did not end the server in 1 s"), server:
        pass
    assert server._process is not None
    assert server._process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(server._process.pid, 0)


def test_addresses_of_a_running_server() -> None:
    assert Addresses.parse("host:8001,8000,8002") == Addresses("host:8001", "host:8000", "host:8002")
