"""What tests of a served model share."""

from collections.abc import Iterator

import pytest

from tests.server.tiny_llm import write_model, write_weights
from tests.server.tritonserver import ROOT, TritonServer


@pytest.fixture(scope="session")
def llm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The model `llm` as it stands in model_repository/. One server for all tests, which must leave it idle."""
    # The very first start also converts the weights.
    with TritonServer(tmp_path_factory.mktemp("llm") / "log", "--models", "llm", ready_timeout=180) as server:
        yield server


@pytest.fixture(scope="session")
def llm_modes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The language model under all four policies, as their config.pbtxt stand, with random weights."""
    folder = tmp_path_factory.mktemp("modes")
    weights = write_weights(folder / "weights")
    modes = ("llm", "llm_unbatched", "llm_static", "llm_dynamic")
    configs = {mode: (ROOT / "model_repository" / mode / "config.pbtxt").read_text() for mode in modes}
    for mode, config in configs.items():
        write_model(folder / "models", mode, weights, config=config, num_kv_blocks=2000)
    write_model(folder / "models", "seatless", weights, config=configs["llm_dynamic"], max_num_seqs=15)
    args = ("--models", ",".join(modes))
    with TritonServer(folder / "log", *args, repository=folder / "models", ready_timeout=180) as server:
        yield server
