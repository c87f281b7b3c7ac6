# SPDX-License-Identifier: Apache-2.0
"""Moving pages of index caches that groups hold once: offload and restore, copies, and from a group to one of another size.

Nothing is sent here. `page_moves` tells which rank has what for whom, `IndexCache.read_pages` and `write_pages` take pages out
as bytes and put them in; what lies between, a copy to the host or a connector of an engine, is the caller's.
"""

from dataclasses import dataclass

import torch

from lightning_indexer.checks import check_int, check_tensor, require
from lightning_indexer.spec import Shard


@dataclass(frozen=True)
class PageMove:
    """Pages that one rank has for another, in the order in which they are sent.

    Args:
        source, target: ranks of the group that has them, and of the one that gets them.
        source_pages, target_pages: `[n]` int64, where they lie in the one's own cache and where they belong in the other's.
    """

    source: int
    target: int
    source_pages: torch.Tensor
    target_pages: torch.Tensor


def page_moves(
    source_pages: torch.Tensor, target_pages: torch.Tensor, *, source_world: int, target_world: int
) -> list[PageMove]:
    """What moves where, when pages of a group of `source_world` ranks go to one of `target_world`; one rank is a whole cache.

    Args:
        source_pages: `[n]` int32 or int64, page ids as the block tables of the group that has them tell.
        target_pages: `[n]` of the same dtype, page ids that the other group's allocator gave them, distinct.
        source_world, target_world: P of each.

    Returns:
        A move for each pair of ranks that has any, by source, then target; within one in the order of the arguments.

    Raises:
        ValueError: shapes, dtypes, numbers of ranks below 1, negative page ids, or a target given twice.
    """
    check_int("source_world", source_world, 1)
    check_int("target_world", target_world, 1)
    check_tensor("source_pages", source_pages, ("n",), (torch.int32, torch.int64), unit_stride=False)
    shape, dtypes = (len(source_pages),), (source_pages.dtype,)
    check_tensor("target_pages", target_pages, shape, dtypes, source_pages.device, unit_stride=False)
    given = {"source_pages": source_pages.long(), "target_pages": target_pages.long()}
    for name, pages in given.items():
        require(not bool((pages < 0).any()), name, "page ids from 0", int(pages.min()) if len(pages) else "none")
    source, target = given.values()
    require(len(torch.unique(target)) == len(target), "target_pages", "distinct page ids", "one twice")
    moves = []
    for giver in (Shard(rank, source_world, "page") for rank in range(source_world)):
        for taker in (Shard(rank, target_world, "page") for rank in range(target_world)):
            chosen = giver.holds(source) & taker.holds(target)
            if bool(chosen.any()):
                there, here = giver.local_pages(source[chosen]), taker.local_pages(target[chosen])
                moves.append(PageMove(giver.rank, taker.rank, there, here))
    return moves
