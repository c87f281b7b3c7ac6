# SPDX-License-Identifier: Apache-2.0
"""What a vLLM wheel needs on a CPU: its requirements without the GPU's libraries, one a line.

python requirements.py vllm-0.33.0-....whl > requirements.txt
"""

import sys
import zipfile
from email.parser import HeaderParser

GPU_ONLY = (
    "torch",  # pinned to a CUDA build; the tests bring one for the CPU
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer",
    "humming-kernels",
    "instanttensor",
    "nvidia-",
    "nvtx",
    "opencv",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed",
)


def requirements(wheel: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    wanted = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return [line for line in wanted if not line.lower().startswith(GPU_ONLY)]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
