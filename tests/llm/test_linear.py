"""Products in 8 bits: near those in float, and a row's own affair."""

import pytest
import torch
from engine.linear import FloatLinear, Int8Linear


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(1))


def rows(count: int, seed: int = 2) -> torch.Tensor:
    made = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    made[:, 3] *= 40  # a channel far larger than the others, as language models have them
    return made


def test_is_near_the_product_in_float(weight: torch.Tensor) -> None:
    bias = torch.arange(96.0)
    exact = FloatLinear(weight, bias)(rows(32))
    error = (Int8Linear(weight, bias)(rows(32)) - exact).norm() / exact.norm()
    assert error < 0.01


def test_the_input_has_far_more_than_eight_bits(weight: torch.Tensor) -> None:
    """Against weights that 8 bits hold exactly, only the input's rounding is left."""
    weight = (weight * 40).round().clamp(-127, 127)
    weight[:, 0] = 127
    exact = FloatLinear(weight, None)(rows(32))
    error = (Int8Linear(weight, None)(rows(32)) - exact).abs().max() / exact.abs().max()
    assert error < 1e-3


def test_full_range_does_not_overflow() -> None:
    weight = torch.full((8, 64), 127.0)
    assert Int8Linear(weight, None)(torch.full((2, 64), 5.0))[0, 0] == pytest.approx(64 * 5 * 127, rel=1e-5)


def test_a_row_is_the_same_to_the_bit_in_any_company(weight: torch.Tensor) -> None:
    linear, all_rows = Int8Linear(weight, None), rows(64)
    together = linear(all_rows)
    for start, count in [(0, 1), (5, 2), (17, 16), (63, 1), (20, 44)]:
        assert torch.equal(linear(all_rows[start : start + count]), together[start : start + count])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_breaks_no_other_and_does_not_look_whole(weight: torch.Tensor, bad: float) -> None:
    linear, good = Int8Linear(weight, None), rows(4)
    broken = good.clone()
    broken[2, 7] = bad
    result = linear(broken)
    assert not result[2].isfinite().any()
    kept = [0, 1, 3]
    assert torch.equal(result[kept], linear(good)[kept])


def test_a_row_of_zeros_is_zero(weight: torch.Tensor) -> None:
    assert torch.equal(Int8Linear(weight, None)(torch.zeros(1, 64)), torch.zeros(1, 96))
