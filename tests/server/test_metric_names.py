"""What docker/ asks Prometheus for is on the metrics page of a real server with both products."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from load import metrics_page
from tests.docker.manifests import expressions, metrics_of
from tests.sdxl import tiny
from tests.server.tiny_llm import write_model, write_weights
from tests.server.tritonserver import ROOT, TritonServer

TRITON = ROOT / "tests" / "docker" / "triton_metrics.txt"
# Of Prometheus itself, and of machines with a GPU.
ELSEWHERE = ("up", "nv_gpu_", "nv_energy_")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """The names on the metrics page; of a histogram its own, not those of its buckets, sum and count."""
    root = tmp_path_factory.mktemp("metrics")
    write_model(root / "repository", "llm", write_weights(root / "weights"), num_kv_blocks=100)
    tiny.write(root / "models" / "one")
    sdxl = shutil.copytree(ROOT / "model_repository" / "sdxl", root / "repository" / "sdxl")
    (Path(sdxl) / "1" / "model.json").write_text(json.dumps({"model": "../models/one", "num_threads": 1}))
    with TritonServer(root / "log", repository=root / "repository", ready_timeout=300) as server:
        deadline = time.monotonic() + 60
        while absent(names := names_on(server)) and time.monotonic() < deadline:
            time.sleep(0.5)  # the engine's histograms are copied to Triton every two seconds, one name after the other
        yield names


def names_on(server: TritonServer) -> set[str]:
    return {name for sample, _ in metrics_page.parse(server.metric_text()) for name in metrics_of(sample)}


def absent(names: set[str]) -> dict[str, str]:
    """What docker/ asks for and `names` lack, with the expressions."""
    asked = {name: expression for expression in expressions() for name in metrics_of(expression)}
    assert len(asked) > 20
    return {name: asked[name] for name in asked if name not in names and not name.startswith(ELSEWHERE)}


def test_every_metric_that_docker_asks_for_is_there(page: set[str]) -> None:
    assert absent(page) == {}


def test_tritons_own_metrics_are_as_listed(page: set[str]) -> None:
    """The list serves the tests that run without a server."""
    listed = {name for name in TRITON.read_text().split() if not name.startswith(ELSEWHERE)}
    assert len(listed) > 10
    assert listed - page == set()
