# SPDX-License-Identifier: Apache-2.0
"""Launch policy: frozen numbers from device facts and shape. The only file that knows architectures."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lightning_indexer.checks import require

SELECT_WARPS = 4
LIST_WARPS = 8  # 32 page ids for each thread to ask for at once
FEW_ROWS = 6  # to write, per multiprocessor: with four heads of queries beside the keys that is 30 programs of the 32 at once
PREFETCH_BYTES = 128 * 16  # 128 lanes ask for 16 bytes or a multiple each


@dataclass(frozen=True)
class DeviceFacts:
    """What a policy depends on."""

    vendor: str  # "nvidia" or "amd"
    capability: tuple[int, int]  # compute capability; (9, 4), (9, 5) for gfx942, gfx950
    processors: int  # multiprocessors or compute units


@dataclass(frozen=True)
class DecodePolicy:
    """How the decode kernel is launched."""

    num_warps: int
    num_stages: int  # page buffers per program, one of them in use
    ahead: int  # pages that a planned program asks for before the kernel before has ended
    carry: bool  # each page is loaded into registers while the one before it is scored
    native: bool  # the GPU converts e4m3 by itself
    pdl: bool  # programmatic dependent launch: the launch overlaps the tail of the kernel before
    instruction: dict[str, int]  # options that fix the matrix instruction
    warp_threads: int
    max_registers: int | None  # per thread, for tiles of up to 16 columns; None leaves it to the compiler

    def options(self, columns: int) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        limit = {} if self.max_registers is None or columns > 16 else {"maxnreg": self.max_registers}
        return options | limit | _pdl_option(self.pdl) | self.instruction

    def select_options(self) -> dict[str, Any]:
        """Keyword arguments of the launch that selects."""
        return {"num_warps": SELECT_WARPS} | _pdl_option(self.pdl)

    def plan_options(self, listed: bool) -> dict[str, Any]:
        """Keyword arguments of the launch that plans a step, `listed` behind the one that lists pages."""
        return _pdl_option(self.pdl and listed)

    def list_options(self) -> dict[str, Any]:
        """Keyword arguments of the launch that lists pages."""
        return {"num_warps": LIST_WARPS} | _pdl_option(self.pdl)

    @property
    def select_threads(self) -> int:
        """Threads of a program that selects."""
        return SELECT_WARPS * self.warp_threads


@dataclass(frozen=True)
class PrefillPolicy:
    """How the prefill kernels are launched."""

    columns: int  # query rows x heads of one tile
    programs: int  # programs that the device holds at once; the context is split so that there are as many, but no more
    num_warps: int
    num_stages: int
    pdl: bool
    native: bool  # the GPU converts e4m3 by itself
    instruction: dict[str, int]  # options that fix the matrix instruction
    max_registers: int | None  # per thread, so that two programs fit a multiprocessor; None leaves it to the compiler

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the launch that scores."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return options | limit | _pdl_option(self.pdl) | self.instruction

    def merge_options(self) -> dict[str, Any]:
        """Keyword arguments of the launch that merges splits."""
        return {"num_warps": 4} | _pdl_option(self.pdl)


def _pdl_option(pdl: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if pdl else {}


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a CUDA or HIP device.

    Raises:
        ValueError: not a GPU, or an NVIDIA GPU below compute capability 8.0.
    """
    require(device.type == "cuda", "device", "a GPU", str(device))
    properties = torch.cuda.get_device_properties(device)
    vendor = "amd" if torch.version.hip else "nvidia"
    capability = (properties.major, properties.minor)
    name = f"{properties.name} with {capability[0]}.{capability[1]}"
    require(vendor == "amd" or capability >= (8, 0), "device", "compute capability 8.0 or newer", name)
    return DeviceFacts(vendor, capability, properties.multi_processor_count)


