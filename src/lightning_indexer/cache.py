# SPDX-License-Identifier: Apache-2.0
"""The paged index-K cache: one key head of D dims per token, in pages of B tokens, one page per block."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_indexer.checks import check_choice, check_int, check_tensor, require
from lightning_indexer.spec import IndexerSpec, check_spec

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CacheFormat(Protocol):
    """How a token's key lies in memory and what the scorer sees of it. A new format is one entry in `FORMATS`."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the storage."""

    @property
    def query_dtypes(self) -> tuple[torch.dtype, ...]:
        """Query dtypes that it is scored with."""

    def row_elements(self, head_dim: int) -> int:
        """Storage elements per token."""

    def load(self, raw: torch.Tensor) -> torch.Tensor:
        """Stored rows `[..., row_elements]` as the scorer sees them: `[..., D]` float32."""

    def store(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys `[..., D]` of any float dtype as stored rows `[..., row_elements]`."""


@dataclass(frozen=True)
class PlainFormat:
    """Keys stored in a float dtype, rounded to nearest even when written, scored as stored."""

    name: str
    dtype: torch.dtype

    @property
    def query_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    def row_elements(self, head_dim: int) -> int:
        return head_dim

    def load(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.float()

    def store(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.to(self.dtype)


FORMATS: dict[str, CacheFormat] = {
    "bf16": PlainFormat("bf16", torch.bfloat16),
    "fp16": PlainFormat("fp16", torch.float16),
    "fp32": PlainFormat("fp32", torch.float32),
}


class IndexCache:
    """A view of index-K pages: `data` `[pages, B, row]` and the format that reads it. Made by `empty` or `wrap`."""

    def __init__(self, data: torch.Tensor, spec: IndexerSpec, format: CacheFormat) -> None:
        self.data = data
        self.spec = spec
        self.format = format

    @classmethod
    def empty(
        cls, num_pages: int, spec: IndexerSpec, format: str = "bf16", device: torch.device | str = "cpu"
    ) -> "IndexCache":
        """A new cache of `num_pages` pages, its contents undefined.

        Args:
            num_pages: pages of B tokens, at least 1.
            spec: gives B and D.
            format: "bf16", "fp16" or "fp32".
            device: where it lies.

        Raises:
            ValueError: no pages, or an unknown format.
        """
        check_spec(spec)
        check_int("num_pages", num_pages, 1)
        check_choice("format", format, tuple(FORMATS))
        chosen = FORMATS[format]
        shape = (num_pages, spec.block_size, chosen.row_elements(spec.head_dim))
        return cls(torch.empty(shape, dtype=chosen.dtype, device=device), spec, chosen)

    @classmethod
    def wrap(
        cls, tensor: torch.Tensor, spec: IndexerSpec, format: str | None = None, scale: torch.Tensor | None = None
    ) -> "IndexCache":
        """An engine's own tensor as a cache, without a copy.

        Args:
            tensor: `[pages, B, D]`, the tokens of a page one behind the other; pages may lie any distance apart, as in
                a layer's view of a buffer that interleaves layers.
            spec: gives B and D.
            format: None takes it from the dtype.
            scale: None; the formats here have no scales.

        Raises:
            ValueError: shape, dtype or strides do not fit spec and format.
        """
        check_spec(spec)
        require(isinstance(tensor, torch.Tensor), "cache", "a torch.Tensor or an IndexCache", type(tensor).__name__)
        if format is None:
            by_dtype = {candidate.dtype: name for name, candidate in FORMATS.items()}
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in by_dtype)
            require(tensor.dtype in by_dtype, "cache", f"dtype {names}", f"dtype {tensor.dtype}".replace("torch.", ""))
            format = by_dtype[tensor.dtype]
        check_choice("format", format, tuple(FORMATS))
        chosen = FORMATS[format]
        require(scale is None, "scale", f"None for format {format!r}", "a scale")
        row = chosen.row_elements(spec.head_dim)
        check_tensor("cache", tensor, ("pages", spec.block_size, row), (chosen.dtype,))
        require(tensor.shape[0] > 0, "cache", "at least one page", "none")
        require(tensor.stride(1) == row, "cache", f"token stride {row}", f"strides {tuple(tensor.stride())}")
        return cls(tensor, spec, chosen)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def token_bytes(self) -> int:
        """Bytes that a token's key takes."""
        return self.data.shape[2] * self.data.element_size()

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes."""
        return self.spec.block_size * self.token_bytes

    @torch.no_grad()
    def write(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store keys by slot: `keys[i]` goes to token `slot % B` of page `slot // B`, `slot = slot_mapping[i]`.

        Args:
            keys: `[n, D]` bf16, fp16 or fp32, converted to the format.
            slot_mapping: `[n]` int64. Slots below 0 or past the end are ignored; the others must be distinct.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        check_tensor("keys", keys, ("n", self.spec.head_dim), FLOAT_DTYPES, self.device)
        check_tensor("slot_mapping", slot_mapping, (keys.shape[0],), (torch.int64,), self.device, unit_stride=False)
        tokens = self.num_pages * self.spec.block_size
        inside = (slot_mapping >= 0) & (slot_mapping < tokens)
        slots = slot_mapping[inside]
        page, offset = slots // self.spec.block_size, slots % self.spec.block_size
        self.data[page, offset] = self.format.store(keys[inside])

    def load_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """The keys of some pages as the scorer sees them: page ids `[n]`, clamped into the cache, to `[n, B, D]` float32."""
        return self.format.load(self.data.index_select(0, pages.clamp(0, self.num_pages - 1)))

    def dequantize(self) -> torch.Tensor:
        """All pages as the scorer sees them: `[pages, B, D]` float32."""
        return self.format.load(self.data)


def as_cache(cache: Any, spec: IndexerSpec) -> IndexCache:
    """`cache` as an `IndexCache` that fits `spec`; a plain tensor is wrapped.

    Raises:
        ValueError: another block size, head dim or dtype.
    """
    if not isinstance(cache, IndexCache):
        return IndexCache.wrap(cache, spec)
    for name in ("block_size", "head_dim"):
        want, got = getattr(spec, name), getattr(cache.spec, name)
        require(want == got, "cache", f"{name} {want} as in spec", f"{name} {got}")
    return cache
