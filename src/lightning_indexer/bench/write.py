# SPDX-License-Identifier: Apache-2.0
"""Writing keys, as one layer of a step does: by slot alone, or with norm and rotation of keys and queries before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import lightning_indexer as li
from lightning_indexer import torch_backend
from lightning_indexer.bench.gate import WrongSelectionError
from lightning_indexer.bench.timing import L2_REUSE, MAX_LAYERS, Protocol, Rotation, Timing, time_step
from lightning_indexer.cache import GROUP

# With norm and rotation first a number may round to either side of a middle. So nearly all must be torch's, in each dim, and
# the others next to it: within a step of the format.
NEAR = 0.97
STEPS = {"bf16": 2.0**-7, "fp8": 2.0**-3, "nvfp4": 0.7}
FLOOR = 2.0**-9
# Of the largest of a group of NVFP4: the least two numbers are half a scale apart, a twelfth of the largest, and the scale may
# itself have fallen to the other side, which is an eighth.
GROUP_FLOOR = 0.1


@dataclass(frozen=True)
class WriteRow:
    """Time per layer of writing `rows` keys, and the bytes of keys, queries and cache that must move."""

    format: str
    rows: int
    heads: int  # of queries that are normed and rotated beside; 0: keys are only written
    timing: Timing
    moved: int
    read_tbps: float

    @property
    def pct_roof(self) -> float:
        return 100 * self.moved / self.read_tbps / 1e6 / self.timing.us

    def as_json(self) -> dict[str, Any]:
        """A row of the result file."""
        return {
            "op": "write",
            "format": self.format,
            "rows": self.rows,
            "heads": self.heads,
            "us": round(self.timing.us, 3),
            "us_min": round(self.timing.us_min, 3),
            "us_max": round(self.timing.us_max, 3),
            "bytes": self.moved,
            "pct_roof": round(self.pct_roof, 2),
        }


def measure_writes(
    formats: Sequence[str],
    sizes: Sequence[int],
    heads: int,
    device: torch.device,
    l2_bytes: int,
    read_tbps: float,
    protocol: Protocol,
    progress: Callable[[str, int, int], None],
) -> list[WriteRow]:
    """Rows of a table, each verified against torch's writer before it is timed.

    Args:
        formats: of the cache.
        sizes: rows to write, for each format.
        heads: of the queries that are normed and rotated as well; with 0 keys are only written.
        device: where.
        l2_bytes: of its L2.
        read_tbps: its read roof, the only one that is measured: writing is at most as fast.
        protocol: replays.
        progress: is told the case and how many are done.

    Raises:
        WrongSelectionError: other bytes than torch's.
    """
    cases = [(format, rows, fused) for format in formats for rows in sizes for fused in sorted({0, heads})]
    made = []
    for done, (format, rows, fused) in enumerate(cases):
        progress(f"write {format}", done, len(cases))
        made.append(_measure(format, rows, fused, device, l2_bytes, read_tbps, protocol))
    return made


def _measure(
    format: str, rows: int, heads: int, device: torch.device, l2_bytes: int, read_tbps: float, protocol: Protocol
) -> WriteRow:
    spec = li.IndexerSpec()
    generator = torch.Generator(device).manual_seed(0)
    pages = -(-rows // spec.block_size)
    one = li.IndexCache.empty(pages, spec, format, device)
    key_bytes = 2 * spec.head_dim * rows
    moved = key_bytes * (1 + 2 * heads) + rows * one.token_bytes
    layers = max(3, min(MAX_LAYERS, (4 << 30) // moved))
    rotation = Rotation(layers, L2_REUSE * l2_bytes // (layers * moved) + 1, pages)
    # Projections of each layer, keys behind queries, as one product makes them.
    shape = (rotation.views, rows, heads + 1, spec.head_dim)
    projected = torch.randn(shape, dtype=torch.bfloat16, generator=generator, device=device)
    q, k = projected[:, :, :heads], projected[:, :, heads]
    one.data.view(torch.uint8).zero_()
    data = torch.zeros(rotation.views, *one.data.view(torch.uint8).shape, dtype=torch.uint8, device=device)
    caches = [li.IndexCache.wrap(layer, spec, format) for layer in data.view(one.data.dtype)]
    out = torch.zeros_like(q)
    slots = torch.randperm(pages * spec.block_size, generator=generator, device=device)[:rows]
    positions = torch.randint(1 << 20, (rows,), dtype=torch.int32, generator=generator, device=device)
    weights = (0.1 * torch.randn(2, spec.head_dim, generator=generator, device=device)).bfloat16()
    rules = li.NormRope(weights[0], weights[1])

    def call(view: int) -> None:
        if heads:
            rules(q[view], k[view], caches[view], slots, positions, out=out[view])
        else:
            caches[view].write(k[view], slots)

    for view in (0, rotation.views - 1):
        call(view)
        if heads:
            torch_backend.norm_rope_write(q[view], k[view], one, slots, positions, rules, wanted := torch.empty_like(q[view]))
            for head in range(heads):
                compare(out[view, :, head].float(), wanted[:, head].float(), "bf16", f"{format}, query head {head}")
            place = slots // spec.block_size, slots % spec.block_size
            compare(caches[view].dequantize()[place], one.dequantize()[place], format, f"{format}, keys")
        else:
            torch_backend.write(one, k[view], slots)
            if not torch.equal(caches[view].data.view(torch.uint8), one.data.view(torch.uint8)):
                raise WrongSelectionError(f"write, {format}: expected torch's bytes, got others")
    return WriteRow(format, rows, heads, time_step(call, None, rotation, protocol), moved, read_tbps)


def compare(got: torch.Tensor, want: torch.Tensor, format: str, what: str) -> None:
    """Require rows `[n, D]` to be torch's, but for numbers that fell to the other side of a middle of the format.

    Raises:
        WrongSelectionError: a dim of which too few are the same, or a number that is further off.
    """
    same = (got == want).float().mean(0)
    if float(same.min()) < NEAR:
        dim, share = int(same.argmin()), 100 * float(same.min())
        raise WrongSelectionError(f"write, {what}: expected torch's numbers, got {share:.1f} % of them in dim {dim}")
    floor = torch.full_like(want, FLOOR)
    if format == "nvfp4":
        largest = want.abs().reshape(len(want), -1, GROUP).amax(2)
        floor += GROUP_FLOOR * largest.repeat_interleave(GROUP, 1)
    off = (got - want).abs() > STEPS[format] * want.abs() + floor
    if bool(off.any()):
        row, dim = off.nonzero()[0].tolist()
        expected, found = float(want[row, dim]), float(got[row, dim])
        raise WrongSelectionError(f"write, {what}: row {row}, dim {dim}: expected {expected}, got {found}")