def most_programs(facts: DeviceFacts, packed: bool) -> int:
    """Most persistent programs of the decode kernel per column tile, for keys of 8 bits or less (`packed`) or 16.

    Two per multiprocessor; four of packed keys. H200, 2026-11-29, bf16 pages of 32 KiB: two programs with two pages in flight
    each beat one with five by 13 % at 34 MB. 2026-11-30, 4 M tokens, a kernel that only scores: fp8 took 135 us with 396 or
    512 programs, 148 with 264; NVFP4 154 with 396, 148 with 528.
    """
    return (4 if packed else 2) * facts.processors


def few_programs(programs: int) -> int:
    """How many of so many programs share the pages of a step that has few: the power of two just below, or all.

    Contexts are often a power of two: then every share is equal, and a row has no more candidates than its selection sorts at
    once. H200, 2026-12-01, 256 programs against 264: 1 x 131,072 13.8 and 14.5 us, 8 x 65,536 34.0 and 35.9.
    """
    even = 1 << (programs.bit_length() - 1)
    return even if 1.05 * even >= programs else programs


def many_pages(programs: int) -> int:
    """Pages of a step from which all programs share them.

    Then every multiprocessor has as many programs, which is worth more. H200, 2026-12-01, 256 programs against 264: with 31
    pages each 63.8 and 65.4 us, 62 122.1 and 121.4, 124 239.7 and 236.8, 248 475.5 and 468.2.
    """
    return 60 * programs


def decode_programs(facts: DeviceFacts, packed: bool, pages: int) -> int:
    """Programs to launch for a step that has up to `pages` pages.

    Those that would stay idle whatever the lengths up to that bound are left out: H200, 2026-12-01, 1 x 16,384 took 4.5 us
    with 256 programs, 4.9 with 264 of which 8 had nothing to do. Of packed keys never all: fp8, 32 x 131,072, 134 us with 512
    programs, 147 with 528. (Four take every register of a multiprocessor; where another launch is still on it, the fourth
    probably has to wait.)
    """
    most = most_programs(facts, packed)
    return most if not packed and pages >= many_pages(most) else few_programs(most)


