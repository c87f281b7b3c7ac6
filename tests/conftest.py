# SPDX-License-Identifier: Apache-2.0
"""Shared test settings and helpers."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests fork ranks: a child must not wait for its parent's threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


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
