"""What all tests of the LLM engine share."""

from pathlib import Path

import pytest
import torch

# Two threads on tensors this small only get in one another's way.
torch.set_num_threads(1)

WEIGHTS = Path(__file__).resolve().parents[2] / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def weights() -> Path:
    """The default model. A failure, not a skip, where it is missing: `scripts/test` fetches it."""
    if not WEIGHTS.exists():
        pytest.fail(f"{WEIGHTS} is missing; run the tests with scripts/test, or scripts/weights.py first")
    return WEIGHTS
