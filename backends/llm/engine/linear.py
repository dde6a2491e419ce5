"""Products with a weight matrix: in its own type, or in 8 bits on a CPU. What stands around a product in a decoder, the
norm before it and the sum or the gate after, belongs to it, so that a kernel may do both at once.
"""

import warnings
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from engine.errors import ConfigError
from engine.native import kernels


class Linear(ABC):
    """A matrix [out, in]. Rows are [T, in], results [T, out]."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The products of each row with the weights."""

    def normed(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """Of the rows' RMS norm, whose factors are `norm` [in]."""
        return self(F.rms_norm(hidden, norm.shape, norm, eps))

    def add_to(self, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds the products to `hidden` [T, out]."""
        hidden += self(rows)

    def gated(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """As `normed`; then the second half of each result, times the SiLU of the first: [T, out / 2]."""
        gate, up = self.normed(hidden, norm, eps).chunk(2, -1)
        return F.silu(gate).mul_(up)


class FloatLinear(Linear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)


class TwoPartLinear(Linear):
    """Weights in 8 bits with a scale for each output, by torch's kernels. Each row of the input in two 8-bit parts, the
    second what the first leaves over, under one scale of the row's own: with one part alone the default model's
    perplexity rises by 4 % on kernels of 8 bits and by 18 % on those of 7, with both by half a percent
    (load/quality.py).

    The products are sums of integers, which are exact in any order: a row's result is the same to the bit whatever rows
    stand beside it. One scale for all rows, as torch's own dynamic quantization has it, would mix neighbours in.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        # Without VNNI the kernel adds two products in 16 bits: two of full range would overflow, so the input has 7.
        self._levels = 127 if torch.cpu._is_vnni_supported() else 63
        scales = weight.abs().amax(1).clamp(min=1e-30) / 127
        quantized = (weight / scales[:, None]).round().to(torch.int8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls quantized tensors deprecated; their kernels it does not
            packable = torch._make_per_channel_quantized_tensor(
                quantized, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0
            )
            torch.backends.quantized.engine = "fbgemm"
            self._packed = torch.ops.quantized.linear_prepack(packable, None)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count, finer = len(rows), 2 * self._levels
        scale = rows.abs().amax(-1, keepdim=True).clamp_(min=1e-30).div_(self._levels)  # NaN stays: broken is broken
        scaled = rows / scale
        parts = rows.new_empty(2 * count, rows.shape[1])
        torch.round(scaled, out=parts[:count])
        torch.sub(scaled, parts[:count], out=parts[count:]).mul_(finer)
        # Both parts of all rows in one call, which reads the weights once.
        products = self._multiply(parts, 1.0, self._levels + 1, self._packed)
        result = torch.add(products[:count], products[count:], alpha=1 / finer).mul_(scale)
        return result if self._bias is None else result.add_(self._bias)


class BlockwiseLinear(Linear):
    """Weights and input in 8 bits with a scale for each 64 values of a row, by a kernel of our own (native/linear.cpp).

    The default model's perplexity stays within half a percent (load/quality.py); with one scale for each output's
    weights it rises by 1.1 %."""

    BLOCK, TILE = 64, 32
    STORE, ADD, GATE = 0, 1, 2

    def __init__(self, weight: torch.Tensor, gated: bool = False) -> None:
        """`weight`: one that `fits` and for which `has_fast_kernel`. `gated`: only `gated` will be called, otherwise it
        will not."""
        library = kernels()
        assert library is not None
        self._multiply = library.int8_linear
        self._out, self._in = weight.shape
        if gated:  # 16 gates, then the 16 values that belong to them
            weight = weight.view(2, -1, 16, self._in).transpose(0, 1).reshape(weight.shape)
        blocks = weight.view(self._out, -1, self.BLOCK)
        steps = (blocks.abs().amax(2).clamp(min=1e-30) / 127).bfloat16()
        # A step that bfloat16 rounds down would put the largest weight just beyond 127.
        quantized = (blocks / steps[:, :, None].float()).round().clamp(-127, 127)
        tiles = (quantized + 128).to(torch.uint8).view(-1, self.TILE, self._in // 4, 4)
        self._weight = tiles.transpose(1, 2).contiguous()
        self._steps = steps.view(-1, self.TILE, self._in // self.BLOCK).transpose(1, 2).contiguous()

    @classmethod
    def fits(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        return bias is None and weight.shape[0] % cls.TILE == 0 and weight.shape[1] % cls.BLOCK == 0

    def _into(self, out: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor | None, eps: float, after: int) -> None:
        self._multiply(
            out.data_ptr(), rows.data_ptr(), len(rows), None if norm is None else norm.data_ptr(), eps,
            self._weight.data_ptr(), self._steps.data_ptr(), self._out, self._in, after,
        )  # fmt: skip

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), self._out)
        self._into(out, rows.contiguous(), None, 0.0, self.STORE)
        return out

    def normed(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(len(hidden), self._out)
        self._into(out, hidden, norm, eps, self.STORE)
        return out

    def add_to(self, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        self._into(hidden, rows, None, 0.0, self.ADD)

    def gated(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(len(hidden), self._out // 2)
        self._into(out, hidden, norm, eps, self.GATE)
        return out


def has_fast_kernel(weight: torch.Tensor) -> bool:
    """Whether 8 bits are several times as fast as `weight`'s own type."""
    library = kernels()
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and library is not None and hasattr(library, "int8_linear")


def linear(weight: torch.Tensor, bias: torch.Tensor | None, quantization: str, gated: bool = False) -> Linear:
    """`weight` [out, in], `bias` [out]. `gated`: for Linear.gated alone. Raises ConfigError: there are no kernels."""
    if quantization == "none":
        return FloatLinear(weight, bias)
    if weight.device.type != "cpu" or "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError("quantization is 'int8', whose kernels are for x86 CPUs; allowed here: 'none'")
    if weight.dtype != torch.float32:
        raise ConfigError(f"quantization is 'int8' and dtype {weight.dtype}; allowed with int8: float32")
    if has_fast_kernel(weight) and BlockwiseLinear.fits(weight, bias):
        return BlockwiseLinear(weight, gated)
    return TwoPartLinear(weight, bias)
