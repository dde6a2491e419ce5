"""The image's recipe: what can be checked of it without building it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docker.manifests import DOCKER, ROOT, run

DOCKERFILE = (DOCKER / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    assert run("hadolint", "--no-color", DOCKER / "Dockerfile").strip() == ""


def test_shellcheck_finds_nothing() -> None:
    assert run("shellcheck", DOCKER / "serve").strip() == ""


def test_everything_that_is_copied_is_there_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {source for line in copied for source in line.split() if "[" not in source}
    assert {"backends/", "docker/serve", "requirements/server.lock"} <= sources
    kept = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(pattern) or source.startswith(f"{pattern}/") for pattern in kept), source


def test_the_server_is_pinned_and_does_not_run_as_root() -> None:
    (release,) = re.findall(r"^ARG TRITON=(\d\d\.\d\d)$", DOCKERFILE, re.MULTILINE)
    assert release >= "25.06", "docker/serve uses a flag that older ones don't know"
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    final = {stage.split()[2]: stage for stage in stages if " AS " in stage.splitlines()[0]}
    for name in ("server", "load"):
        assert re.findall(r"^USER (.+)$", final[name], re.MULTILINE) == ["1000:1000"], name


def test_the_image_installs_what_the_server_needs_and_no_clients() -> None:
    wanted = (ROOT / "requirements" / "server.in").read_text()
    assert re.findall(r"^tritonclient", wanted, re.MULTILINE), "what the Dockerfile's grep takes out"


@pytest.fixture
def serve(tmp_path: Path) -> "Serve":
    return Serve(tmp_path)


class Serve:
    """docker/serve with a tritonserver that prints its arguments, one a line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        server = folder / "bin" / "tritonserver"
        server.parent.mkdir()
        server.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        server.chmod(0o755)

    def __call__(self, *args: str, **env: str) -> list[str]:
        done = self.run(*args, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = {"PATH": path, "TRITON_REPOSITORY": str(ROOT / "model_repository"), **env}
        return subprocess.run([DOCKER / "serve", *args], env=environment, capture_output=True, text=True)


def test_serve_loads_the_models_that_are_named(serve: Serve) -> None:
    assert [line for line in serve() if "--load-model" in line] == ["--load-model=llm"]
    several = serve(MODELS="llm,sdxl llm_static")
    assert [line for line in several if "--load-model" in line] == [
        "--load-model=llm",
        "--load-model=sdxl",
        "--load-model=llm_static",
    ]
    assert "there is no model other in" in serve.run(MODELS="llm other").stderr


def test_serve_passes_arguments_on_after_its_own(serve: Serve) -> None:
    assert serve("--http-port=8080", "--log-verbose=1")[-2:] == ["--http-port=8080", "--log-verbose=1"]


def test_serve_closes_what_changes_the_server_with_a_key_that_nobody_knows(serve: Serve) -> None:
    keys = set()
    for _ in range(2):
        closed = [line.partition("=")[2] for line in serve() if "restricted" in line]
        assert len(closed) == 2, "HTTP and gRPC"
        assert len(set(closed)) == 1
        apis, _, key = closed[0].partition(":")
        assert set(apis.split(",")) == {"model-repository", "shared-memory", "trace", "logging"}
        keys.add(key)
        assert re.fullmatch(r"admin-key=[0-9a-f]{48}", key)
    assert len(keys) == 2, "another one at each start"


def test_serve_takes_the_key_of_a_file_but_no_weak_one(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a-key-of-some-length\n")
    assert sum("admin-key=a-key-of-some-length" in line for line in serve(ADMIN_KEY_FILE=str(file))) == 2
    for weak in ("", "short", "a key, and another flag"):
        file.write_text(weak)
        assert "must hold 16 or more" in serve.run(ADMIN_KEY_FILE=str(file)).stderr
