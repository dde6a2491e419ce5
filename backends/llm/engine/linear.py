"""Products with a weight matrix: in its own type, or in 8 bits on a CPU."""

import warnings
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.errors import ConfigError


class Linear(Protocol):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]"""


class FloatLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)


class Int8Linear:
    """Weights in 8 bits with a scale for each output. Each row of the input in two 8-bit parts, the second what the
    first leaves over, under one scale of the row's own: with one part alone the default model's perplexity rises by 4 %
    on kernels of 8 bits and by 18 % on those of 7, with both by half a percent (load/quality.py).

    The products are sums of integers, which are exact in any order: a row's result is the same to the bit whatever rows
    stand beside it. One scale for all rows, as torch's own dynamic quantization has it, would mix neighbours in.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [out, in] float. Raises ConfigError where there are no kernels."""
        if weight.device.type != "cpu" or "fbgemm" not in torch.backends.quantized.supported_engines:
            raise ConfigError("quantization is 'int8', whose kernels are for x86 CPUs; allowed here: 'none'")
        self._bias = bias
        # Without VNNI the kernel adds two products in 16 bits: two of full range would overflow, so the input has 7.
        self._levels = 127 if torch.cpu._is_vnni_supported() else 63
        scales = weight.abs().amax(1).clamp(min=1e-30) / 127
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls quantized tensors deprecated; their kernels it does not
            quantized = torch._make_per_channel_quantized_tensor(
                (weight / scales[:, None]).round().to(torch.int8), scales.double(),
                torch.zeros(len(scales), dtype=torch.int64), 0,
            )  # fmt: skip
            torch.backends.quantized.engine = "fbgemm"
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)
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


KINDS: dict[str, type[FloatLinear] | type[Int8Linear]] = {"none": FloatLinear, "int8": Int8Linear}
