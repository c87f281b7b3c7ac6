# SPDX-License-Identifier: Apache-2.0
"""Shared test settings and helpers."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests fork ranks: a child must not wait for its parent's threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # up to 16 ranks wait for each other on one GPU

import pytest
import torch
from compiling import COMPILING, Compiling
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run on CPU tensors

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA or HIP device")
    config.addinivalue_line("markers", "multigpu: needs several CUDA or HIP devices of one host")
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which need not be there")


def _compiles(item: pytest.Item) -> bool:
    return item.path.name == "test_compile.py"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiling takes minutes, of cores that the other tests leave idle: it begins now, and is looked at last."""
    if any(map(_compiles, session.items)) and not session.config.option.collectonly:
        session.config.stash[COMPILING] = Compiling()


def pytest_unconfigure(config: pytest.Config) -> None:
    if COMPILING in config.stash:
        config.stash[COMPILING].stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_compiles)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA or HIP device"))


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin return NaN and a wild integer: code that reads what it never wrote is found out."""
    sentinel = {torch.int32: -(2**30) - 7, torch.int64: -(2**60) - 7, torch.uint8: 0xA5}

    def poisoned(make):
        def empty(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(sentinel.get(made.dtype, float("nan") if made.is_floating_point() else 0))

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
