# SPDX-License-Identifier: Apache-2.0
"""What a rank owns of each request where pages are sharded: lists of blocks and of its own pages, once per step.

Programs `(R, programs of a request)`. A program takes every so many chunks of a request's blocks, counts the owned blocks
before a chunk from the block table itself, and lists those of the chunk behind them: no program waits for another one. Each
reads the row of the table up to its last chunk, 32 KB at 8,192 blocks.
"""

import triton
import triton.language as tl

from lightning_indexer.kernels.common import page_owner
from lightning_indexer.kernels.decode import visible_blocks

CHUNK = tl.constexpr(1024)  # blocks that are listed at once
COUNTED = tl.constexpr(8192)  # that are counted at once: with all loads in flight 1 M tokens take no longer than one of them


@triton.jit(
    do_not_specialize=["block_table_stride", "length_stride", "longest", "free", "rank", "width"],
    do_not_specialize_on_alignment=["pages_ptr", "blocks_ptr", "held_ptr", "block_table_ptr", "seq_lens_ptr"],
)
def list_kernel(
    pages_ptr,  # [R, W] i32: pages of the owned blocks, as the rank's own cache numbers them
    blocks_ptr,  # [R, W] i32: owned blocks, ascending
    held_ptr,  # [R] i32: tokens that the listed blocks hold, up to `longest`
    block_table_ptr,  # [R, max_blocks] i32, pages of the whole group
    block_table_stride,
    seq_lens_ptr,  # [R] i32, any stride
    length_stride,
    longest,
    free,  # blocks; a request that sees no more is selected whole, unscored
    rank,
    width,  # W
    WORLD: tl.constexpr,  # so that no page costs a division
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the module. A request without scores is one block of work for one rank, which selects it whole; no list is read."""
    request = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # plan_kernel, which waits for all of this
        tl.extra.cuda.gdc_wait()
    visible = visible_blocks(tl.load(seq_lens_ptr + request * length_stride), longest, BLOCK)
    unscored = visible <= free
    listed = tl.where(unscored, 0, visible)
    table = block_table_ptr + request.to(tl.int64) * block_table_stride
    place = request.to(tl.int64) * width
    owned = 0  # of the blocks before `done`
    done = 0
    for first in range(tl.program_id(1) * CHUNK, tl.maximum(listed, 1), tl.num_programs(1) * CHUNK):
        for start in range(done, first, COUNTED):
            block = start + tl.arange(0, COUNTED)
            page = tl.load(table + block, mask=block < first, other=0)
            owned += tl.sum(((block < first) & (page_owner(page, WORLD) == rank)).to(tl.int32))
        block = first + tl.arange(0, CHUNK)
        page = tl.load(table + block, mask=block < listed, other=0)
        own = (block < listed) & (page_owner(page, WORLD) == rank)
        at = place + owned + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(pages_ptr + at, (page - rank) // WORLD, mask=own)
        tl.store(blocks_ptr + at, block, mask=own)
        owned += tl.sum(own.to(tl.int32))
        done = first + CHUNK
        if done >= listed:
            whole = tl.where((request % WORLD == rank) & (visible > 0), 1, 0)
            blocks = tl.where(unscored, whole, owned).to(tl.int64)
            tl.store(held_ptr + request, tl.minimum(blocks * BLOCK, longest).to(tl.int32))
