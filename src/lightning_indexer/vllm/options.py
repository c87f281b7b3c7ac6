# SPDX-License-Identifier: Apache-2.0
"""What a server operator asks for, and whether an engine so configured can be served. Plain values: needs no vLLM."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import lightning_indexer as li
from lightning_indexer.checks import check_choice, check_int, require
from lightning_indexer.indexer import MAX_QUERY_LEN

SECTION = "lightning_indexer"  # of vLLM's additional_config
ADVICE = "To run without it, leave out the option that asks for it, or uninstall lightning-indexer"
PLATFORMS = ("cuda", "rocm", "cpu")
FORMATS = {"bf16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8"}  # of index caches that vLLM can fill: its name, and ours


@dataclass(frozen=True)
class Options:
    """The section `lightning_indexer` of `--additional-config`; every entry may be left out.

    Args:
        kernels: use our kernels where context parallelism was not asked for, too: every rank scores its own heads.
        transport, dispatch, threshold, timeout: as in `ContextParallelIndexer`.
        shard_by: "page" to hold the index cache once in the tensor-parallel group, as in `ContextParallelIndexer`.
        tie_break: "lower", or "higher" as in the AMD kernels of vLLM.
        order: of the ids: "score", "block", or "auto", which is what the engine's own indexer gives its attention.
        capture: write decode calls to this file, see `lightning_indexer.replay`. For eager engines.
        capture_calls: how many, at most.
        capture_tokens: only calls in which a request has so many tokens or more; None: more than K blocks.
        capture_megabytes: the most that the file may hold.
    """

    kernels: bool = False
    transport: str = "auto"
    dispatch: str = "auto"
    threshold: int | None = None
    timeout: float | None = None
    shard_by: str = "block"
    tie_break: str = "lower"
    order: str = "auto"
    capture: str | None = None
    capture_calls: int = 16
    capture_tokens: int | None = None
    capture_megabytes: int = 256

    def __post_init__(self) -> None:
        require(isinstance(self.kernels, bool), "kernels", "true or false", repr(self.kernels))
        check_choice("transport", self.transport, ("auto", "collective", "peer"))
        check_choice("dispatch", self.dispatch, ("auto", "sharded", "replicated"))
        if self.threshold is not None:
            check_int("threshold", self.threshold, 0)
        number = isinstance(self.timeout, (int, float)) and self.timeout > 0
        require(self.timeout is None or number, "timeout", "a number of seconds > 0", repr(self.timeout))
        check_choice("shard_by", self.shard_by, ("block", "page"))
        check_choice("tie_break", self.tie_break, ("lower", "higher"))
        check_choice("order", self.order, ("auto", "score", "block"))
        named = self.capture is None or (isinstance(self.capture, str) and self.capture != "")
        require(named, "capture", "the name of a file", repr(self.capture))
        check_int("capture_calls", self.capture_calls, 1)
        if self.capture_tokens is not None:
            check_int("capture_tokens", self.capture_tokens, 0)
        check_int("capture_megabytes", self.capture_megabytes, 1)

    @classmethod
    def read(cls, additional_config: Any) -> "Options":
        """From vLLM's `additional_config`.

        Raises:
            ValueError: an unknown name, or a value that does not fit.
        """
        section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
        require(isinstance(section, dict), SECTION, "a mapping", repr(section))
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(section) - set(known))
        require(not unknown, SECTION, f"some of {', '.join(known)}", ", ".join(unknown))
        return cls(**section)


def asked(config: Any) -> bool:
    """Whether a vLLM configuration asks for our indexer. Of any release: one without the fields does not."""
    attention = getattr(config, "attention_config", None)
    flag = bool(getattr(attention, "minimax_m3_indexer_cp", False))
    options = Options.read(getattr(config, "additional_config", None))
    return flag or options.kernels or options.shard_by == "page"


def refuse(reasons: list[str]) -> None:
    """Raise one ValueError with all reasons, if there are any."""
    if reasons:
        told = "; ".join(reasons)
        raise ValueError(f"lightning-indexer {li.__version__} cannot serve this engine: {told}. {ADVICE}.")


@dataclass(frozen=True)
class Setting:
    """What of an engine's configuration decides whether it can be served."""

    context_parallel: bool  # minimax_m3_indexer_cp
    platform: str  # "cuda", "rocm", "cpu", or what vLLM calls others
    tensor_parallel: int
    decode_context_parallel: int
    cache_dtype: str  # vLLM's name of the index cache's dtype
    heads: int  # index heads of the model
    head_dim: int
    block_size: int
    topk: int
    score_type: str
    query_len: int  # 1 + draft tokens
    fused_decode: bool  # a decode in one kernel, which selects for itself
    full_graphs: bool  # whole decode steps are replayed from graphs
    sleep_mode: bool  # memory of the model may be taken away and given back
    kv_connector: str | None = None  # that moves caches to another engine, to the host or to a disk
    hisparse: bool = False  # vLLM's pool of blocks on the host

    @property
    def format(self) -> str:
        """Our name of the cache format."""
        return FORMATS[self.cache_dtype]

    def refusals(self, options: Options) -> list[str]:
        """Why this cannot be served as it is asked for, in the wording of `checks.require`; empty if it can."""
        return [*self.unshared(options), *self.unsharded(options), *self.unserved(options)]

    def unshared(self, options: Options) -> list[str]:
        """Why the ranks cannot share the work, though it is asked for; each could score its own heads."""
        found: list[str] = []
        if self.context_parallel:
            alone = f'more than 1 (or {{"{SECTION}": {{"kernels": true}}}} in --additional-config, for our kernels on one GPU)'
            _need(found, self.tensor_parallel > 1, "tensor_parallel_size", alone, self.tensor_parallel)
            stays = not self.sleep_mode or options.transport == "collective"
            memory = 'false, or transport "collective": "peer" exchanges through memory that must stay'
            _need(found, stays, "enable_sleep_mode", memory, "true")
        return found

    def unsharded(self, options: Options) -> list[str]:
        """Why the ranks cannot hold the index cache once, though it is asked for."""
        found: list[str] = []
        if options.shard_by == "page":
            none = "none in --attention-config"
            _need(found, self.context_parallel, "minimax_m3_indexer_cp", 'true with shard_by "page"', none)
            everyone = '"sharded" or "auto" where pages are sharded'
            _need(found, options.dispatch != "replicated", "dispatch", everyone, repr(options.dispatch))
            one = 'none with shard_by "page": no rank holds all pages that a call reads'
            _need(found, options.capture is None, "capture", one, repr(options.capture))
            whole = 'none with shard_by "page": it would take the blocks of one rank for those of all'
            _need(found, self.kv_connector is None, "kv_transfer_config", whole, self.kv_connector)
            copied = 'none with shard_by "page": it copies blocks, and a block is a part of a page'
            _need(found, not self.hisparse, "hisparse_config", copied, "one")
        return found

    def unserved(self, options: Options) -> list[str]:
        """Why this cannot be served, whether the ranks share the work or not."""
        found: list[str] = []

        def need(condition: bool, argument: str, expected: str, got: Any) -> None:
            _need(found, condition, argument, expected, got)

        need(self.platform in PLATFORMS, "platform", " or ".join(PLATFORMS), self.platform)
        dcp = self.decode_context_parallel
        held = "every rank holds the whole index cache" if options.shard_by == "block" else "each rank holds pages, not tokens"
        need(dcp == 1, "decode_context_parallel_size", f"1: {held}", dcp)
        need(self.cache_dtype in FORMATS, "indexer_kv_dtype", " or ".join(FORMATS), repr(self.cache_dtype))
        need(self.score_type == "max", "sparse_score_type", "'max'", repr(self.score_type))
        own = "one that takes its blocks from the indexer"
        need(not self.fused_decode, "kernel_config.monokernel", f"{own}: false", "true, which selects blocks itself")
        try:
            spec = li.IndexerSpec(self.heads, self.head_dim, self.block_size, self.topk, 0, 0)
            spec.owned_heads(0, self.tensor_parallel)
        except ValueError as error:
            found.append(str(error))
        most = MAX_QUERY_LEN if self.platform != "cpu" else self.query_len
        need(self.query_len <= most, "num_speculative_tokens", f"at most {most - 1}", self.query_len - 1)
        if options.capture is not None:
            mode = 'a decode that is not replayed as a whole (--enforce-eager, or "cudagraph_mode": "PIECEWISE")'
            need(not self.full_graphs, "cudagraph_mode", f"{mode} for capture", "full graphs")
        return found


def _need(found: list[str], condition: bool, argument: str, expected: str, got: Any) -> None:
    """Add a reason unless a condition holds."""
    if not condition:
        found.append(f"{argument}: expected {expected}, got {got}")
