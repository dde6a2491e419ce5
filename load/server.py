"""A tritonserver to measure: scripts/serve on free ports, ended for good; or the addresses of a running one."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parent.parent


class ServerError(RuntimeError):
    """The server did not start. The message holds the end of its log."""


class StopError(ServerError):
    """The server did what it should, but did not end as it should; it has ended by now."""


@dataclass(frozen=True)
class Addresses:
    """host:port each."""

    grpc: str
    http: str
    metrics: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """`localhost:8001,8000,8002`: the host, and its ports for gRPC, HTTP and metrics."""
        host, _, ports = text.rpartition(":")
        numbers = ports.split(",")
        if not host or len(numbers) != 3 or not all(number.isdigit() for number in numbers):
            raise ValueError(f"url is {text!r}; allowed: HOST:GRPC,HTTP,METRICS as in localhost:8001,8000,8002")
        return cls(*(f"{host}:{number}" for number in numbers))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on. All are held until the last one is found, so they differ from each other."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Server:
    """`with Server(["llm"], log) as addresses:` runs scripts/serve for the block, which starts when all are ready."""

    def __init__(
        self,
        models: list[str],
        log: Path,
        repository: Path | None = None,
        ready_timeout: float = 900,
        stop_timeout: float = 60,
        serve: Path = ROOT / "scripts" / "serve",
    ) -> None:
        """log: takes the server's output. The very first start has weights to fetch: hence the long `ready_timeout`."""
        grpc, http, metrics = free_ports(3)
        self.addresses = Addresses(f"127.0.0.1:{grpc}", f"127.0.0.1:{http}", f"127.0.0.1:{metrics}")
        self.command = [str(serve), "--models", ",".join(models)]
        self.command += [f"--grpc-port={grpc}", f"--http-port={http}", f"--metrics-port={metrics}"]
        self.command += [f"--model-repository={repository}"] if repository else []
        self._models = models
        self._log = log
        self._ready_timeout = ready_timeout
        self._stop_timeout = stop_timeout
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Addresses:
        with open(self._log, "wb") as log:
            # Of its own session: Ctrl-C must end the measurement first and the server after it.
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + self._ready_timeout
        try:
            while not all(self._is_ready(model) for model in self._models):
                if self._process.poll() is not None:
                    raise ServerError(f"the server ended with status {self._process.returncode}:\n{self._log_tail()}")
                if time.monotonic() > deadline:
                    raise ServerError(f"the server was not ready in {self._ready_timeout:.0f} s:\n{self._log_tail()}")
                time.sleep(0.2)
        except BaseException:
            self._kill()
            raise
        return self.addresses

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to whatever is left. StopError if that was needed."""
        assert self._process is not None, "the server is not started"
        if self._process.poll() is not None:
            self._kill()
            raise StopError(f"the server had ended, with status {self._process.returncode}:\n{self._log_tail()}")
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._stop_timeout)
        except subprocess.TimeoutExpired:
            raise StopError(
                f"SIGTERM did not end the server in {self._stop_timeout:.0f} s:\n{self._log_tail()}"
            ) from None
        finally:
            left = self._kill()
        if left:
            raise StopError(f"the server left processes behind (now killed): {', '.join(map(str, left))}")

    def _is_ready(self, model: str) -> bool:
        try:
            url = f"http://{self.addresses.http}/v2/models/{model}/ready"
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _kill(self) -> list[int]:
        """Kills the server's process group; returns who was left, a moment after the server itself had ended."""
        assert self._process is not None
        group = self._process.pid
        deadline = time.monotonic() + 2
        while (left := _members(group)) and self._process.poll() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        return left

    def _log_tail(self, lines: int = 30) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Addresses:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.stop()
            return
        # What went wrong before is the news; a complaint about the shutdown would hide it.
        with contextlib.suppress(StopError):
            self.stop()


def _members(group: int) -> list[int]:
    """The live processes of a process group; zombies have ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found
