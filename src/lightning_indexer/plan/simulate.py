# SPDX-License-Identifier: Apache-2.0
"""A continuous batch played over a trace, step by step, without context parallelism, with it always, and with "auto".

Every step decodes one token of each request that is past its prompt, and computes a chunk of the oldest prompts that are not:

    step = 58 us * layers + max(bytes read / read roof, flops / (0.5 * matrix rate)) + sparse layers * index

with the index of decode as in cost.py, and that of prompts as flops at the same rate. Requests are admitted in order of
arrival, each once batch and cache have room for all that it will hold; nobody is preempted. Arrivals are those of the trace,
whatever the pace, so tokens per second tell of the system only where requests wait: `backlog` has all wait from the begin.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lightning_indexer.checks import check_int, require
from lightning_indexer.plan.cost import LAYER_US, Setup, select_us, setup_exchanges
from lightning_indexer.plan.memory import WEIGHT_BYTES, cache_bytes, index_token_bytes
from lightning_indexer.plan.trace import Request

MODES = ("off", "always", "auto")
# Of the matrix rate: prefill's scores reach 51 to 66 % past long prefixes (prefill-h200-2026-11-29.json); assumed of all.
MATRIX_SHARE = 0.5
BINS = 200  # of a timeline

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Serving:
    """How an engine batches."""

    max_batch: int = 128
    chunk_tokens: int = 2048  # of prompts per step

    def __post_init__(self) -> None:
        check_int("max_batch", self.max_batch, 1)
        check_int("chunk_tokens", self.chunk_tokens, 1)


@dataclass
class _Running:
    request: Request
    context: int  # tokens in the cache
    prompt_left: int
    output_left: int


@dataclass(frozen=True)
class Step:
    """One step of a played trace."""

    end_s: float
    us: float
    decoding: int  # requests that got a token
    tokens: int  # of context that these see
    shared: bool


@dataclass
class Played:
    """A trace played in one mode."""

    mode: str
    steps: list[Step] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # from arrival, by request in order of its first token
    output_tokens: int = 0

    @property
    def seconds(self) -> float:
        """From the begin of the trace to the last token."""
        return self.steps[-1].end_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of time in which there was work."""
        return self.output_tokens / (sum(step.us for step in self.steps) / 1e6)

    @property
    def shared(self) -> float:
        """Share of the steps with decode rows that were shared."""
        decoding = [step for step in self.steps if step.decoding]
        return sum(step.shared for step in decoding) / len(decoding)

    def between_tokens_ms(self, *quantiles: float) -> list[float]:
        """Quantiles of the time between two tokens of a request, over all tokens but the first ones."""
        found = sorted((step.us / 1e3, step.decoding) for step in self.steps if step.decoding)
        counts = list(itertools.accumulate(count for _, count in found))
        return [found[bisect.bisect_left(counts, quantile * counts[-1])][0] for quantile in quantiles]

    @property
    def mean_between_tokens_ms(self) -> float:
        """Mean of the time between two tokens of a request."""
        tokens = sum(step.decoding for step in self.steps)
        return sum(step.us * step.decoding for step in self.steps) / tokens / 1e3

    def timeline(self) -> list[tuple[float, float, float]]:
        """(seconds, mean ms between tokens, mean context tokens of a decode step) over equal parts of the time."""
        width = self.seconds / BINS
        bins: dict[int, list[Step]] = {}
        for step in self.steps:
            if step.decoding:
                bins.setdefault(min(BINS - 1, int(step.end_s / width)), []).append(step)
        return [
            (
                (number + 0.5) * width,
                sum(s.us * s.decoding for s in steps) / sum(s.decoding for s in steps) / 1e3,
                sum(s.tokens for s in steps) / len(steps),
            )
            for number, steps in sorted(bins.items())
        ]


