# SPDX-License-Identifier: Apache-2.0
"""What GPU types can do, each figure with its source."""

import re
from dataclasses import dataclass

from lightning_indexer.checks import require
from lightning_indexer.plan.figure import MEASURED, MODELLED

# Of the published memory bandwidth, what a kernel that only reads reaches: 4.592 of 4.8 TB/s on an H200
# (decode-h200-2026-11-30.json). Assumed of every GPU without a measured roof.
READABLE = 0.957


@dataclass(frozen=True)
class Gpu:
    """One GPU type.

    Args:
        name: for people.
        vendor: "nvidia" or "amd".
        memory_gb: of memory, in 10^9 bytes.
        peak_tbps: published memory bandwidth, TB/s.
        matrix_tflops: published bf16 matrix rate without sparsity, TFLOP/s.
        source: of these three.
        measured_tbps: read roof, TB/s, where this project measured one.
        measured_in: the result file that holds it.
    """

    name: str
    vendor: str
    memory_gb: float
    peak_tbps: float
    matrix_tflops: float
    source: str
    measured_tbps: float | None = None
    measured_in: str = ""

    @property
    def read_tbps(self) -> float:
        """Read roof, TB/s: measured, or `READABLE` of the published bandwidth."""
        return READABLE * self.peak_tbps if self.measured_tbps is None else self.measured_tbps

    @property
    def read_standing(self) -> str:
        """What the read roof rests on."""
        return MODELLED if self.measured_tbps is None else MEASURED

    @property
    def read_formula(self) -> str:
        """Where the read roof comes from."""
        if self.measured_tbps is None:
            return f"{READABLE} x {self.peak_tbps} TB/s ({self.source})"
        return self.measured_in


GPUS = {
    "a100": Gpu("A100 SXM 80GB", "nvidia", 80, 2.039, 312, "NVIDIA A100 80GB data sheet, 2021"),
    "h100": Gpu("H100 SXM", "nvidia", 80, 3.35, 989, "NVIDIA H100 data sheet, 2023"),
    "h200": Gpu("H200 SXM", "nvidia", 141, 4.8, 989, "NVIDIA H200 data sheet, 2024", 4.592, "decode-h200-2026-11-30.json"),
    "b200": Gpu("B200 SXM", "nvidia", 180, 8.0, 2250, "NVIDIA HGX B200 data sheet, 2025"),
    "b300": Gpu("B300 SXM", "nvidia", 288, 8.0, 2250, "NVIDIA Blackwell Ultra data sheet, 2025"),
    "mi300x": Gpu("Instinct MI300X", "amd", 192, 5.3, 1307, "AMD Instinct MI300X data sheet, 2023"),
    "mi355x": Gpu("Instinct MI355X", "amd", 288, 8.0, 2500, "AMD Instinct MI355X data sheet, 2025"),
}

# Words in a device's name that make it another type than the table's: less power, less bandwidth, or a part of one.
VARIANTS = frozenset(("pcie", "nvl", "mig"))


def gpu(name: str) -> Gpu:
    """The GPU type of that name, in any case.

    Raises:
        ValueError: there is none.
    """
    known = name.lower()
    require(known in GPUS, "gpu", "one of " + ", ".join(GPUS), repr(name))
    return GPUS[known]


def gpu_of_device(device: str) -> Gpu | None:
    """The GPU type of a device's name, such as "NVIDIA H200" or "NVIDIA A100-SXM4-80GB"; None if the table has none.

    A type is a whole word of the name. `VARIANTS` and sizes of memory other than the table's are other types.
    """
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    known = next((known for name, known in GPUS.items() if name in words), None)
    if known is None or words & VARIANTS:
        return None
    sizes = {float(size[1]) for word in words if (size := re.fullmatch(r"(\d+)gb", word))}
    return known if sizes <= {known.memory_gb} else None
