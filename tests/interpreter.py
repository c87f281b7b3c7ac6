# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, mended where it is wrong or slow, and a device that is not there, so that kernels run on CPU tensors.

Seen in Triton 3.6.0 to 3.9.0, silently: `tl.dot` multiplies the bit patterns of bfloat16 as integers, and float32 to
bfloat16 truncates. Arithmetic on bfloat16 outside a dot stays wrong; no kernel does any. Private names are used: the first
tests of test_kernels.py notice a Triton in which these repairs do not take.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from lightning_indexer import indexer, ops, peer, policy, triton_backend, workspace
from lightning_indexer.kernels.common import nan_max

EIGHT_BITS = {tl.float8e4nv: torch.float8_e4m3fn}
CASTS = ("cast_impl", "create_fp_to_fp", "create_fp_ext", "create_fp_trunc")


def widen(codes: np.ndarray) -> np.ndarray:
    """bfloat16 codes (uint16) as float32."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 codes (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _wide(handle: TensorHandle) -> np.ndarray:
    values = widen(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data
    return values.astype(np.float64)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
    """In float64, then rounded once: the same bits whichever operand comes first, and however many columns there are."""
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.matmul(_wide(a), _wide(b)) + _wide(d)
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def _rounding(old: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def cast(self: Any, source: TensorHandle, target: Any, *rest: Any) -> TensorHandle:
        kinds = source.dtype.scalar, target.scalar
        if kinds[0] == kinds[1]:
            return source
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(widen(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(narrow(source.data), tl.bfloat16)
        if kinds[0] in EIGHT_BITS:
            wide = torch.from_numpy(np.ascontiguousarray(source.data)).view(EIGHT_BITS[kinds[0]]).float().numpy()
            return cast(self, TensorHandle(wide, tl.float32), target, *rest)
        return old(self, source, target, *rest)

    return cast


def _reducing(old: Callable[..., Any]) -> Callable[..., Any]:
    """The general way calls the combining function element by element: 20 ms for a page."""

    def reduce(self: Any, input: Any) -> Any:
        if getattr(self.combine_fn, "fn", self.combine_fn) is not nan_max.fn or self.axis is None or self.keep_dims:
            return old(self, input)
        return [self.to_tensor(np.maximum.reduce(input[0].handle.data, axis=self.axis), input[0].dtype)]

    return reduce


def _like(x: tl.tensor, values: np.ndarray) -> tl.tensor:
    handle = TensorHandle(np.ascontiguousarray(values), x.dtype.scalar)
    return tl.tensor(handle, tl.block_type(x.dtype.scalar, list(values.shape)))


def topk(x: tl.tensor, k: Any) -> tl.tensor:
    """`tl.topk` of the last dim: its exchanges, one by one, take a hundred times as long."""
    return _like(x, np.sort(x.handle.data, axis=-1)[..., ::-1][..., : getattr(k, "value", k)])


def sort(x: tl.tensor, dim: Any) -> tl.tensor:
    """`tl.sort` of the last dim, ascending."""
    assert getattr(dim, "value", dim) == len(x.shape) - 1
    return _like(x, np.sort(x.handle.data, axis=-1))


def _indexing(old: Callable[..., None]) -> Callable[..., None]:
    """Triton 3.6 turns arrays of one element into ints in a way that NumPy 2.4 refuses."""

    def patch(tensor: Any, *rest: Any) -> None:
        old(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return patch


def _patching(old: Callable[..., Any]) -> Callable[..., Any]:
    """Each call of a device function patches the language, which its launch has done already: a third of the time."""

    def patch(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()  # nothing to take back
        return old(function)

    return patch


def install() -> None:
    """Mend the interpreter of this process."""
    InterpreterBuilder.create_dot = _dot
    for name in CASTS:
        setattr(InterpreterBuilder, name, _rounding(getattr(InterpreterBuilder, name)))
    interpreter.ReduceOps.generic_reduce = _reducing(interpreter.ReduceOps.generic_reduce)
    tl.topk, tl.sort = topk, sort
    interpreter._patch_lang_tensor = _indexing(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _patching(interpreter._patch_lang)
    # Whether 32-bit sums overflow is computed and, but for debugging, thrown away: another third.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


@contextmanager
def reads_of(tensor: torch.Tensor) -> Iterator[set[int]]:
    """Which elements of a contiguous tensor interpreted kernels read meanwhile, by their places."""
    read: set[int] = set()
    load = interpreter._interpreter.load
    begin, size = tensor.data_ptr(), tensor.element_size()

    def recorded(pointers: np.ndarray, mask: np.ndarray, *rest: Any) -> np.ndarray:
        places = pointers[mask].astype(np.int64) - begin
        read.update((places[(places >= 0) & (places < size * tensor.numel())] // size).tolist())
        return load(pointers, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter._interpreter, "load", recorded)
        yield read


@contextmanager
def fake_device(programs: int, *, topk: int = 16, prefill_columns: int = 16, vendor: str = "nvidia") -> Iterator[None]:
    """A device with `programs` programs, behind the operators' public names; small sorts and prefill tiles, which are quick.

    One of them stays idle in a step of less than three pages for each. It has no instructions for 8-bit floats, as those
    cannot be interpreted; queries of 8 bits want another `vendor`. `topk` is the most that a selection keeps: few candidates
    then take every route that many take on a GPU.
    """
    sorts = tuple(max(topk, size) for size in (8, 16, 32, 64))
    facts = policy.DeviceFacts(vendor, (8, 0), programs)

    def prefill_policy(*given: object) -> policy.PrefillPolicy:
        return replace(policy.prefill_policy(*given), columns=prefill_columns, programs=programs)

    with pytest.MonkeyPatch.context() as patch:
        for module in (ops, triton_backend, workspace, peer, indexer):
            patch.setattr(module, "device_facts", lambda device: facts, raising=False)
            patch.setattr(module, "most_programs", lambda facts, packed: programs, raising=False)
            patch.setattr(module, "decode_programs", lambda facts, packed, pages: programs, raising=False)
            patch.setattr(module, "few_programs", lambda programs: max(1, programs - 1), raising=False)
            patch.setattr(module, "many_pages", lambda programs: 3 * programs, raising=False)
        patch.setattr(triton_backend, "CANDIDATES", sorts)
        patch.setattr(triton_backend, "MERGE_LANES", 2 * workspace.keys_kept(topk))
        patch.setattr(peer, "exchange_rehearsals", lambda facts: 2)
        patch.setattr(peer, "SENDERS", 1)  # programs run one after the other: what one waits for, no later one may send
        patch.setattr(triton_backend, "prefill_policy", prefill_policy)
        for caller in (ops, indexer):
            patch.setattr(caller, "backend_of", lambda device: triton_backend)
        yield
