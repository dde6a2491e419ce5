"""A training stage that was killed goes on as if it had not been."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.stage import learning_rate, train


class Killed(Exception):
    pass


def fit(folder: Path, steps: int, kill_at: int | None = None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    def loss(step: int) -> Tensor:
        if step == kill_at:
            raise Killed
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return (model(inputs) - inputs.sum(-1, keepdim=True)).square().mean()

    train("fit", model, loss, folder, steps=steps, peak=0.05, warm_up=5, decay=0.9, every=10)
    return [weight.item() for weight in model.weight.flatten()]


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = fit(tmp_path / "a", 60)
    with pytest.raises(Killed):
        fit(tmp_path / "b", 60, kill_at=37)
    assert fit(tmp_path / "b", 60) == whole
    assert whole == pytest.approx([1, 1, 1, 1], abs=0.1)


def test_the_learning_rate_rises_once_and_falls_once_to_zero() -> None:
    rates = [learning_rate(step, 1000, 2e-3, 100) for step in range(1000)]
    assert max(rates) == pytest.approx(2e-3)
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] < 1e-7
