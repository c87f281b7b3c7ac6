# SPDX-License-Identifier: Apache-2.0
"""Times of a decode step, from bytes and GPU.

    a rank's scores and selection = 5.0 us + 0.004 us * rows * heads + 1.03 * bytes / read roof

fits decode-h200-2026-11-30.json and cp-h200-2026-11-30.json within 12 % from 8 requests on; of one request it is up to 23 %
low at 64K tokens or more, and 23 % high at 4K. Other formats and GPUs are assumed to take as long per byte of their read roof.

The rest of the step is a floor: weights and caches that it reads over the read roof, and a latency per layer.
"""

from dataclasses import dataclass

import torch

from lightning_indexer.checks import check_int, require
from lightning_indexer.plan.exchange import Exchange, Load, exchanges
from lightning_indexer.plan.figure import MEASURED, MODELLED
from lightning_indexer.plan.gpus import Gpu
from lightning_indexer.plan.memory import INDEX_FORMATS, KV_BYTES, WEIGHT_BYTES, cache_bytes, index_token_bytes
from lightning_indexer.plan.model import Model
from lightning_indexer.spec import Shard
from lightning_indexer.traffic import KEY_BYTES, index_bytes

LAUNCH_US = 5.0
SELECTION_US = 0.004
SLOPE = 1.03
# Of everything else, per layer: vLLM #51494 gives 4.02 ms a token at batch 1 and 8K tokens on 8 B200s (NVFP4 weights); less
# what that step reads and the index scores, 58 us in each of 60 layers.
LAYER_US = 58.0
MAX_RANKS = 1024


