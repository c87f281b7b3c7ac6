# SPDX-License-Identifier: Apache-2.0
"""What there is: software, GPUs, and which of them reach each other."""

import importlib.metadata
import platform
from dataclasses import dataclass

import torch

import lightning_indexer
from lightning_indexer.bench.run import driver_version


@dataclass(frozen=True)
class GpuFacts:
    """One GPU of this machine."""

    index: int
    name: str
    capability: str  # "9.0", or "gfx942"
    memory_gb: float  # 10^9 bytes
    processors: int
    reaches: tuple[bool, ...]  # by index of the other GPU: whether this one reads and writes its memory


@dataclass(frozen=True)
class Machine:
    """Software and GPUs; a version is None where there is none."""

    package: str
    python: str
    system: str
    torch_version: str
    toolkit: str  # what torch is built for: "CUDA 13.0", "HIP 6.4", "CPU"
    triton: str | None
    driver: str | None
    vllm: str | None
    gpus: tuple[GpuFacts, ...]

    @classmethod
    def read(cls) -> "Machine":
        """This machine."""
        count = torch.cuda.device_count()
        return cls(
            package=lightning_indexer.__version__,
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
            torch_version=torch.__version__,
            toolkit=_toolkit(),
            triton=installed_version("triton"),
            driver=driver_version() if count else None,
            vllm=installed_version("vllm"),
            gpus=tuple(_gpu(index, count) for index in range(count)),
        )


def installed_version(package: str) -> str | None:
    """Of an installed package; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _toolkit() -> str:
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _gpu(index: int, count: int) -> GpuFacts:
    properties = torch.cuda.get_device_properties(index)
    architecture = getattr(properties, "gcnArchName", "").split(":")[0]
    return GpuFacts(
        index=index,
        name=properties.name,
        capability=architecture if torch.version.hip else f"{properties.major}.{properties.minor}",
        memory_gb=properties.total_memory / 1e9,
        processors=properties.multi_processor_count,
        reaches=tuple(index == other or torch.cuda.can_device_access_peer(index, other) for other in range(count)),
    )
