# SPDX-License-Identifier: Apache-2.0
"""A kernel whose output comes late, behind which the next one is on the GPU early: as kernels of an engine may be."""

import torch
import triton
import triton.language as tl

LANES = 1024


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _late_kernel(out_ptr, source_ptr, size, NANOSECONDS: tl.constexpr, LANES: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    begun = _now()
    now = begun
    while now - begun < NANOSECONDS:
        now = _now()
    place = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tl.store(out_ptr + place, tl.load(source_ptr + place, mask=place < size), mask=place < size)


def copy_late(out: torch.Tensor, source: torch.Tensor) -> None:
    """`out.copy_(source)`, both contiguous, after 30 us in which dependents may start. Up to 132 programs."""
    assert out.is_contiguous()
    assert source.is_contiguous()
    assert out.numel() == source.numel() <= 132 * LANES
    grid = (triton.cdiv(out.numel(), LANES),)
    _late_kernel[grid](out, source, out.numel(), NANOSECONDS=30_000, LANES=LANES, num_warps=4, launch_pdl=True)
