"""One run against a server that is ready: Locust in its own process, Triton's metrics beside it, files in a folder."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from load.metrics_page import Poller
from load.plan import Run, Traffic
from load.server import ROOT, Addresses

SAMPLES, METRICS, LOG, RUN = "samples.jsonl", "metrics.jsonl", "locust.log", "run.json"
USERS = {("llm", "grpc"): "LlmGrpcUser", ("llm", "http"): "LlmHttpUser"}
USERS |= {("sdxl", "grpc"): "SdxlGrpcUser", ("sdxl", "http"): "SdxlHttpUser"}
METRICS_SETTLE = 1.0  # seconds; the backend renews its metrics twice a second

Progress = Callable[[int], None]  # how many more requests are answered


class RunFailed(RuntimeError):
    """The run has no figures; the message says why."""


def command(run: Run, addresses: Addresses, protocol: str, samples: Path, users: int | None) -> list[str]:
    """users: of an open loop; None: as many as there are requests, so that none can find no user."""
    traffic = run.traffic
    count = traffic.concurrency or users or traffic.requests
    made = [sys.executable, "-m", "locust", "-f", str(ROOT / "load" / "locustfile.py"), USERS[run.kind, protocol]]
    made += ["--headless", "--only-summary", "--exit-code-on-error", "0", "--users", str(count)]
    made += ["--spawn-rate", str(count), "--host", addresses.grpc if protocol == "grpc" else f"http://{addresses.http}"]
    made += ["--model", run.model, "--seed", str(run.seed), "--requests", str(traffic.requests)]
    made += ["--samples", str(samples)]
    for flag, value in (
        ("--arrivals", traffic.arrivals),
        ("--prompt-lengths", traffic.prompt_lengths),
        ("--output-lengths", traffic.output_lengths),
        ("--sdxl-steps", traffic.steps),
        ("--workload", traffic.workload and Path(traffic.workload).resolve()),
    ):
        made += [] if value is None else [flag, str(value)]
    return made


def drive(
    run: Run,
    addresses: Addresses,
    folder: Path,
    protocol: str = "grpc",
    users: int | None = None,
    limit: float = 3600,
    progress: Progress | None = None,
) -> None:
    """Leaves `folder` with the run's samples and metrics. It appears only when the run is complete.

    limit: seconds after which the run is given up. Raises RunFailed.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with Poller(f"http://{addresses.metrics}/metrics", run.model, part / METRICS):
        time.sleep(METRICS_SETTLE)
        asked = [*command(run, addresses, protocol, part / SAMPLES, users), "--request-timeout", f"{limit:g}"]
        _locust(asked, part, limit, progress)
        time.sleep(METRICS_SETTLE)
    (part / RUN).write_text(json.dumps(run.as_dict(), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def stored(about: Path) -> Run:
    """The run that a folder's run.json tells of."""
    return Run.from_dict(json.loads(about.read_text()))


def warm_up(run: Run, addresses: Addresses, folder: Path, protocol: str = "grpc", batch: int = 8) -> None:
    """A short run whose samples nobody keeps: the first batches pick kernels and touch memory for the first time.

    batch: requests, all at once, so that a bus which waits until it is full leaves too.
    """
    lengths = "fixed:8" if run.kind == "llm" else None
    traffic = Traffic(None, batch, batch, lengths, lengths, run.traffic.steps and min(2, run.traffic.steps))
    part = folder / f"warm-up-{run.model}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    warm = Run(run.model, run.kind, traffic, run.repeat, run.seed + 1)
    _locust(command(warm, addresses, protocol, part / SAMPLES, None), part, 900, None)
    shutil.rmtree(part)


def _locust(command: list[str], folder: Path, limit: float, progress: Progress | None) -> None:
    with open(folder / LOG, "wb") as log:
        # Of its own session: Ctrl-C reaches us alone, and we end it in order.
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    samples, deadline = _Lines(folder / SAMPLES), time.monotonic() + limit
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if progress:
                progress(samples.more())
        ended = process.poll()
    finally:
        _end(process)
    if progress:
        progress(samples.more())
    if ended is None:
        raise RunFailed(f"given up after {limit:.0f} s with {samples.count} requests answered")
    if ended != 0:
        raise RunFailed(_reason(folder / LOG))


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its children, if it has not ended."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(log: Path) -> str:
    """What Locust's log says went wrong, or its last lines."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [match[1] for line in lines if (match := re.search(r"(?:/ERROR/[\w.]+|error): (.+)", line))]
    return said[0] if said else "Locust failed: " + " / ".join(lines[-3:])


class _Lines:
    """Counts the lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        self._read = 0

    def more(self) -> int:
        """Those since the last call."""
        if not self._path.exists():
            return 0
        with open(self._path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        added = new.count(b"\n")
        self.count += added
        return added
