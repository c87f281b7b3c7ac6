# SPDX-License-Identifier: Apache-2.0
"""Input checks: one wording, `argument: expected ..., got ...`, for every error that a caller can cause."""

import math
from typing import Any

import torch


def require(condition: bool, argument: str, expected: str, got: Any) -> None:
    """Raise `ValueError("argument: expected ..., got ...")` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def check_int(argument: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Require a plain int in `[minimum, maximum]`; a bool is not an int here."""
    bounds = f"an int >= {minimum}" if maximum is None else f"an int from {minimum} to {maximum}"
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    require(fits and (maximum is None or value <= maximum), argument, bounds, repr(value))


def check_number(argument: str, value: Any, low: float, *, open: bool = False) -> None:
    """Require a finite number of at least `low`, or with `open` above it."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    fits = fits and (value > low if open else value >= low)
    require(fits, argument, f"a finite number {'above' if open else 'from'} {low:g}", repr(value))


def check_choice(argument: str, value: Any, choices: tuple[str, ...]) -> None:
    """Require one of a few names."""
    require(value in choices, argument, " or ".join(repr(c) for c in choices), repr(value))


def _text(shape: tuple[int | str, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def check_tensor(
    argument: str,
    value: Any,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    *,
    unit_stride: bool = True,
) -> None:
    """Require a tensor of a shape (a str stands for any size), dtype and device, its last dim contiguous.

    `unit_stride=False` admits any stride, as for a column taken out of an engine's table.
    """
    require(isinstance(value, torch.Tensor), argument, "a torch.Tensor", type(value).__name__)
    fits = value.dim() == len(shape) and all(
        isinstance(want, str) or want == size for want, size in zip(shape, value.shape, strict=True)
    )
    require(fits, argument, f"shape {_text(shape)}", f"shape {_text(tuple(value.shape))}")
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    require(value.dtype in dtypes, argument, f"dtype {names}", f"dtype {str(value.dtype).removeprefix('torch.')}")
    require(device is None or value.device == device, argument, f"device {device}", f"device {value.device}")
    if unit_stride and value.dim() and value.shape[-1] > 1:
        require(value.stride(-1) == 1, argument, "a contiguous last dim", f"strides {_text(value.stride())}")
