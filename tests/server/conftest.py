"""What tests of a served model share."""

from collections.abc import Iterator

import pytest

from tests.server.tritonserver import TritonServer


@pytest.fixture(scope="session")
def llm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The model `llm` as it stands in model_repository/. One server for all tests, which must leave it idle."""
    # The very first start also converts the weights.
    with TritonServer(tmp_path_factory.mktemp("llm") / "log", "--models", "llm", ready_timeout=180) as server:
        yield server
