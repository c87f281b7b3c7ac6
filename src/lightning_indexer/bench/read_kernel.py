# SPDX-License-Identifier: Apache-2.0
"""A kernel that only reads. Importing this module imports Triton."""

import triton
import triton.language as tl


def _read(x_ptr: tl.tensor, sums_ptr: tl.tensor, tiles: tl.tensor, TILE: tl.constexpr) -> None:  # noqa: N803
    """Sum `x` `[tiles * TILE]` int32 into one number per program, `sums` `[programs]` int32."""
    program = tl.program_id(0)
    offsets = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int32)
    for tile in tl.range(program, tiles, tl.num_programs(0)):
        total += tl.load(x_ptr + tile.to(tl.int64) * TILE + offsets)
    tl.store(sums_ptr + program, tl.sum(total))


read_kernel = triton.jit(_read)
