# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel that the library launches for GPUs that are not there, and say what each takes of the hardware.

Launches are recorded, not made: the library's own functions are called with CPU tensors under a target's facts, and what they
would have launched is compiled. Not in a process with TRITON_INTERPRET. As a script: `compile_kernels.py [target ...]`.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import lightning_indexer as li
from lightning_indexer import ops, peer, policy, triton_backend, workspace
from lightning_indexer.rows import Chunks
from lightning_indexer.spec import IndexerSpec, Shard

# Bytes of stack on sm_90. The prefill kernel is held to 128 registers so that two programs fit a multiprocessor, and
# spills this much in its final sort; without the limit it is 20 % slower (docs/performance.md). The others put a few addresses
# there, outside their loops.
STACK_ALLOWED = {"prefill_kernel": 64, "merge_splits_kernel": 8, "exchange_kernel": 24}
# With keys of 8 bits and less, the same limit costs the prefill kernel some more, and lets four programs of the scorer onto a
# multiprocessor; it puts a little there for its sort, which runs once in 16 pages.
PACKED_STACK_ALLOWED = {"prefill_kernel": 424, "score_kernel": 128}

KIB = 1024


@dataclass(frozen=True)
class Target:
    gpu: GPUTarget
    facts: policy.DeviceFacts
    shared: int  # bytes that a program can have


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), policy.DeviceFacts("nvidia", (8, 0), 108), 163 * KIB),
    "sm_90": Target(GPUTarget("cuda", 90, 32), policy.DeviceFacts("nvidia", (9, 0), 132), 227 * KIB),
    "sm_100": Target(GPUTarget("cuda", 100, 32), policy.DeviceFacts("nvidia", (10, 0), 148), 227 * KIB),
    "sm_120": Target(GPUTarget("cuda", 120, 32), policy.DeviceFacts("nvidia", (12, 0), 170), 99 * KIB),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), policy.DeviceFacts("amd", (9, 4), 304), 64 * KIB),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), policy.DeviceFacts("amd", (9, 5), 256), 160 * KIB),
}
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Call:
    """A call of the library, by what decides which kernels it launches."""

    kind: str  # "decode", "keys", "scores", "plan", "select", "merge", "prefill", "prefill of ranks"
    heads: int = 4
    query_len: int = 1
    planned: bool = False
    table: int = 0  # attention page size of a sparse table
    order: str = "score"
    longest: int = 1 << 17
    rows: int = 64  # of prefill
    spec: IndexerSpec = IndexerSpec()  # noqa: RUF009
    dtype: torch.dtype = torch.bfloat16  # of the queries
    format: str | None = None  # of the cache; None for the queries' own
    scaled: bool = False
    sole: bool = False  # every rank of "peer" has a GPU to itself
    by: str = "block"

    def make(self) -> None:
        """Make the call, under the facts of a target and with launches recorded."""
        spec, shard, others = self.spec, Shard(), Shard(1, 2, self.by)
        seq_lens = torch.ones(2, dtype=torch.int32)
        block_table = torch.zeros(2, 1, dtype=torch.int32)
        rows = self.rows if self.kind.startswith("prefill") else 2 * self.query_len
        q = torch.zeros(rows, self.heads, spec.head_dim, dtype=self.dtype)
        cache = self.cache()
        ids = torch.zeros(self.heads, rows, spec.topk, dtype=torch.int32)
        keys = torch.zeros(2, self.heads, rows, spec.topk, dtype=torch.int64)
        scores = torch.zeros(self.heads, rows, 1)
        sparse = None
        if self.table:
            parts = spec.block_size // self.table
            out = torch.zeros(self.heads, rows, spec.topk * parts, dtype=torch.int32)
            held = torch.zeros(self.heads, rows, dtype=torch.int32)
            sparse = li.SparseTable(block_table, out, held, self.table, parts)
        plan = None
        if self.by == "page":
            plan = ops.make_plan(seq_lens, spec, self.longest, self.order, others, None, False, None, block_table)
        elif self.planned or self.kind == "plan":
            plan = li.plan_step(seq_lens, spec=spec, max_seq_len=self.longest)
        step = (q, cache, block_table, seq_lens, spec, self.query_len, self.longest)
        if self.kind == "decode":
            triton_backend.decode(*step, self.order, sparse, ids, plan, None)
        elif self.kind == "keys":
            triton_backend.decode_keys(*step, others, "score", keys[0], plan, None)
        elif self.kind == "scores":
            triton_backend.score_blocks(*step, others if self.by == "page" else shard, scores, plan)
        elif self.kind == "select":
            owners = (others, keys[0], block_table) if self.by == "page" else (shard, keys[0], None)
            triton_backend.select_keys(scores, seq_lens, spec, self.query_len, *owners)
        elif self.kind == "merge":
            triton_backend.merge_keys(keys, seq_lens, spec, self.query_len, self.order, sparse, ids)
        elif self.kind == "write":
            keys = torch.zeros(self.rows, spec.head_dim, dtype=torch.bfloat16)
            triton_backend.write(cache, keys, torch.zeros(self.rows, dtype=torch.int64))
        elif self.kind == "norm":
            projected = torch.zeros(self.rows, self.heads + 1, spec.head_dim, dtype=torch.bfloat16)
            rules = li.NormRope(*torch.zeros(2, spec.head_dim, dtype=torch.bfloat16), rotary_dim=spec.head_dim // 2)
            slots, out = torch.zeros(self.rows, dtype=torch.int64), torch.zeros(self.rows, self.heads, spec.head_dim)
            given = projected[:, :-1], projected[:, -1], cache, slots, slots.int(), rules, out.to(self.dtype)
            triton_backend.norm_rope_write(*given)
        elif self.kind == "peer":
            self.exchange(q, cache, block_table, seq_lens)
        elif self.kind == "prefill":
            bounds = torch.tensor([0, 1, rows], dtype=torch.int32)
            triton_backend.prefill(*step[:3], bounds, seq_lens, spec, self.longest, self.order, ids, None)
        elif self.kind == "prefill of ranks":
            bounds = torch.tensor([0, 1, rows], dtype=torch.int32)
            chunks, ranks = Chunks(bounds, seq_lens, self.longest), Alone(self.sole)
            transport = peer.PeerTransport(spec, ranks, rows, q.device, timedelta(seconds=1), None)
            own = slice(transport.owned.start, transport.owned.stop)
            shard = Shard(ranks.rank, ranks.world, self.by)
            transport.prefill(q[:, own], cache, block_table, chunks, shard, None, self.order, ids[own], False)

    def cache(self) -> li.IndexCache:
        """Of one page."""
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", E4M3: "fp8", FNUZ: "fp8_fnuz"}
        cache = li.IndexCache.empty(1, self.spec, self.format or names[self.dtype])
        scale = torch.ones(1, self.spec.block_size) if self.scaled else None
        return li.IndexCache.wrap(cache.data, self.spec, cache.format.name, scale)

    def exchange(self, q: torch.Tensor, cache: li.IndexCache, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """One rank of four, which shares a step if it is long."""
        spec, ranks = self.spec, Alone(self.sole)
        transport = peer.PeerTransport(spec, ranks, len(q), q.device, timedelta(seconds=1), None)
        shard, threshold = Shard(ranks.rank, ranks.world, self.by), 7 if self.planned else None
        plan = ops.make_plan(seq_lens, spec, self.longest, self.order, shard, threshold, False, None, block_table)
        scratch = workspace.Workspace(spec, max_requests=2, max_columns=self.query_len * self.heads, device=q.device)
        own = q[:, : len(transport.owned)]
        ids = torch.zeros(own.shape[1], len(q), spec.topk, dtype=torch.int32)
        sparse = li.SparseTable.empty(spec, own.shape[1], len(q), self.table, block_table) if self.table else None
        rest = (spec, self.query_len, self.longest, self.order, sparse, ids, plan, scratch, False)
        transport.decode(own, cache, block_table, seq_lens, *rest)


class Alone:
    """A rank that hears itself in the others' place; they have other GPUs, or the same."""

    rank, world = 1, 4

    def __init__(self, sole: bool) -> None:
        self.sole = sole

    def gather(self, message: dict, timeout: timedelta) -> list[dict]:
        return [
            {**message, "device": f"GPU {rank}"} if self.sole and rank != self.rank else message for rank in range(self.world)
        ]

    def share(self, tensor: torch.Tensor, timeout: timedelta) -> list[torch.Tensor]:
        return [tensor] * self.world


def heads_and_rows(columns: int) -> dict[str, int]:
    """A call of `columns` query columns per request: 4 heads, if there are as many."""
    return {"heads": min(columns, 4), "query_len": max(1, columns // 4)}


MERGES = [
    Call("plan"),
    Call("select"),
    Call("merge"),
    Call("merge", order="block", table=16),
]
PREFILLS = [
    Call("prefill", rows=64),  # few tiles: the context is split
    Call("prefill", rows=1 << 15),
    Call("prefill", rows=64, order="block"),
]
PEERS = [
    Call("peer"),
    Call("peer", planned=True, query_len=4, sole=True),
    Call("peer", planned=True, query_len=16, order="block", table=16, sole=True),
]
# Over a cache that a group holds once.
BY_PAGE = [
    Call("peer", by="page"),
    Call("keys", by="page"),
    Call("scores", by="page"),
    Call("select", by="page"),
    Call("keys", by="page", format="fp8", dtype=E4M3),
    Call("keys", by="page", format="nvfp4"),
    Call("prefill of ranks", by="page"),
]
# What MiniMax-M3 launches.
FULL = [
    *(Call(kind, **heads_and_rows(columns)) for kind in ("decode", "scores") for columns in (1, 4, 16, 64)),
    *(Call("decode", planned=True, order="block", table=16, **heads_and_rows(columns)) for columns in (4, 64)),
    Call("keys"),
    *MERGES,
    *PREFILLS,
    *PEERS,
    *BY_PAGE,
]
BRIEF = [
    Call("decode", **heads_and_rows(64)),
    Call("decode", planned=True, order="block", table=16),
    *(Call("scores", **heads_and_rows(columns)) for columns in (1, 4, 16)),
    *MERGES,
    *PREFILLS[:2],
    PEERS[1],
    BY_PAGE[2],
]
GEOMETRIES = [
    (IndexerSpec(topk=64), torch.bfloat16),
    (IndexerSpec(topk=1, block_size=64, head_dim=64), torch.float16),
    (IndexerSpec(topk=16, block_size=256), torch.bfloat16),
]
MANY = 100_000  # keys to write
WRITES = [
    *(Call("write", format=format, rows=rows) for format in ("bf16", "fp8", "nvfp4") for rows in (1, MANY)),
    Call("write", format="fp8", scaled=True, rows=1),
    Call("norm", format="bf16", rows=1),
    Call("norm", format="fp8", dtype=E4M3, rows=MANY),
    Call("norm", format="nvfp4", dtype=E4M3, rows=1),
]
PACKED = [
    *(
        Call(kind, format=format, dtype=dtype, **heads_and_rows(columns))
        for format in ("fp8", "nvfp4")
        for dtype in (torch.bfloat16, E4M3)
        for kind, columns in (("decode", 1), ("scores", 64))
    ),
    Call("prefill", format="fp8", dtype=E4M3),
    Call("prefill", format="nvfp4"),
    Call("decode", format="nvfp4", planned=True, order="block", table=16),
    Call("decode", format="fp8", scaled=True),
    Call("decode", format="nvfp4", spec=GEOMETRIES[1][0]),
    Call("prefill", format="nvfp4", spec=GEOMETRIES[2][0]),
    Call("peer", format="fp8", dtype=E4M3, planned=True, sole=True),
    *WRITES,
]
# What has no e4m3 of its own, or another one.
PACKED_PORTABLY = [Call(kind, format=format) for format in ("fp8", "nvfp4") for kind in ("decode", "prefill")]
OTHERS = [
    Call(kind, spec=spec, dtype=dtype, **rest)
    for spec, dtype in GEOMETRIES
    for kind, rest in (("decode", {}), ("scores", {"query_len": 16}), ("prefill", {"rows": 64}))
]
CALLS = {
    "sm_80": BRIEF + PACKED_PORTABLY + WRITES[::3],
    "sm_90": FULL + OTHERS + PACKED,
    "sm_100": BRIEF + PACKED[::4],
    "sm_120": BRIEF + PACKED[1::4],
    "gfx942": [
        *BRIEF,
        Call("keys"),
        *PACKED_PORTABLY,
        *(Call(kind, dtype=FNUZ) for kind in ("decode", "prefill", "peer", "norm")),
        Call("write", format="fp8_fnuz", rows=1),
        Call("prefill of ranks", order="block"),
    ],
    "gfx950": [*BRIEF, *PACKED_PORTABLY, *WRITES[::3], *(Call(kind, dtype=E4M3) for kind in ("decode", "prefill"))],
}


@dataclass(frozen=True)
class Launch:
    """A recorded launch, as the compiler takes it."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel and those of its constants that are not merely sizes of the geometry."""
        told = (f"{name}={value}" for name, value in self.constants if name.isupper())
        return f"{self.kernel.__name__} {' '.join(told)}"


def record(kernel: JITFunction, arguments: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """What Triton would compile for a launch, by its rules of specialisation."""
    bound = {**dict(zip(kernel.arg_names, arguments, strict=False)), **named}
    signature, constants, aligned = {}, {}, []
    for parameter in kernel.params:
        value = bound.pop(parameter.name)
        special = not parameter.do_not_specialize
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                aligned.append(parameter.name)
        elif special and value == 1:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if special and value % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                aligned.append(parameter.name)
    options = tuple(sorted((name, value) for name, value in bound.items() if name not in ("grid", "warmup")))
    return Launch(kernel, tuple(signature.items()), tuple(constants.items()), tuple(aligned), options)


def launches(target: Target, calls: list[Call]) -> list[Launch]:
    """All different launches that some calls make on a target."""
    found: dict[Launch, None] = {}

    def run(kernel: JITFunction, *arguments: Any, **named: Any) -> None:
        found[record(kernel, arguments, named)] = None

    facts = mock.Mock(return_value=target.facts)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(ops, "backend_of", return_value=triton_backend),
        mock.patch.object(ops, "device_facts", facts),
        mock.patch.object(triton_backend, "device_facts", facts),
        mock.patch.object(workspace, "device_facts", facts),
        mock.patch.object(peer, "device_facts", facts),
    ):
        for call in calls:
            call.make()
    return list(found)


def build(target: Target, launch: Launch) -> dict[str, Any]:
    """Compile a launch; registers, stack and shared bytes, spills, seconds, and whether it waits for the kernel before."""
    begun = time.perf_counter()
    fn = launch.kernel
    attributes = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    source = ASTSource(fn=fn, signature=dict(launch.signature), constexprs=dict(launch.constants), attrs=attributes)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a failure prints all of the assembly
            kernel = triton.compile(source, target=target.gpu, options=dict(launch.options))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        reason = next((line for line in lines if "fatal" in line), lines[-1])
        return {"error": f"{type(error).__name__}: {reason}"}
    usage = cuda_usage(kernel.asm["cubin"]) if target.gpu.backend == "cuda" else hip_usage(kernel.asm["amdgcn"])
    waits = target.gpu.backend == "cuda" and "griddepcontrol.wait" in kernel.asm["ptx"]
    return {**usage, "shared": kernel.metadata.shared, "waits": waits, "seconds": time.perf_counter() - begun}


def cuda_usage(cubin: bytes) -> dict[str, int]:
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return {"registers": registers, "stack": stack, "spills": 0, "scalars": 0}


def hip_usage(assembly: str) -> dict[str, int]:
    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly).group(1))

    return {
        "registers": count("vgpr_count"),
        "stack": count("private_segment_fixed_size"),
        "spills": count("vgpr_spill_count"),
        "scalars": count("sgpr_spill_count"),  # kept in lanes of vector registers: told, no fault
    }


def _build_one(job: tuple[str, int]) -> dict[str, Any]:
    name, number = job
    launch = launches(TARGETS[name], CALLS[name])[number]
    told = {"target": name, "launch": launch.name, "pdl": dict(launch.options).get("launch_pdl", False)}
    return {**told, **build(TARGETS[name], launch)}


def build_all(names: list[str], processes: int = 2) -> list[dict[str, Any]]:
    """Compile everything for some targets."""
    jobs = [(name, number) for name in names for number in range(len(launches(TARGETS[name], CALLS[name])))]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_build_one, jobs))


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled launch."""
    if "error" in row:
        return [row["error"]]
    found = []
    limit = TARGETS[row["target"]].shared
    if row["shared"] > limit:
        found.append(f"{row['shared']} bytes of shared memory, of {limit}")
    packed = any(f"FORMAT={format}" in row["launch"] for format in ("fp8", "nvfp4"))
    stacks = STACK_ALLOWED | (PACKED_STACK_ALLOWED if packed else {})
    allowed = stacks.get(row["launch"].split()[0], 0) if row["target"] == "sm_90" else 0
    if row["target"] in ("sm_90", "gfx942", "gfx950") and (row["stack"] > allowed or row["spills"]):
        found.append(f"spills: stack {row['stack']} bytes, {row['spills']} registers")
    if row["waits"] != row["pdl"]:
        found.append("waits for the kernel before, launched without PDL" if row["waits"] else "does not wait, with PDL")
    return found


def report(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'target':8} {'regs':>5} {'stack':>5} {'spills':>6} {'scalars':>7} {'shared':>7} {'s':>5}  launch"]
    for row in rows:
        numbers = [row.get(name, "-") for name in ("registers", "stack", "spills", "scalars", "shared")]
        told = " ".join(f"{number:>{width}}" for number, width in zip(numbers, (5, 5, 6, 7, 7), strict=True))
        wrong = "".join(f"  <- {fault}" for fault in faults(row))
        lines.append(f"{row['target']:8} {told} {row.get('seconds', 0):5.1f}  {row['launch']}{wrong}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    path = arguments[arguments.index("--json") + 1] if "--json" in arguments else None
    names = [argument for argument in arguments if argument in TARGETS] or list(TARGETS)
    rows = build_all(names)
    print(f"Triton {triton.__version__}\n{report(rows)}")
    if path is not None:
        pathlib.Path(path).write_text(json.dumps([{**row, "faults": faults(row)} for row in rows]))
    return 1 if any(faults(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
