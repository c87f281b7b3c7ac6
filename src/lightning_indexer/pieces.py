# SPDX-License-Identifier: Apache-2.0
"""Chunks of a prefill as requests of decode steps: pieces of a few rows each, cut on the device, without waiting for it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pieces:
    """Pieces of `size` rows: requests of a decode step with that query length, whose last rows are those of the piece.

    A chunk's last piece may have fewer rows; the rows in front of them are computed and not looked at. Pieces past the last
    chunk have length 0.

    Args:
        size: rows of a piece.
        rows: `[pieces * size]` int64, the row of T whose query each row takes.
        requests: `[pieces]` int64, the request that each belongs to.
        seq_lens: `[pieces]` int32, tokens that its last row sees.
        places: `[T]` int64, where among the rows of the pieces each row of T is.
        inside: `[T]` bool, whether it is in a chunk at all.
    """

    size: int
    rows: torch.Tensor
    requests: torch.Tensor
    seq_lens: torch.Tensor
    places: torch.Tensor
    inside: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, rows: int, size: int, longest: int) -> "Pieces":
        """Pieces of the chunks of `rows` rows and at least one request; a length past `longest` counts as that.

        Their number depends on shapes alone. No index leaves its tensor, whatever the values.
        """
        device, last = seq_lens.device, len(seq_lens) - 1
        bounds = cu_seqlens_q.long().contiguous()
        starts, ends = bounds[:-1], bounds[1:]
        before = torch.nn.functional.pad(((ends - starts + size - 1) // size).cumsum(0), (1, 0))
        pieces = min(rows, (rows + len(seq_lens) * (size - 1)) // size)

        piece = torch.arange(pieces, device=device)
        request = (torch.searchsorted(before, piece, right=True) - 1).clamp(0, last)
        end = torch.minimum(starts[request] + (piece - before[request] + 1) * size, ends[request])
        seen = seq_lens.clamp(max=longest)[request] - (ends[request] - end)
        taken = (end[:, None] + torch.arange(-size, 0, device=device)).clamp(0, rows - 1).flatten()

        row = torch.arange(rows, device=device)
        owner = (torch.searchsorted(bounds, row, right=True) - 1).clamp(0, last)
        number = (row - starts[owner]) // size
        stop = torch.minimum(starts[owner] + (number + 1) * size, ends[owner])
        places = ((before[owner] + number + 1) * size + row - stop).clamp(0, pieces * size - 1)
        seen = seen.masked_fill(piece >= before[-1], 0).to(torch.int32)
        return cls(size, taken, request, seen, places, row < bounds[-1])