def exchange_waiters(facts: DeviceFacts, neighbours: int) -> int:
    """Programs of a step that may wait for other ranks at once, where `neighbours` steps may be on its GPU at the same time.

    Alone on the GPU three per multiprocessor. Else fewer in all than there are multiprocessors, so that some hold nobody who
    waits and can take what is waited for: a multiprocessor whose programs have little shared memory may have to be rid of all
    of them before it can give as much as the scorer wants. H200, 2026-11-30, 16 ranks on one GPU: with as many together as
    alone a step stood still until a wait timed out, in two of three runs; with fewer none of 160 steps did.
    """
    return 3 * facts.processors if neighbours == 1 else max(1, 3 * facts.processors // 4 // neighbours)


def exchange_rehearsals(facts: DeviceFacts) -> int:
    """Programs of the exchange that go through a selection of nothing before they wait: one for each multiprocessor.

    With dependent launch they are there while the scorer runs, and it brings the code. Two H200s, 2026-11-30: a step that is
    not shared 0.4 to 1.3 us faster, one that is 0.9 to 1.5.
    """
    return facts.processors if _is_hopper_like(facts) else 0


def scorer_sends(facts: DeviceFacts) -> bool:
    """Whether queries may travel within the launch that scores them.

    Not on AMD, until somebody has run it there: a load that passes by the caches of a compute unit may still find an old line
    in the L2 of its die.
    """
    return facts.vendor == "nvidia"


def converts_e4m3(facts: DeviceFacts) -> bool:
    """Whether the GPU has instructions from and to e4m3: NVIDIA's do from compute capability 8.9 on."""
    return facts.vendor == "nvidia" and facts.capability >= (8, 9)


def decode_policy(facts: DeviceFacts, page_bytes: int, format: str = "plain") -> DecodePolicy:
    """Policy of the decode kernel for pages of `page_bytes` in a format as the kernels call it."""
    packed, nvfp4 = format != "plain", format == "nvfp4"
    hopper = _is_hopper_like(facts)
    ahead = 2 if hopper else 0
    return DecodePolicy(
        num_warps=4,
        # Three buffers of 32 KiB leave room for two programs in the 227 KiB of Hopper; elsewhere 64 to 100 KiB is all.
        num_stages=1 if nvfp4 else _stages(page_bytes, 3 if hopper else 2, 65536 if hopper else 32768),
        # H200, 2026-11-30: two pages save 0.2 us at 1 MB, 0.5 at 8 and 34 MB, nothing at 0.5 GB; four cost 0.7 us at 34 MB.
        ahead=ahead if ahead * page_bytes % PREFETCH_BYTES == 0 else 0,
        # H200, 2026-11-30, 4 M tokens of NVFP4: 128 us; through shared memory, where its rows meet in the same banks, 178.
        carry=nvfp4,
        native=converts_e4m3(facts),
        pdl=hopper,
        instruction=_instruction(facts),
        warp_threads=64 if facts.vendor == "amd" else 32,
        max_registers=128 if hopper and packed else None,  # four programs then fit a multiprocessor
    )


def prefill_policy(facts: DeviceFacts, page_bytes: int, keep: int) -> PrefillPolicy:
    """Policy of the prefill kernels for pages of `page_bytes`, and `keep` candidates per column.

    H200, 2026-11-29, bf16, 4 heads, 8,192 tokens after 131,072: two programs of 8 warps per multiprocessor, held to 128
    registers a thread, took 2.32 ms; one with 181 registers 2.85 ms; 64 columns with 4 warps 3.31 ms.
    """
    wide = _is_hopper_like(facts) and page_bytes <= 32768  # larger pages need more registers than two programs leave
    return PrefillPolicy(
        columns=128 if wide else 64,
        programs=2 * facts.processors,
        num_warps=8 if wide else 4,
        num_stages=_stages(page_bytes, 2, 32768),
        pdl=_is_hopper_like(facts),
        native=converts_e4m3(facts),
        instruction=_instruction(facts),
        max_registers=128 if wide and keep <= 16 else None,
    )


@dataclass(frozen=True)
class WritePolicy:
    """How the kernel that writes keys is launched."""

    rows: int  # of one program
    num_warps: int
    pdl: bool

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        return {"num_warps": self.num_warps} | _pdl_option(self.pdl)


def write_policy(facts: DeviceFacts, rows: int) -> WritePolicy:
    """Policy of writing `rows` keys: a warp for each while all of them are there at once.

    H200, 2026-11-30, with norm and rotation of keys and four heads: 128 rows of NVFP4 take 2.1 us so, by two rows a warp 2.4,
    by four 4.0; 65,536 rows take 113 us by 16 for four warps, by 32 154, by 16 for two 157.
    """
    few = rows <= FEW_ROWS * facts.processors
    return WritePolicy(rows=1 if few else 16, num_warps=1 if few else 4, pdl=_is_hopper_like(facts))


def _instruction(facts: DeviceFacts) -> dict[str, int]:
    """AMD has several shapes of matrix instruction; a score must come from the same one in every kernel and tile."""
    return {"matrix_instr_nonkdim": 16} if facts.vendor == "amd" else {}


def _stages(page_bytes: int, most: int, largest: int) -> int:
    """Page buffers: `most` for pages of up to 32 KiB, two up to `largest`, else none beside the one in use."""
    return most if page_bytes <= 32768 else 2 if page_bytes <= largest else 1


def _is_hopper_like(facts: DeviceFacts) -> bool:
    """NVIDIA data-centre GPUs from Hopper on: 227 KiB of shared memory and programmatic dependent launch."""
    return facts.vendor == "nvidia" and (9, 0) <= facts.capability < (12, 0)
