"""A short run of what `scripts/load soak` does for half an hour."""

import subprocess
import sys

from tests.server.tritonserver import ROOT, TritonServer


def test_everyone_gets_one_end_while_half_of_them_misbehave(llm_modes_server: TritonServer) -> None:
    server = llm_modes_server
    command = [sys.executable, "-m", "load", "soak", "--url", f"{server.grpc},{server.http},{server.metrics}"]
    command += ["--minutes", "0.25", "--users", "96", "--pid", str(server.pid), "--growth", "0.5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {what: int(count) for what, count in (line.strip("| ").split(" | ") for line in table(done.stdout))}
    assert counts.pop("wrong") == 0
    for what in (
        "answered: once and whole",
        "cancelled: left half-way",
        "bad: refused by name",
        "impatient: ended in time",
    ):
        assert counts[what] > 0, done.stdout
    assert counts["disconnected: broke off"] > 0


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")][2:]
