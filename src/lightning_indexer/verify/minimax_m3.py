# SPDX-License-Identifier: Apache-2.0
"""Verification cases from MiniMax-M3's own code in transformers: its queries, its keys and the blocks that it chose.

The model is narrow and its weights are random, but indexer, RoPE, cache and chunked prefill are the model's own.
"""

from typing import Any

import torch

from lightning_indexer.spec import IndexerSpec
from lightning_indexer.verify.case import Case
from lightning_indexer.verify.paging import (
    Progress,
    Trace,
    block_tables,
    feed,
    page_keys,
    quiet_transformers,
    require,
    trace_rope,
)

MODELING = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"
NEEDS = "transformers 5.17 or newer: pip install 'lightning-indexer[verify]'"
GROUP = 4  # query rows a prefill request
GROUPS = 64


def default_text() -> bytes:
    """Python's own language reference as the `help()` topics hold it: several hundred KB of English."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def capture(
    text: bytes,
    *,
    context: int,
    decode_steps: int,
    layers: int = 4,
    chunk: int = 1024,
    seed: int = 0,
    progress: Progress,
) -> list[Case]:
    """Read `text` with a small random MiniMax-M3 and return two cases per sparse layer.

    The bytes are the token ids. `context` tokens are prefilled in chunks of `chunk`, then `decode_steps` more are fed
    one by one. "decode" holds every decode step as a request of one row; "prefill rows" holds about 256 rows of the
    prefill as requests of four. `chosen` is the model's own selection, `[4, T, 16]`.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: the text is shorter than `context + decode_steps`, or a size is out of range.
    """
    _check(text, context, decode_steps, layers, chunk)
    modeling = require(MODELING, NEEDS)
    spec = IndexerSpec.minimax_m3()
    tokens = torch.frombuffer(bytearray(text[: context + decode_steps]), dtype=torch.uint8).to(torch.int64)
    starts = _request_starts(context, spec)
    rows = (starts[:, None] + torch.arange(GROUP)).flatten()
    positions = torch.cat([rows, torch.arange(context, len(tokens))])
    with quiet_transformers():
        model = _model(spec, len(tokens), layers, seed)
        indexers = {i: layer.self_attn.indexer for i, layer in enumerate(model.layers) if layer.self_attn.indexer}
        with trace_rope(modeling, indexers, positions) as traces:
            feed(model, _cache(model), tokens, context, chunk, "MiniMax-M3", progress)
    generator = torch.Generator().manual_seed(seed)
    return [case for i, trace in traces.items() for case in _cases(i, trace, spec, positions, len(rows), generator)]


def _check(text: bytes, context: int, decode_steps: int, layers: int, chunk: int) -> None:
    if len(text) < context + decode_steps:
        raise ValueError(f"text must hold context + decode_steps = {context + decode_steps} bytes, got {len(text)}")
    for name, value, least in (
        ("context", context, GROUP),
        ("decode_steps", decode_steps, 1),
        ("layers", layers, 1),
        ("chunk", chunk, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _request_starts(context: int, spec: IndexerSpec) -> torch.Tensor:
    """First positions of the prefill requests `[n]`, ascending, no two overlapping.

    Half are the last rows of the prefill. Of the others a third sees fewer than `topk` blocks and every second one
    straddles a block edge.
    """
    tail_start = max(0, context - GROUP * GROUPS // 2)
    early_end = min(tail_start, spec.topk * spec.block_size)
    early = torch.linspace(0, early_end, GROUPS // 6 + 1)[:-1]
    middle = torch.linspace(early_end, tail_start, GROUPS // 2 - len(early) + 1)[:-1]
    spread = torch.cat([early, middle]).to(torch.int64)
    edge = (spread // spec.block_size + 1) * spec.block_size - GROUP // 2
    spread[1::2] = edge[1::2]
    tail = torch.arange(tail_start, context - GROUP + 1, GROUP)
    starts: list[int] = []
    for start in sorted(spread[spread <= tail_start - GROUP].tolist()) + tail.tolist():
        if not starts or start >= starts[-1] + GROUP:
            starts.append(start)
    return torch.tensor(starts)


def _model(spec: IndexerSpec, max_tokens: int, layers: int, seed: int) -> Any:
    import transformers
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    auto_model: Any = transformers.AutoModel
    hidden = 256
    config = MiniMaxM3VLTextConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=128,
        dense_intermediate_size=256,
        shared_intermediate_size=128,
        num_hidden_layers=1 + layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_heads,
        head_dim=128,
        # The real 64 of 128; transformers reads the factor and not `rotary_dim`.
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=max_tokens,
        # Keeps the variance of a random network from layer to layer, so that the scores spread as trained ones do.
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        layer_types=["full_attention"] + ["minimax_m3_sparse"] * layers,
        mlp_layer_types=["dense"] + ["sparse"] * layers,
        index_n_heads=spec.num_heads,
        index_head_dim=spec.head_dim,
        index_block_size=spec.block_size,
        index_topk_blocks=spec.topk,
        index_local_blocks=spec.local_blocks,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not `.to(bfloat16)` afterwards: that would round the RoPE frequencies as well.
        return auto_model.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def _cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _cases(
    layer: int, trace: Trace, spec: IndexerSpec, positions: torch.Tensor, prefill_rows: int, generator: torch.Generator
) -> list[Case]:
    q = torch.cat(trace.queries, dim=1).transpose(0, 1).contiguous()
    chosen = torch.cat([_pad_blocks(blocks, spec.topk) for blocks in trace.outputs], dim=1)
    pages, page_of_block = page_keys(torch.cat(trace.keys, dim=1)[0], spec.block_size, generator)

    def case(name: str, rows: slice, query_len: int) -> Case:
        seq_lens = (positions[rows][query_len - 1 :: query_len] + 1).to(torch.int32)
        table = block_tables(page_of_block, seq_lens, spec.block_size, generator)
        name = f"layer {layer}, {name}"
        return Case(name, spec, q[rows], pages, table, seq_lens, query_len, chosen[:, rows].contiguous())

    return [case("decode", slice(prefill_rows, None), 1), case("prefill rows", slice(0, prefill_rows), GROUP)]


def _pad_blocks(blocks: torch.Tensor, topk: int) -> torch.Tensor:
    """`[H, T, k]` to `[H, T, topk]` int32: the model returns no more columns than there are blocks."""
    return torch.nn.functional.pad(blocks, (0, topk - blocks.shape[-1]), value=-1).to(torch.int32)
