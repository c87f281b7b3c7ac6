# SPDX-License-Identifier: Apache-2.0
"""Launch policy: frozen numbers from device facts and shape. The only file that knows architectures."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lightning_indexer.checks import require


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
    pdl: bool  # programmatic dependent launch: the launch overlaps the tail of the kernel before

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | ({"launch_pdl": True} if self.pdl else {})


@dataclass(frozen=True)
class PrefillPolicy:
    """How the prefill kernel is launched."""

    columns: int  # query rows x heads of one tile
    programs: int  # programs that fill the device; the context is split until there are as many
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a CUDA or HIP device.

    Raises:
        ValueError: an NVIDIA GPU below compute capability 8.0.
    """
    properties = torch.cuda.get_device_properties(device)
    vendor = "amd" if torch.version.hip else "nvidia"
    capability = (properties.major, properties.minor)
    name = f"{properties.name} with {capability[0]}.{capability[1]}"
    require(vendor == "amd" or capability >= (8, 0), "device", "compute capability 8.0 or newer", name)
    return DeviceFacts(vendor, capability, properties.multi_processor_count)


def decode_programs(facts: DeviceFacts) -> int:
    """Persistent programs of the decode kernel per column tile.

    H200, 2026-11-29, bf16 pages of 32 KiB: two programs per multiprocessor with two pages in flight each beat one program
    with five by 13 % at 34 MB (15.5 against 17.8 us).
    """
    return 2 * facts.processors


def decode_policy(facts: DeviceFacts, page_bytes: int) -> DecodePolicy:
    """Policy of the decode kernel for pages of `page_bytes`."""
    hopper = facts.vendor == "nvidia" and facts.capability >= (9, 0) and facts.capability < (12, 0)
    return DecodePolicy(
        num_warps=4,
        # Three buffers of 32 KiB leave room for two programs in the 227 KiB of Hopper; elsewhere 64 to 100 KiB is all.
        num_stages=3 if hopper and page_bytes <= 32768 else 2 if page_bytes <= 32768 else 1,
        pdl=hopper,
    )


def prefill_policy(facts: DeviceFacts, page_bytes: int) -> PrefillPolicy:
    """Policy of the prefill kernel for pages of `page_bytes`."""
    hopper = facts.vendor == "nvidia" and facts.capability >= (9, 0) and facts.capability < (12, 0)
    return PrefillPolicy(
        columns=128 if hopper else 64,
        programs=2 * facts.processors,
        num_warps=8 if hopper else 4,
        num_stages=3 if hopper and page_bytes <= 32768 else 2 if page_bytes <= 32768 else 1,
    )
