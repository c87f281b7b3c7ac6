# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group as the indexer sees them: who they are, how they tell each other things, how they share memory.

`ProcessRanks` are processes of a torch.distributed group, `VirtualRank`s live in one process and share a device: for tests and
measurements of P ranks on one GPU.
"""

import base64
import inspect
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from lightning_indexer.agreement import MAX_ERROR_CHARACTERS, Message, gather_messages
from lightning_indexer.checks import check_int, require

Result = TypeVar("Result")

VIRTUAL_TIMEOUT = timedelta(seconds=60)
# Place of the device among the arguments that a CUDA tensor is rebuilt from.
REBUILD_DEVICE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


class UnmappedError(RuntimeError):
    """Memory of one rank cannot be mapped by another."""


class Ranks(Protocol):
    """A group, seen from one of its ranks."""

    rank: int
    world: int

    def gather(self, message: Message, timeout: timedelta | None) -> list[Message]:
        """Every rank's message, by rank; RuntimeError names the ranks that did not come in time."""

    def share(self, tensor: torch.Tensor, timeout: timedelta | None) -> list[torch.Tensor]:
        """Every rank's tensor, by rank, as memory that this process can read and write on its device.

        Raises:
            UnmappedError: on every rank, if one cannot map another's.
        """


class ProcessRanks:
    """Processes of a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather(self, message: Message, timeout: timedelta | None) -> list[Message]:
        """As `Ranks.gather`."""
        return gather_messages(message, self.group, timeout)

    def share(self, tensor: torch.Tensor, timeout: timedelta | None) -> list[torch.Tensor]:
        """As `Ranks.share`: CUDA or HIP IPC handles, over the group's CPU side. All processes run on one host."""
        shared, failure = [], None
        try:
            handle = base64.b64encode(pickle.dumps(reduce_tensor(tensor)[1])).decode()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            handle, failure = "", str(error)
        for rank, message in enumerate(self.gather({"handle": handle}, timeout)):
            if rank == self.rank:  # a process must not open its own handle
                shared.append(tensor)
            elif message["handle"]:
                arguments = list(pickle.loads(base64.b64decode(message["handle"])))
                # Opened as memory of this rank's GPU, which then may reach it wherever it lies.
                arguments[REBUILD_DEVICE] = tensor.device.index
                try:
                    shared.append(rebuild_cuda_tensor(*arguments))  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    failure = str(error)
        told = self.gather({"failure": failure and failure.splitlines()[0][:MAX_ERROR_CHARACTERS]}, timeout)
        failures = [f"rank {rank}: {message['failure']}" for rank, message in enumerate(told) if message["failure"]]
        if failures:
            raise UnmappedError(f"memory of another rank could not be mapped ({'; '.join(failures)})")
        return shared


class VirtualRank:
    """One of several ranks of the same process; see `virtual_ranks`."""

    def __init__(self, rank: int, world: int, table: "_Table") -> None:
        self.rank = rank
        self.world = world
        self._table = table

    def gather(self, message: Message, timeout: timedelta | None) -> list[Message]:
        """As `Ranks.gather`; the ranks call it from threads of their own."""
        return self._table.gather(self.rank, message, timeout)

    def share(self, tensor: torch.Tensor, timeout: timedelta | None) -> list[torch.Tensor]:
        """As `Ranks.share`: the tensors themselves."""
        return [message["tensor"] for message in self.gather({"tensor": tensor}, timeout)]


class _Table:
    """Where the threads of virtual ranks lay down messages, round by round."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.rounds = [0] * world  # that each rank has begun
        self.messages: dict[int, dict[int, Any]] = {}

    def gather(self, rank: int, message: Message, timeout: timedelta | None) -> list[Message]:
        with self.changed:
            number = self.rounds[rank]
            self.rounds[rank] += 1
            laid = self.messages.setdefault(number, {})
            laid[rank] = message
            self.changed.notify_all()
            limit = (timeout or VIRTUAL_TIMEOUT).total_seconds()
            if not self.changed.wait_for(lambda: len(laid) == self.world, limit):
                missing = ", ".join(str(other) for other in range(self.world) if other not in laid)
                raise RuntimeError(f"rank {rank} of {self.world} waited in vain for rank {missing}")
            self.messages.pop(number - 1, None)  # all have begun this round, so all have read the one before
            return [laid[other] for other in range(self.world)]


def virtual_ranks(world: int) -> list[VirtualRank]:
    """`world` ranks of this process, to give to `ContextParallelIndexer` as its group, each in its own thread.

    Construction and warm-up are collective, so they need a thread per rank (`run_virtual`); steps do not wait on the host, so
    that one thread can queue them all, each rank's on a stream of its own. Ranks must not share a hardware queue: for more
    than 8 streams in all set `CUDA_DEVICE_MAX_CONNECTIONS` (up to 32) before CUDA starts. No kernel may be loaded for the
    first time while a rank waits.

    Raises:
        ValueError: `world` below 1.
    """
    check_int("world", world, 1)
    table = _Table(world)
    return [VirtualRank(rank, world, table) for rank in range(world)]


def run_virtual(world: int, work: Callable[[VirtualRank], Result]) -> list[Result]:
    """What `work` returns for each of `world` new virtual ranks, in a thread each.

    Raises:
        Exception: the first one that a rank raised.
    """
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(ranks: VirtualRank) -> None:
        try:
            results[ranks.rank] = work(ranks)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in virtual_ranks(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world)]


def ranks_of(group: "dist.ProcessGroup | Ranks | None") -> Ranks | None:
    """The ranks of a group; None is the default process group, or None again if there is none.

    Raises:
        ValueError: a group that this process is not in.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return None
    member = "a group that this process is in", "one that it is not in"
    if isinstance(group, dist.ProcessGroup):
        require(dist.get_rank(group) >= 0, "group", *member)
        return ProcessRanks(group)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # what `new_group` gives the others
    require(group is not outside, "group", *member)
    known = all(hasattr(group, name) for name in ("rank", "world", "gather", "share"))
    require(known, "group", "a process group, a virtual rank or None", type(group).__name__)
    return group


def gpu_name(device: torch.device) -> str:
    """A name of a GPU that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)