class StepCosts:
    """Times of steps of one setup, whose own requests play no part."""

    def __init__(self, setup: Setup) -> None:
        self.setup, model = setup, setup.model
        self.key_bytes = index_token_bytes(model, setup.index_format)
        self.kv_bytes = cache_bytes(model, setup.tp, setup.kv_format, setup.index_format).kv / model.layers
        self.kept = model.spec.topk * model.spec.block_size
        self.dense = model.layers - model.sparse_layers
        self.active = model.weights_read(1)

    def index_us(self, mode: str, batch: int, tokens: int) -> tuple[float, bool]:
        """One layer's index of a decode step over `tokens` tokens of context in all, and whether it was shared."""
        setup, spec = self.setup, self.setup.model.spec
        rows, moved = batch * setup.query_len, tokens * self.key_bytes
        alone = select_us(setup.gpu, moved, rows * setup.own_heads)
        if mode == "off":
            return alone, False
        part = select_us(setup.gpu, moved / setup.tp, rows * spec.num_heads)
        shared = part + setup_exchanges(setup, rows)[0].us
        return (alone, False) if mode == "auto" and alone <= shared else (shared, True)

    def step_us(self, mode: str, contexts: Sequence[int], chunks: Sequence[tuple[int, int]]) -> tuple[float, bool]:
        """A step that decodes requests of these contexts and computes `(tokens, behind so many)` of prompts; if shared."""
        setup, model = self.setup, self.setup.model
        rows, new = len(contexts) * setup.query_len, sum(tokens for tokens, _ in chunks)
        total = sum(contexts)
        kept = sum(min(context, self.kept) for context in contexts)
        read = model.weights_read(rows + new) * WEIGHT_BYTES[setup.weight_format] / setup.tp
        read += self.kv_bytes * (model.sparse_layers * kept + self.dense * total)
        seen = sum(tokens * (behind + tokens / 2) for tokens, behind in chunks)  # (query, key) pairs of prompts
        heads = model.query_heads / setup.tp
        flops = 2 * self.active * (rows + new) / setup.tp
        flops += 4 * model.head_dim * heads * (model.sparse_layers * new * self.kept + self.dense * seen)
        rate = MATRIX_SHARE * setup.gpu.matrix_tflops * 1e6  # flops per us
        us = LAYER_US * model.layers + max(read / setup.gpu.read_tbps / 1e6, flops / rate)
        us += model.sparse_layers * 2 * setup.own_heads * model.spec.head_dim * seen / rate
        if not contexts:
            return us, False
        index, shared = self.index_us(mode, len(contexts), total)
        return us + model.sparse_layers * index, shared


def backlog(requests: Sequence[Request]) -> list[Request]:
    """The same requests, all waiting from the begin."""
    return [replace(request, arrival_s=0.0) for request in requests]


def play(requests: Sequence[Request], setup: Setup, serving: Serving, mode: str, room: int, progress: Progress) -> Played:
    """Play a trace, by arrival, in one mode; the cache holds `room` tokens.

    Raises:
        ValueError: a request that the cache cannot hold, or none that generates two tokens.
    """
    require(any(request.output_tokens > 1 for request in requests), "trace", "requests of two output tokens or more", "none")
    costs, played = StepCosts(setup), Played(mode)
    prefix = max(request.shared_tokens for request in requests)
    largest = max(requests, key=lambda request: request.own_tokens)
    need = largest.own_tokens + prefix
    require(need <= room, "trace", f"requests of at most {room:,} tokens, which the cache holds", f"one of {need:,}")
    waiting, running = deque(requests), list[_Running]()
    now, held, finished = 0.0, prefix, 0
    while waiting or running:
        while waiting and waiting[0].arrival_s <= now and len(running) < serving.max_batch:
            first = waiting[0]
            if held + first.own_tokens > room:
                break
            waiting.popleft()
            held += first.own_tokens
            left = first.prompt_tokens - first.cached_tokens
            running.append(_Running(first, first.cached_tokens, left, first.output_tokens))
        if not running:
            now = waiting[0].arrival_s
            continue
        decoding = [each for each in running if not each.prompt_left]
        chunks = _chunks(running, serving.chunk_tokens)
        contexts = [each.context for each in decoding]
        us, shared = costs.step_us(mode, contexts, [(tokens, each.context) for each, tokens in chunks])
        now += us / 1e6
        played.steps.append(Step(now, us, len(decoding), sum(contexts), shared))
        for each, tokens in chunks:
            each.context += tokens
            each.prompt_left -= tokens
            if not each.prompt_left:
                played.first_token_s.append(now - each.request.arrival_s)
                each.output_left -= 1
        for each in decoding:
            each.context += 1
            each.output_left -= 1
        done = [each for each in running if not each.prompt_left and not each.output_left]
        if done:
            finished += len(done)
            held -= sum(each.request.own_tokens for each in done)
            played.output_tokens += sum(each.request.output_tokens for each in done)
            running = [each for each in running if each.prompt_left or each.output_left]
            progress(f"playing, {mode}", finished, len(requests))
    return played


def _chunks(running: list[_Running], budget: int) -> list[tuple[_Running, int]]:
    """Whose prompts are computed in this step, and how many tokens of each."""
    chunks = []
    for each in running:
        tokens = min(each.prompt_left, budget)
        if tokens:
            chunks.append((each, tokens))
            budget -= tokens
    return chunks