@dataclass(frozen=True)
class Setup:
    """GPUs, model and load that are planned for.

    Args:
        gpu, model: see there.
        tp: ranks P.
        requests: `(how many, tokens of each)`.
        query_len: Q, query rows per request: 1 + draft tokens.
        index_format: of index keys, "bf16", "fp8" or "nvfp4".
        kv_format: of attention's K and V, the same names.
        weight_format: "bf16", "fp8" or "fp4".
        gpus_per_node: ranks of one host.
        memory_share: of a GPU's memory that weights and caches may take.
        all_heads: every rank projects the queries of all heads, so that none are exchanged.
        step_us: time of a whole step without context parallelism, where it was measured.
        exchange_us: of the exchange per layer, where it was measured.

    Raises:
        ValueError: an impossible number of ranks, no requests, or a value out of range.
    """

    gpu: Gpu
    model: Model
    tp: int
    requests: tuple[tuple[int, int], ...]
    query_len: int = 1
    index_format: str = "bf16"
    kv_format: str = "bf16"
    weight_format: str = "fp8"
    gpus_per_node: int = 8
    memory_share: float = 0.9
    all_heads: bool = False
    step_us: float | None = None
    exchange_us: float | None = None

    def __post_init__(self) -> None:
        check_int("tp", self.tp, 2, MAX_RANKS)  # one rank has nothing to share
        heads = self.model.spec.num_heads
        fits = heads % self.tp == 0 or self.tp % heads == 0
        require(fits, "tp", f"a divisor or a multiple of the {heads} index heads", self.tp)
        fits = self.model.kv_heads % self.tp == 0 or self.tp % self.model.kv_heads == 0
        require(fits, "tp", f"a divisor or a multiple of the {self.model.kv_heads} KV heads", self.tp)
        require(len(self.requests) > 0, "requests", "at least one", "none")
        for batch, context in self.requests:
            check_int("batch", batch, 1)
            check_int("context", context, 1)
        check_int("query_len", self.query_len, 1)
        check_int("gpus_per_node", self.gpus_per_node, 1)
        for name, value, known in (
            ("index_format", self.index_format, INDEX_FORMATS),
            ("kv_format", self.kv_format, tuple(KV_BYTES)),
            ("weight_format", self.weight_format, tuple(WEIGHT_BYTES)),
        ):
            require(value in known, name, "one of " + ", ".join(known), repr(value))
        require(0 < self.memory_share <= 1, "memory_share", "a share in (0, 1]", self.memory_share)
        for name, time in (("step_us", self.step_us), ("exchange_us", self.exchange_us)):
            require(time is None or time > 0, name, "a time > 0", time)

    @property
    def batch(self) -> int:
        """Requests R."""
        return sum(batch for batch, _ in self.requests)

    @property
    def tokens(self) -> int:
        """Of all requests together."""
        return sum(batch * context for batch, context in self.requests)

    @property
    def rows(self) -> int:
        """Query rows T of a step."""
        return self.batch * self.query_len

    @property
    def nodes(self) -> int:
        """Hosts that the ranks are on."""
        return -(-self.tp // self.gpus_per_node)

    @property
    def own_heads(self) -> int:
        """Index heads of a rank."""
        return len(self.model.spec.owned_heads(0, self.tp))


def layer_bytes(setup: Setup, ranks: int) -> int:
    """Index keys that rank 0 of `ranks` reads in a layer: bytes of a key times the tokens in its blocks, of all requests."""
    spec = setup.model.spec
    token_bytes = index_token_bytes(setup.model, setup.index_format)
    return sum(
        batch * index_bytes(torch.tensor([context]), spec, token_bytes, Shard(0, ranks)) for batch, context in setup.requests
    )


def select_us(gpu: Gpu, moved: float, selections: int) -> float:
    """A rank's scores and selection in one layer; `selections` are rows times heads."""
    return LAUNCH_US + SELECTION_US * selections + SLOPE * moved / gpu.read_tbps / 1e6


def alone_us(setup: Setup) -> float:
    """A layer without context parallelism: the rank's own heads on all blocks."""
    return select_us(setup.gpu, layer_bytes(setup, 1), setup.rows * setup.own_heads)


def rank_us(setup: Setup) -> float:
    """A rank's part of a layer with context parallelism: all heads on its blocks."""
    return select_us(setup.gpu, layer_bytes(setup, setup.tp), setup.rows * setup.model.spec.num_heads)


def setup_exchanges(setup: Setup, rows: int) -> list[Exchange]:
    """What the exchange of `rows` query rows costs, by transport; only the caller's own time where it is given."""
    if setup.exchange_us is not None:
        return [Exchange("as given", setup.exchange_us, "given", MEASURED)]
    spec = setup.model.spec
    queries = 0 if setup.all_heads else rows * setup.own_heads * spec.head_dim * 2
    keys = rows * spec.num_heads * spec.topk * KEY_BYTES
    return exchanges(setup.gpu, Load(rows, queries, keys, setup.tp, setup.nodes))


def break_even_tokens(setup: Setup, batch: int, exchange_us: float) -> int:
    """Tokens of each of `batch` requests from which on context parallelism is faster.

    (exchange + 0.004 us * rows * (H - h)) / (1.03 * (1 - 1/P) * requests * bytes of a key / read roof)
    """
    extra = exchange_us + SELECTION_US * batch * setup.query_len * (setup.model.spec.num_heads - setup.own_heads)
    token_bytes = index_token_bytes(setup.model, setup.index_format)
    saved_us = SLOPE * (1 - 1 / setup.tp) * token_bytes / setup.gpu.read_tbps / 1e6  # per token of all requests
    return round(extra / saved_us / batch)


def rest_us(setup: Setup) -> tuple[float, str]:
    """A step but for the indexer, and what that rests on: measured, or at least this.

    58 us * layers + (weights read / P + KV read) / read roof
    """
    model = setup.model
    if setup.step_us is not None:
        rest = setup.step_us - model.sparse_layers * alone_us(setup)
        require(rest > 0, "step_us", f"more than the {setup.step_us - rest:,.0f} us of the index scores alone", setup.step_us)
        return rest, MEASURED
    weights = model.weights_read(setup.rows) * WEIGHT_BYTES[setup.weight_format] / setup.tp
    return LAYER_US * model.layers + (weights + kv_read_bytes(setup)) / setup.gpu.read_tbps / 1e6, MODELLED


def kv_read_bytes(setup: Setup) -> float:
    """K and V that a rank reads in a step: selected blocks in sparse layers, everything in dense ones."""
    model = setup.model
    layer = cache_bytes(model, setup.tp, setup.kv_format, setup.index_format).kv / model.layers
    kept = model.spec.topk * model.spec.block_size
    dense = model.layers - model.sparse_layers
    return layer * sum(
        batch * (model.sparse_layers * min(context, kept) + dense * context) for batch, context in setup.requests
    )
