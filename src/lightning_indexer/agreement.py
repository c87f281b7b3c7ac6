# SPDX-License-Identifier: Apache-2.0
"""Host-side agreement of the ranks of a group: small messages to all, and a word on whoever is missing or differs.

A step on CPU ranks begins with one such round. It is what turns the failures of a distributed step into errors: a rank whose
arguments are wrong says so instead of leaving the others in a collective, and a rank that does not come is named.
"""

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MESSAGE_BYTES = 4096
MAX_ERROR_CHARACTERS = 320  # of which JSON makes at most 12 bytes each
GRACE = timedelta(milliseconds=200)  # for the other ranks once one has been waited for in vain

Message = dict[str, Any]


def gather_messages(message: Message, group: dist.ProcessGroup, timeout: timedelta | None) -> list[Message]:
    """Every rank's message, by rank inside the group.

    Args:
        message: what this rank says, at most 4 KiB as JSON.
        group: its backend carries CPU tensors point to point (gloo); with NCCL or RCCL an object gather is used and the
            group's own watchdog bounds the wait.
        timeout: bound for the wait; None takes the group's own.

    Raises:
        RuntimeError: ranks that did not arrive in time or whose connection broke, by number.
    """
    if dist.get_backend(group) == "nccl":
        messages: list[Message] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(messages, message, group=group)
        return messages
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    text = json.dumps(message).encode()
    sent = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = torch.empty(world, MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    received[rank] = sent
    peers = [peer for peer in range(world) if peer != rank]
    missing: dict[int, str] = {}
    arrivals: dict[int, dist.Work | None] = {}
    departures: dict[int, dist.Work | None] = {}
    for peer in peers:
        try:
            arrivals[peer] = dist.irecv(received[peer], group=group, group_src=peer)
            departures[peer] = dist.isend(sent, group=group, group_dst=peer)
        except RuntimeError as error:
            missing[peer] = str(error)
    for works in (arrivals, departures):
        for peer, work in works.items():
            try:
                _wait(work, GRACE if missing else timeout)
            except RuntimeError as error:
                missing.setdefault(peer, str(error))
    if missing:
        reasons = "; ".join(f"rank {peer}: {reason.splitlines()[0]}" for peer, reason in sorted(missing.items()))
        raise RuntimeError(f"rank {rank} of {world} waited in vain for rank {_names(sorted(missing))} ({reasons})")
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in received]


def require_agreement(subject: str, messages: list[Message]) -> None:
    """Raise on every rank alike if a rank reports an error or its fields differ from rank 0's.

    Args:
        subject: what is being agreed on, for the error text.
        messages: from `gather_messages`, each with "error" (None or a text) and fields to compare.

    Raises:
        ValueError: each rank that reported an error with its text; or each field that differs, with ranks and values.
    """
    failed = [f"rank {rank}: {message['error']}" for rank, message in enumerate(messages) if message["error"] is not None]
    if failed:
        raise ValueError(f"{subject}: {'; '.join(failed)}")
    differing = []
    for field in {field: None for message in messages for field in message}:
        values: dict[str, list[int]] = {}
        for rank, message in enumerate(messages):
            values.setdefault(json.dumps(message.get(field)), []).append(rank)
        if len(values) > 1:
            told = ", ".join(f"{value} on rank {_names(ranks)}" for value, ranks in values.items())
            differing.append(f"{field}: expected the same on every rank, got {told}")
    if differing:
        raise ValueError(f"{subject}: {'; '.join(differing)}")


def _wait(work: dist.Work | None, timeout: timedelta | None) -> None:
    assert work is not None  # None is for processes outside the group
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)


def _names(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
