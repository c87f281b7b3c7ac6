# SPDX-License-Identifier: Apache-2.0
"""Settings for tests that import vLLM: its CUDA wheel on a CPU, its Triton kernels through the interpreter.

They run in an environment of their own (`make test-vllm`); elsewhere they are not collected.
"""

import importlib.util
import os

collect_ignore_glob = []

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_*.py")
else:
    os.environ |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",  # vLLM then takes Triton without a driver
        "TRITON_INTERPRET": "1",
        "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",  # to choose one would take a driver
        "VLLM_NO_USAGE_STATS": "1",
    }
