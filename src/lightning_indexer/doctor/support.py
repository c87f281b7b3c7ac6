# SPDX-License-Identifier: Apache-2.0
"""What works here, and why what does not, does not: backends, cache formats, transports, engines."""

import importlib.metadata
from dataclasses import dataclass

import torch
import torch.distributed as dist

import lightning_indexer as li
from lightning_indexer.cache import FORMATS
from lightning_indexer.doctor.machine import Machine
from lightning_indexer.ops import check_device
from lightning_indexer.vllm.interface import EXPECTED, is_known

PACKAGE = "lightning-indexer"
VLLM_PLUGINS = "vllm.general_plugins"  # entry points that vLLM loads


@dataclass(frozen=True)
class Support:
    """One thing: whether it works, and how or why not."""

    what: str
    works: bool
    note: str


def find_support(machine: Machine) -> list[Support]:
    """All of it. Formats are found out by selecting with them: on a GPU that compiles kernels."""
    found = [Support("CPU", True, "the operators in torch")]
    devices = [torch.device("cpu")]
    if not machine.gpus:
        found.append(Support("GPU", False, _why_no_gpu(machine)))
    for gpu in machine.gpus:
        device = torch.device("cuda", gpu.index)
        try:
            check_device(device)
        except (ValueError, ImportError) as error:  # an old GPU, no Triton, or one that does not load
            found.append(Support(f"GPU {gpu.index}", False, reason(error)))
        else:
            found.append(Support(f"GPU {gpu.index}", True, f"Triton kernels on {gpu.name}"))
            devices.append(device)
    found += [_format(name, device) for device in devices for name in FORMATS]
    return [*found, _collective(machine), peer_support(machine, len(devices) - 1), *_engines(machine)]


def reason(error: Exception) -> str:
    """The first line of an error, with its type where it is not a ValueError, whose text says all."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first if first and isinstance(error, ValueError) else f"{type(error).__name__}: {first}".removesuffix(": ")


def _why_no_gpu(machine: Machine) -> str:
    return "torch is built for the CPU" if machine.toolkit == "CPU" else f"torch ({machine.toolkit}) finds no device"


def _format(name: str, device: torch.device) -> Support:
    """Whether keys in a format are written and scored on a device."""
    spec = li.IndexerSpec()
    what = f"{name} keys on {device}"
    one = torch.ones(1, dtype=torch.int32, device=device)
    try:
        cache = li.IndexCache.empty(1, spec, name, device)
        cache.data.zero_()
        cache.write(torch.ones(1, spec.head_dim, device=device), torch.zeros(1, dtype=torch.int64, device=device))
        q = torch.ones(1, 1, spec.head_dim, device=device).to(cache.format.query_dtypes[0])
        li.decode(q, cache, torch.zeros(1, 1, dtype=torch.int32, device=device), one, spec=spec)
    except Exception as error:  # Triton's own derive from nothing narrower
        return Support(what, False, reason(error))
    return Support(what, True, f"{cache.token_bytes} B a token")


def _collective(machine: Machine) -> Support:
    if not dist.is_available():
        return Support("transport collective", False, "torch is built without torch.distributed")
    known = {"gloo": dist.is_gloo_available(), "nccl": bool(machine.gpus) and dist.is_nccl_available()}
    backends = [name for name, there in known.items() if there]
    return Support("transport collective", bool(backends), " and ".join(backends) or "neither gloo nor NCCL")


def peer_support(machine: Machine, usable: int) -> Support:
    """Of the `peer` transport, where the Triton kernels run on `usable` GPUs."""
    what, count = "transport peer", len(machine.gpus)
    if not usable:
        return Support(what, False, "needs a GPU that the Triton kernels run on")
    cut = [(gpu.index, other) for gpu in machine.gpus for other, reached in enumerate(gpu.reaches) if not reached]
    if cut:
        pairs = ", ".join(f"{one} to {other}" for one, other in cut[:4])
        return Support(what, False, f"GPUs do not reach each other's memory: {pairs}{', ...' if cut[4:] else ''}")
    where = "ranks that share this GPU: for tests" if count == 1 else f"all {count} GPUs reach each other"
    return Support(what, True, where)


def _engines(machine: Machine) -> list[Support]:
    own = importlib.metadata.entry_points(group=VLLM_PLUGINS)
    plugin = any(point.dist is not None and point.dist.name == PACKAGE for point in own)
    if machine.vllm is None:
        return [Support("engine vLLM", False, "not installed")]
    if plugin and not is_known(machine.vllm):
        return [Support("engine vLLM", False, f"{machine.vllm}, while this package's plugin is for {EXPECTED}")]
    note = "with this package's plugin" if plugin else "this package has no plugin installed for it"
    return [Support("engine vLLM", plugin, f"{machine.vllm}, {note}")]
