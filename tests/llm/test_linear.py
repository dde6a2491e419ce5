"""Products in 8 bits: near those in float, and a row's own affair."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from engine.errors import ConfigError
from engine.linear import BlockwiseLinear, FloatLinear, Linear, TwoPartLinear, has_fast_kernel, linear

Int8 = Callable[[torch.Tensor], Linear]


@pytest.fixture(params=["two parts", "blockwise"])
def int8(request: pytest.FixtureRequest) -> Int8:
    if request.param == "two parts":
        return lambda weight: TwoPartLinear(weight, None)
    return blockwise


def blockwise(weight: torch.Tensor, gated: bool = False) -> BlockwiseLinear:
    if not has_fast_kernel(weight):
        pytest.skip("no C++ compiler, or a CPU without AVX2")
    return BlockwiseLinear(weight, gated)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(1))


def rows(count: int, seed: int = 2) -> torch.Tensor:
    made = torch.randn(count, 128, generator=torch.Generator().manual_seed(seed))
    made[:, 3] *= 40  # a channel far larger than the others, as language models have them
    return made


def test_is_near_the_product_in_float(int8: Int8, weight: torch.Tensor) -> None:
    exact = FloatLinear(weight, None)(rows(32))
    error = (int8(weight)(rows(32)) - exact).norm() / exact.norm()
    # One part of 8 bits keeps less of the values that share a block with the large channel than two parts do.
    assert error < (0.01 if int8 is not blockwise else 0.02)


def test_two_parts_are_far_more_than_eight_bits(weight: torch.Tensor) -> None:
    """Against weights that 8 bits hold exactly, only the input's rounding is left."""
    weight = (weight * 40).round().clamp(-127, 127)
    weight[:, 0] = 127
    exact = FloatLinear(weight, None)(rows(32))
    error = (TwoPartLinear(weight, None)(rows(32)) - exact).abs().max() / exact.abs().max()
    assert error < 1e-3


def test_a_large_weight_costs_only_its_own_block_precision(weight: torch.Tensor) -> None:
    weight[:, 3] *= 1000
    plain = torch.randn(32, 128, generator=torch.Generator().manual_seed(2))
    plain[:, :64] = 0
    exact = FloatLinear(weight, None)(plain)
    assert (blockwise(weight)(plain) - exact).norm() / exact.norm() < 0.01


def test_a_large_value_costs_only_its_own_block_precision(weight: torch.Tensor) -> None:
    weight[:, :64] = 0
    exact = FloatLinear(weight, None)(rows(32))
    error = (blockwise(weight)(rows(32)) - exact).norm() / exact.norm()
    assert error < 0.01
    assert (TwoPartLinear(weight, None)(rows(32)) - exact).norm() / exact.norm() < 0.01


def test_full_range_does_not_overflow(int8: Int8) -> None:
    products = int8(torch.full((32, 1536), 127.0))(torch.full((2, 1536), 5.0))
    assert products[0, 0] == pytest.approx(1536 * 5 * 127, rel=1e-5)


@pytest.mark.parametrize("count", range(1, 15))
def test_a_row_is_the_same_to_the_bit_in_any_company(int8: Int8, weight: torch.Tensor, count: int) -> None:
    product, all_rows = int8(weight), rows(64)
    together = product(all_rows)
    for start in (0, 17, 64 - count):
        assert torch.equal(product(all_rows[start : start + count]), together[start : start + count])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_breaks_no_other_and_does_not_look_whole(int8: Int8, weight: torch.Tensor, bad: float) -> None:
    product, good = int8(weight), rows(4)
    broken = good.clone()
    broken[2, 7] = bad
    result = product(broken)
    assert not result[2].isfinite().any()
    kept = [0, 1, 3]
    assert torch.equal(result[kept], product(good)[kept])


def test_a_row_of_zeros_is_zero(int8: Int8, weight: torch.Tensor) -> None:
    assert torch.equal(int8(weight)(torch.zeros(1, 128)), torch.zeros(1, 96))


NORM = torch.linspace(0.5, 2, 128)


def test_the_norm_comes_first(int8: Int8, weight: torch.Tensor) -> None:
    expected = F.rms_norm(rows(9), (128,), NORM, 1e-5) @ weight.T
    assert (int8(weight).normed(rows(9), NORM, 1e-5) - expected).norm() / expected.norm() < 0.03


def test_the_sum_comes_after(int8: Int8, weight: torch.Tensor) -> None:
    hidden = torch.full((9, 96), 1e6)
    int8(weight).add_to(hidden, rows(9))
    assert ((hidden - 1e6) - rows(9) @ weight.T).abs().max() < 0.01 * (rows(9) @ weight.T).norm()


def test_the_gate_comes_after(weight: torch.Tensor) -> None:
    weight = torch.cat([weight, weight.flip(0)])[:192]
    gate, up = (F.rms_norm(rows(9), (128,), NORM, 1e-5) @ weight.T).chunk(2, -1)
    expected = F.silu(gate) * up
    for product in (TwoPartLinear(weight, None), blockwise(weight, gated=True)):
        error = (product.gated(rows(9), NORM, 1e-5) - expected).norm() / expected.norm()
        assert error < 0.03


def test_shapes_that_the_kernel_has_no_room_for_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    blockwise(torch.ones(32, 64))  # where there is no kernel nothing is to be tested
    assert type(linear(torch.ones(32, 64), None, "int8")) is BlockwiseLinear
    for weight, bias in [(torch.ones(31, 64), None), (torch.ones(32, 65), None), (torch.ones(32, 64), torch.ones(32))]:
        assert type(linear(weight, bias, "int8")) is TwoPartLinear
    monkeypatch.setattr("engine.linear.kernels", lambda: None)
    assert type(linear(torch.ones(32, 64), None, "int8")) is TwoPartLinear


def test_other_types_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"quantization is 'int8' and dtype torch\.bfloat16; allowed with int8: float32"
    ):
        linear(torch.ones(32, 64, dtype=torch.bfloat16), None, "int8")
