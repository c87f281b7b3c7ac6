# SPDX-License-Identifier: Apache-2.0
"""Which tokens and blocks a query row may see. The only place that knows the causal rule."""

from dataclasses import dataclass
from typing import TypeVar

import torch

Count = TypeVar("Count", int, torch.Tensor)


def decode_lengths(seq_lens: torch.Tensor, query_len: int, rows: int) -> torch.Tensor:
    """Causal lengths of decode rows: row `r*Q + t` sees `c = max(0, seq_lens[r] - Q + t + 1)` tokens.

    Rows past `R*Q` are padding and see none. `[rows]` int64, on the device of `seq_lens`.
    """
    offsets = torch.arange(1 - query_len, 1, device=seq_lens.device)
    lengths = (seq_lens.long()[:, None] + offsets).clamp(min=0).flatten()
    return torch.nn.functional.pad(lengths, (0, rows - lengths.shape[0]))


def prefill_lengths(context_len: int, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Causal lengths of rows `first .. last-1` of one request's chunk: `c = context_len + i + 1`. `[last-first]` int64."""
    return torch.arange(context_len + first + 1, context_len + last + 1, device=device)


@dataclass(frozen=True)
class Chunks:
    """Rows of a prefill call.

    Args:
        bounds: `[R + 1]` int32 or int64, first row of each request, then the number of rows.
        seq_lens: `[R]` int32, tokens of each request up to the end of its rows.
        longest: the bound for these; a length past it counts as it.
    """

    bounds: torch.Tensor
    seq_lens: torch.Tensor
    longest: int

    def part(self, first: int, rows: int) -> "Chunks":
        """What of the chunks lies in rows `first` to `first + rows`, counted from there; a request without rows has length 0.

        All int32, computed on the device, without waiting for it.
        """
        whole = self.bounds.to(torch.int32)
        bounds = whole.clamp(first, first + rows)
        behind = (whole - bounds)[1:]  # rows of each chunk, if it has some here
        seen = self.seq_lens.clamp(max=self.longest) - behind
        return Chunks(bounds - first, seen * (bounds.diff() > 0), self.longest)


def visible_blocks(lengths: Count, block_size: int) -> Count:
    """Blocks that hold visible tokens: `ceil(c / B)`, of an int or elementwise of an integer tensor."""
    return (lengths + block_size - 1) // block_size
