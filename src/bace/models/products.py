"""Matrix products of encoders on AMD processors.

torch multiplies float32 matrices on a CPU with MKL, which makes no use of the AVX-512 of AMD processors. oneDNN, which
is part of torch too, does, and is faster there (docs/performance.md). On all other machines `Linear` is torch's.
"""

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bace.errors import ConfigError

SMALL = 2**21  # multiplications and additions, below which calling oneDNN costs more than it gains


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies faster on this machine. The environment variable BACE_ONEDNN (0 or 1) overrides it."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if given := os.environ.get("BACE_ONEDNN"):
        if given not in ("0", "1"):
            raise ConfigError(f"the environment variable BACE_ONEDNN is '{given}': set it to 0 or 1, or leave it out")
        return given == "1"
    about = Path("/proc/cpuinfo")
    amd = about.is_file() and "AuthenticAMD" in about.read_text(errors="replace")
    return amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Linear(nn.Linear):
    """torch's Linear, with the products of oneDNN where they are faster."""

    def forward(self, input: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        return linear(input, self.weight, self.bias)


def use_fast_products(module: nn.Module) -> None:
    """Make every Linear inside a module one of this file. Its parameters and their names stay."""
    for each in module.modules():
        if type(each) is nn.Linear:
            each.__class__ = Linear


def linear(
    input: Tensor,  # (..., inputs)
    weight: Tensor,  # (outputs, inputs)
    bias: Tensor | None = None,  # (outputs,)
) -> Tensor:  # (..., outputs)
    if not prefers_onednn() or not _takes(input, weight):
        return F.linear(input, weight, bias)
    if torch.is_grad_enabled():
        product: Tensor = _Product.apply(input, weight, bias)  # type: ignore[no-untyped-call]
        return product
    return _multiply(input, weight, bias)


def _takes(input: Tensor, weight: Tensor) -> bool:
    """Whether a product is one of large float32 matrices on the CPU, outside of what replaces operations by others:
    autocast, compilation, export and the transformations of torch.func."""
    return (
        input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and input.numel() * len(weight) >= SMALL
    )


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return result


class _Product(torch.autograd.Function):
    """Y = X W^T + b, with dX = dY W, dW = dY^T X and db = sum of dY over rows."""

    @staticmethod
    def forward(context: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        context.save_for_backward(input, weight)
        return _multiply(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = context.saved_tensors
        needs_input, needs_weight, needs_bias = context.needs_input_grad
        above = above.contiguous()
        rows = above.reshape(-1, above.shape[-1])  # (rows, outputs)
        return (
            _multiply(above, weight.T, None) if needs_input else None,
            _multiply(rows.T, input.reshape(-1, input.shape[-1]).T, None) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
