# SPDX-License-Identifier: Apache-2.0
"""A block-sparse model's geometry, as far as time and memory of a decode step depend on it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_indexer.checks import check_int, require
from lightning_indexer.spec import IndexerSpec

SPARSE_LAYER = "minimax_m3_sparse"  # in transformers' `layer_types`


@dataclass(frozen=True)
class Model:
    """Sizes of one model.

    Args:
        name: for people.
        spec: the indexer's.
        layers: of attention, in all.
        sparse_layers: those with an indexer, and with experts.
        query_heads, kv_heads, head_dim: of attention.
        hidden: width of a token.
        experts, experts_used: per layer, and of these by a token.
        expert_size, shared_size, dense_size: inner widths of an expert, of the shared expert, and of the MLP of a dense layer.
        vocabulary: tokens that there are.
    """

    name: str
    spec: IndexerSpec
    layers: int
    sparse_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    experts: int
    experts_used: int
    expert_size: int
    shared_size: int
    dense_size: int
    vocabulary: int

    def __post_init__(self) -> None:
        check_int("layers", self.layers, 1)
        check_int("sparse_layers", self.sparse_layers, 1, self.layers)
        check_int("kv_heads", self.kv_heads, 1)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.expert_size

    @property
    def common_weights(self) -> int:
        """Weights that every step reads: attention, shared experts, dense layers, the output."""
        attention = self.layers * self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        mlp = 3 * self.hidden * (self.sparse_layers * self.shared_size + (self.layers - self.sparse_layers) * self.dense_size)
        return attention + mlp + self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All weights: the embedding and every expert, too."""
        experts = self.sparse_layers * self.experts * self.expert_weights
        return self.common_weights + experts + self.vocabulary * self.hidden

    def weights_read(self, tokens: float) -> float:
        """Weights that a step of `tokens` tokens reads, if tokens choose their experts independently.

        common + sparse layers * E * (1 - (1 - used / E)^tokens) * expert
        """
        touched: float = self.experts * (1 - (1 - self.experts_used / self.experts) ** tokens)
        return self.common_weights + self.sparse_layers * touched * self.expert_weights


MINIMAX_M3 = Model("MiniMax-M3", IndexerSpec.minimax_m3(), 60, 57, 64, 4, 128, 6144, 128, 4, 3072, 3072, 12288, 200_064)


def load_model(source: str) -> Model:
    """The model "minimax-m3", or that of a config file in transformers' or the checkpoints' spelling.

    Raises:
        ValueError: no such file, not a config, or a size is missing.
    """
    if source == "minimax-m3":
        return MINIMAX_M3
    path = Path(source)
    require(path.is_file(), "model", "minimax-m3 or a config file", repr(source))
    try:
        config = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model: expected a JSON file, got {path} ({error})") from error
    require(isinstance(config, dict), "model", f"a JSON object in {path}", type(config).__name__)
    return model_of(config, path.parent.name or path.name)


def model_of(config: dict[str, Any], name: str) -> Model:
    """The model of a config; without experts all layers are dense.

    Raises:
        ValueError: a size is missing or not a positive int.
    """
    config = config.get("text_config") or config

    def size(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        require(value is not None, "model", f"{' or '.join(keys)} in the config", "none")
        check_int(keys[0], value, 0)
        return int(value)  # type: ignore[arg-type]

    layers, heads, hidden = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
    inner = size("intermediate_size")
    experts = size("num_local_experts", "num_experts", "n_routed_experts", default=1)
    return Model(
        name=name,
        spec=IndexerSpec.from_config(config),
        layers=layers,
        sparse_layers=_sparse_layers(config, layers),
        query_heads=heads,
        kv_heads=size("num_key_value_heads"),
        head_dim=size("head_dim", default=hidden // max(1, heads)),
        hidden=hidden,
        experts=max(1, experts),
        experts_used=size("num_experts_per_tok", default=1),
        expert_size=inner,
        shared_size=size("shared_intermediate_size", default=0),
        dense_size=size("dense_intermediate_size", default=inner),
        vocabulary=size("vocab_size"),
    )


def _sparse_layers(config: dict[str, Any], layers: int) -> int:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds.count(SPARSE_LAYER)
    nested = config.get("sparse_attention_config")
    marks = nested.get("sparse_attention_freq") if isinstance(nested, dict) else None
    require(isinstance(marks, list), "model", "layer_types or sparse_attention_freq in the config", "neither")
    return sum(bool(mark) for mark in marks[:layers])  # type: ignore[index]
