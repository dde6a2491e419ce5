"""scripts/serve from outside: the real script, the real tritonserver, a trivial decoupled model."""

import json
import os
import socket
import subprocess
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from tests.server.tritonserver import ROOT, TritonServer, free_ports

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [{ name: "text" data_type: TYPE_STRING dims: [1] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""

MODEL = """
import json, os, subprocess, sys
{top}
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
            sender = request.get_response_sender()
            for word in words.split():
                answer = {answer}
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", numpy.array([answer], object))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

PYTHON = "[sys.version, sys.prefix, os.environ.get('PYTHONPATH')]"


def write_model(repository: Path, name: str, top: str = "", answer: str = "word") -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(MODEL.format(top=top, answer=answer))


def post(server: TritonServer, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(f"http://{server.http}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: str = response.read().decode()
    return answer


def loaded(server: TritonServer) -> set[str]:
    index = json.loads(post(server, "/v2/repository/index", {}))
    return {model["name"] for model in index if model.get("state") == "READY"}


def serve(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the script where it should fail, or end by itself."""
    command = [str(ROOT / "scripts" / "serve"), *args]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "echo")
    # C extensions of the standard library and of the packages, some of which only load into their own libpython.
    write_model(folder, "python", top="import _ctypes, _ssl, tokenizers", answer=f"json.dumps({PYTHON})")
    write_model(folder, "unwanted", top="raise RuntimeError('this model must not be loaded')")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    # What a user's shell may hold must not reach the server's interpreters.
    env = os.environ | {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}
    with TritonServer(
        log, "--models", "echo,python", "--exit-timeout-secs", "17", repository=repository, env=env
    ) as running:
        yield running


def test_models_loads_these_and_no_other(server: TritonServer) -> None:
    assert loaded(server) == {"echo", "python"}
    assert len(server.processes()) == 3
    assert len(server.shared_memory()) == 2


def test_http_streams_the_responses_of_a_decoupled_model(server: TritonServer) -> None:
    lines = post(server, "/v2/models/echo/generate_stream", {"text": "a b c"}).split("\n\n")
    assert [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line] == ["a", "b", "c"]


def test_grpc_and_metrics_answer(server: TritonServer) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        assert client.is_model_ready("echo")
    assert "nv_inference_count" in server.metric_text()


def test_models_run_in_the_virtual_environment_on_its_own_libpython(server: TritonServer) -> None:
    answer = json.loads(post(server, "/v2/models/python/generate", {"text": "once"}))["text_output"]
    code = f"import json, os, sys; print(json.dumps({PYTHON}))"
    expected = subprocess.check_output([ROOT / ".venv/bin/python", "-I", "-c", code], text=True, env={})
    assert json.loads(answer) == json.loads(expected)


def test_arguments_reach_tritonserver_and_nothing_listens_beyond_this_machine(server: TritonServer) -> None:
    options = {
        row[0].strip(): row[1].strip() for line in server.log_text.splitlines() if len(row := line.split("|")[1:]) > 2
    }
    assert options["exit_timeout"] == "17"
    for port in (server.http_port, server.grpc_port, server.metrics_port):
        assert f"127.0.0.1:{port}" in server.log_text
    assert "0.0.0.0" not in server.log_text


def test_a_start_with_everything_in_place_is_quick(server: TritonServer) -> None:
    assert server.seconds_to_ready < 10


def test_setting_up_again_takes_no_noticeable_time(repository: Path) -> None:
    def once() -> float:
        began = time.monotonic()
        # Goes through the whole set-up, and tritonserver ends at once.
        result = serve("--", f"--model-repository={repository}", "--help")
        assert "--model-control-mode" in result.stderr
        return time.monotonic() - began

    assert min(once() for _ in range(3)) < 1


def test_tritonservers_own_model_control_still_works(repository: Path, tmp_path: Path) -> None:
    explicit = ["--model-control-mode=explicit", "--load-model=echo"]
    with TritonServer(tmp_path / "log", *explicit, repository=repository) as running:
        assert loaded(running) == {"echo"}
        post(running, "/v2/repository/models/python/load", {})
        assert loaded(running) == {"echo", "python"}
        with pytest.raises(urllib.error.HTTPError):
            post(running, "/v2/repository/models/unwanted/load", {})


def test_a_failed_start_reports_what_the_server_said(repository: Path, tmp_path: Path) -> None:
    broken = TritonServer(tmp_path / "log", "--models=unwanted", repository=repository)
    with pytest.raises(AssertionError, match="this model must not be loaded"):
        broken.start()
    assert broken.processes() == broken.shared_memory() == []


def test_sigterm_ends_the_server_with_all_its_processes(repository: Path, tmp_path: Path) -> None:
    running = TritonServer(tmp_path / "log", "--models=echo", repository=repository).start()
    assert [process.split()[1] for process in running.processes()] == ["tritonserver", "triton_python_b"]
    running.stop()
    assert running.process.returncode == 0
    assert running.processes() == running.shared_memory() == []


def test_the_helper_notices_what_a_server_leaves_behind(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "littering", top="subprocess.Popen(['sleep', '60'])")
    running = TritonServer(tmp_path / "log", repository=tmp_path / "models").start()
    region = Path("/dev/shm") / f"{running.shared_memory()[0]}_forgotten"
    region.touch()
    with pytest.raises(AssertionError, match=rf"left behind: .*\d+ sleep.*{region.name}"):
        running.stop()
    assert running.processes() == running.shared_memory() == []


@pytest.mark.parametrize(
    ("flag", "what"), [("--http-port", "HTTP"), ("--grpc-port", "gRPC"), ("--metrics-port", "metrics")]
)
def test_a_port_in_use_is_named_with_its_remedy(flag: str, what: str, repository: Path) -> None:
    others = dict(zip(("--http-port", "--grpc-port", "--metrics-port"), free_ports(3), strict=True))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        others[flag] = taken.getsockname()[1]
        ports = [f"{name}={port}" for name, port in others.items()]
        result = serve(f"--model-repository={repository}", *ports)
    assert result.returncode == 1
    assert result.stderr == (
        f"error: port {others[flag]} ({what}) is in use on 127.0.0.1: stop what listens there or give another {flag}.\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--models=echo,nothing"], "there is no model 'nothing'; there are: echo, python, unwanted."),
        (["--models"], "--models needs the names of models, as in --models llm,sdxl."),
        (["--models=echo", "--model-control-mode", "poll"], "give either the one or the others."),
        (["--model-store=/nowhere"], "the model repository /nowhere does not exist."),
    ],
)
def test_wrong_arguments_get_one_clear_sentence(args: list[str], message: str, repository: Path) -> None:
    result = serve(f"--model-repository={repository}", *args)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith(message + "\n")
    assert result.stderr.count("\n") == 1


def test_help_says_what_there_is() -> None:
    result = serve("--help")
    assert result.returncode == 0
    for word in ("--models", "--http-port", "TRITON_BATCHING_PYTHON"):
        assert word in textwrap.dedent(result.stdout)
