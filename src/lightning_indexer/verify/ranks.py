# SPDX-License-Identifier: Apache-2.0
"""Real ranks on one machine: processes that form a group, over gloo or with a GPU each."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

Result = TypeVar("Result")


def run_ranks(
    world: int, work: Callable[[int], Result], *, timeout: float = 120.0, start_method: str = "fork", gpus: bool = False
) -> list[Result]:
    """What `work(rank)` returns on each of `world` new processes that are the default group.

    Args:
        world: processes.
        work: called with the rank; what it returns is pickled back.
        timeout: seconds, of the group.
        start_method: "fork": `work` may use anything that this process holds, without a copy; "spawn": it is pickled, and
            this process may have used a GPU.
        gpus: rank r has the GPU of that number as its current one, and the group carries tensors of GPUs by NCCL or RCCL.

    Raises:
        Exception: the first rank's error, with its traceback; the other ranks are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, work, folder, timeout, gpus)
        start_processes(_enter, arguments, nprocs=world, start_method=start_method)  # type: ignore[no-untyped-call]
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(world)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"


def _enter(rank: int, world: int, work: Callable[[int], Any], folder: str, timeout: float, gpus: bool) -> None:
    torch.set_num_threads(1)  # a forked child must not touch the thread pool of its parent: it can hang
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    torch.save(work(rank), _result(folder, rank))
    dist.destroy_process_group()
