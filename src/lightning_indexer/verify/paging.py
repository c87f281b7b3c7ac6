# SPDX-License-Identifier: Apache-2.0
"""What the model captures share: running a model as an engine does, and laying out its keys as an engine's pages.

Block and position numbers are the model's; page numbers are physical and mean nothing by themselves.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

Progress = Callable[[str, int, int], None]  # label, tokens done, tokens in all
SPARE_PAGES = 3
SPARE_COLUMNS = 2
OUT_OF_CACHE = 2**31 - 1


def page_keys(
    keys: torch.Tensor, block_size: int, generator: torch.Generator, spare: int = SPARE_PAGES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put keys `[n, D]` into shuffled pages; every slot without a key is NaN, so a reader that touches it is found out.

    Returns `pages` `[ceil(n / block_size) + spare, block_size, D]` and `page_of_block` `[ceil(n / block_size)]` int32.
    """
    tokens, head_dim = keys.shape
    blocks = -(-tokens // block_size)
    page_of_block = torch.randperm(blocks + spare, generator=generator)[:blocks]
    position = torch.arange(tokens)
    slots = page_of_block[position // block_size] * block_size + position % block_size
    pages = keys.new_full((blocks + spare, block_size, head_dim), float("nan"))
    pages.view(-1, head_dim)[slots] = keys
    return pages, page_of_block.to(torch.int32)


def block_tables(
    page_of_block: torch.Tensor, seq_lens: torch.Tensor, block_size: int, generator: torch.Generator
) -> torch.Tensor:
    """Block tables `[R, blocks + spare columns]` int32 of requests that are prefixes of one text.

    Columns past the blocks that a request sees hold -1 or a page far outside the cache.
    """
    width = len(page_of_block) + SPARE_COLUMNS
    visible = -(-seq_lens // block_size)
    garbage = torch.tensor([-1, OUT_OF_CACHE], dtype=torch.int32)
    table = garbage[torch.randint(2, (len(seq_lens), width), generator=generator)]
    pages = torch.nn.functional.pad(page_of_block, (0, SPARE_COLUMNS), value=-1)
    return torch.where(torch.arange(width) < visible[:, None], pages, table)


@dataclass
class Trace:
    """What one module computed, chunk by chunk: keys of every token, queries and output of the wanted positions."""

    keys: list[torch.Tensor] = field(default_factory=list)  # [Hk, tokens, D]
    queries: list[torch.Tensor] = field(default_factory=list)  # [Hq, wanted, D]
    outputs: list[torch.Tensor] = field(default_factory=list)  # [Hq, wanted, ...], if the module returns one tensor
    wanted: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # rows of the current chunk
    tokens: int = 0


@contextmanager
def trace_rope(
    modeling: ModuleType, modules: Mapping[int, torch.nn.Module], positions: torch.Tensor
) -> Iterator[dict[int, Trace]]:
    """Record the post-RoPE queries and keys, and the output, of some modules of a transformers model.

    Nothing can be hooked between RoPE and the scores, so the `apply_rotary_pos_emb` of the `modeling` file is wrapped
    while the context is open. `positions` `[T]` are the tokens whose queries and outputs are kept, ascending.
    """
    traces = {key: Trace() for key in modules}
    active: list[Trace] = []
    apply_rope = modeling.apply_rotary_pos_emb

    def recording_rope(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = apply_rope(*args, **kwargs)
        if active:
            _record(active[-1], q[0], k[0], positions)
        return q, k

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        trace = active.pop()
        if isinstance(output, torch.Tensor):
            trace.outputs.append(output[0][:, trace.wanted])

    handles = []
    try:
        for key, module in modules.items():
            handles.append(module.register_forward_pre_hook(lambda module, args, key=key: active.append(traces[key])))
            handles.append(module.register_forward_hook(leave))
        modeling.apply_rotary_pos_emb = recording_rope  # type: ignore[attr-defined]
        yield traces
    finally:
        modeling.apply_rotary_pos_emb = apply_rope  # type: ignore[attr-defined]
        for handle in handles:
            handle.remove()


def _record(trace: Trace, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
    first, trace.tokens = trace.tokens, trace.tokens + k.shape[1]
    trace.wanted = positions[(positions >= first) & (positions < trace.tokens)] - first
    trace.keys.append(k.clone())
    trace.queries.append(q[:, trace.wanted])


def feed(
    model: torch.nn.Module, cache: Any, tokens: torch.Tensor, context: int, chunk: int, label: str, progress: Progress
) -> None:
    """Run `tokens` `[n]` through the model: `context` of them in chunks, the rest one by one as decode steps do.

    The cache goes in by place, as its keyword differs between transformers versions.
    """
    bounds = [*range(0, context, chunk), *range(context, len(tokens) + 1)]
    with torch.no_grad():
        for first, end in pairwise(bounds):
            model(tokens[None, first:end], None, None, cache, use_cache=True)
            progress(label, end, len(tokens))


def require(module: str, needs: str) -> ModuleType:
    """Import an optional module, or say what to install (`needs` completes "this capture needs ...")."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this capture needs {needs} ({error})") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers to errors, without progress bars, while the context is open."""
    logging = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
