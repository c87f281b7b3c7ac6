# SPDX-License-Identifier: Apache-2.0
"""The paged index-K cache: one key head of D dims per token, in pages of B tokens, one page per block."""

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_indexer.checks import check_choice, check_int, check_tensor, require
from lightning_indexer.spec import IndexerSpec, Shard, check_spec

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


GROUP = 16  # dims that share an NVFP4 scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1 codes 0 to 7; 8 to 15 are their negatives
E2M1 = (*MAGNITUDES, *(-value for value in MAGNITUDES))
E2M1_LARGEST = MAGNITUDES[-1]
# Between two neighbours lies a middle, which goes to the even code; whether the lower one is even.
E2M1_MIDDLES = tuple(((low + high) / 2, code % 2 == 0) for code, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)))


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


@dataclass(frozen=True)
class Fp8Format:
    """Keys as 8-bit floats: to nearest even and saturating when written, scored as stored, times the token's scale if any."""

    name: str
    dtype: torch.dtype

    @property
    def query_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, self.dtype)

    @property
    def largest(self) -> float:
        """The largest finite value: 448 of e4m3fn, 240 of e4m3fnuz."""
        return torch.finfo(self.dtype).max

    def row_elements(self, head_dim: int) -> int:
        return head_dim

    def load(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.view(self.dtype).float()

    def store(self, keys: torch.Tensor) -> torch.Tensor:
        return saturated(keys.float(), self.dtype)


@dataclass(frozen=True)
class NvFp4Format:
    """Per token D/2 bytes of e2m1 pairs, low nibble first, then D/16 e4m3fn scales, one per group of 16 dims; nothing else.

    A key is scored as `e4m3(e2m1 * scale)`, to nearest even, saturating. Written: `scale = e4m3(amax / 6)` of the group,
    then `e2m1(key / scale)`, both to nearest even and saturating; a group whose scale is 0 is 0. A NaN among the keys of a
    group makes its scale, and so all of it, NaN.
    """

    name: str = "nvfp4"
    dtype: torch.dtype = torch.uint8

    @property
    def query_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float8_e4m3fn)

    def row_elements(self, head_dim: int) -> int:
        return head_dim // 2 + head_dim // GROUP

    def load(self, raw: torch.Tensor) -> torch.Tensor:
        dim = raw.shape[-1] * 2 * GROUP // (GROUP + 2)
        pairs, scales = raw[..., : dim // 2], raw[..., dim // 2 :]
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
        values = torch.tensor(E2M1, dtype=torch.float32, device=raw.device)[codes.long()]
        scales = scales.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(GROUP, dim=-1)
        return saturated(values * scales, torch.float8_e4m3fn).float()  # the product is exact

    def store(self, keys: torch.Tensor) -> torch.Tensor:
        groups = keys.float().view(*keys.shape[:-1], keys.shape[-1] // GROUP, GROUP)
        # By a tensor: on a GPU torch multiplies with the reciprocal of a number instead.
        largest = torch.tensor(E2M1_LARGEST, device=keys.device)
        scales = saturated(groups.abs().amax(dim=-1) / largest, torch.float8_e4m3fn)
        divisor = scales.float()[..., None]
        magnitudes = torch.where(divisor == 0, 0.0, groups.abs() / divisor)
        codes = sum((magnitudes > middle) if even else (magnitudes >= middle) for middle, even in E2M1_MIDDLES)
        codes = (codes + 8 * groups.signbit().int()).to(torch.uint8).flatten(-2)
        return torch.cat((codes[..., ::2] | (codes[..., 1::2] << 4), scales.view(torch.uint8)), dim=-1)


def saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values as an 8-bit float dtype, to nearest even; larger ones, infinities too, become the largest. NaN stays."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


FORMATS: dict[str, CacheFormat] = {
    "bf16": PlainFormat("bf16", torch.bfloat16),
    "fp16": PlainFormat("fp16", torch.float16),
    "fp32": PlainFormat("fp32", torch.float32),
    "fp8": Fp8Format("fp8", torch.float8_e4m3fn),
    "fp8_fnuz": Fp8Format("fp8_fnuz", torch.float8_e4m3fnuz),
    "nvfp4": NvFp4Format(),
}
BYTE_FORMATS = ("fp8", "fp8_fnuz", "nvfp4")  # that engines keep in tensors of bytes


def is_packed(format: CacheFormat) -> bool:
    """Whether an element is stored in 8 bits or less."""
    return format.name in BYTE_FORMATS


class IndexCache:
    """A view of index-K pages: `data` `[pages, B, row]`, the format that reads it, any scales. Made by `empty` or `wrap`."""

    def __init__(self, data: torch.Tensor, spec: IndexerSpec, format: CacheFormat, scale: torch.Tensor | None = None) -> None:
        self.data = data
        self.spec = spec
        self.format = format
        self.scale = scale

    @classmethod
    def empty(
        cls, num_pages: int, spec: IndexerSpec, format: str = "bf16", device: torch.device | str = "cpu"
    ) -> "IndexCache":
        """A new cache of `num_pages` pages, its contents undefined.

        Args:
            num_pages: pages of B tokens, at least 1.
            spec: gives B and D.
            format: "bf16", "fp16", "fp32", "fp8" (e4m3fn), "fp8_fnuz" (e4m3fnuz) or "nvfp4".
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
            tensor: `[pages, B, D]`, with "nvfp4" `[pages, B, D/2 + D/16]` bytes, the tokens of a page one behind the other;
                pages may lie any distance apart, as in a layer's view of a buffer that interleaves layers. fp8 may come as
                bytes (uint8), if `format` says which.
            spec: gives B and D.
            format: None takes it from the dtype.
            scale: with fp8 `[pages, B]` float32, a factor per token, finite where the token is visible; None for none.

        Raises:
            ValueError: shape, dtype or strides do not fit spec and format.
        """
        check_spec(spec)
        require(isinstance(tensor, torch.Tensor), "cache", "a torch.Tensor or an IndexCache", type(tensor).__name__)
        if format is None:
            by_dtype = {candidate.dtype: name for name, candidate in FORMATS.items() if candidate.dtype != torch.uint8}
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in by_dtype)
            expected = f"format {' or '.join(BYTE_FORMATS)} for bytes" if tensor.dtype == torch.uint8 else f"dtype {names}"
            require(tensor.dtype in by_dtype, "cache", expected, f"dtype {tensor.dtype}".replace("torch.", ""))
            format = by_dtype[tensor.dtype]
        check_choice("format", format, tuple(FORMATS))
        chosen = FORMATS[format]
        if tensor.dtype == torch.uint8 and format in BYTE_FORMATS:
            tensor = tensor.view(chosen.dtype)
        row = chosen.row_elements(spec.head_dim)
        check_tensor("cache", tensor, ("pages", spec.block_size, row), (chosen.dtype,))
        require(tensor.shape[0] > 0, "cache", "at least one page", "none")
        require(tensor.stride(1) == row, "cache", f"token stride {row}", f"strides {tuple(tensor.stride())}")
        if scale is not None:
            require(isinstance(chosen, Fp8Format), "scale", f"None for format {format!r}", "a scale")
            check_tensor("scale", scale, (tensor.shape[0], spec.block_size), (torch.float32,), tensor.device)
        return cls(tensor, spec, chosen, scale)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def token_bytes(self) -> int:
        """Bytes that a token's key takes, its scale included."""
        scale = 0 if self.scale is None else self.scale.element_size()
        return self.data.shape[2] * self.data.element_size() + scale

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes."""
        return self.spec.block_size * self.token_bytes

    @torch.no_grad()
    def write(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store keys by slot: `keys[i]` goes to token `slot % B` of page `slot // B`, `slot = slot_mapping[i]`.

        Args:
            keys: `[n, D]` bf16, fp16 or fp32, converted to the format. With scales a token's is its largest magnitude over
                the format's (1 if that is 0 or not finite), and `key / scale` is stored.
            slot_mapping: `[n]` int64. Slots below 0 or past the end are ignored; the others must be distinct.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        check_tensor("keys", keys, ("n", self.spec.head_dim), FLOAT_DTYPES, self.device)
        check_tensor("slot_mapping", slot_mapping, (keys.shape[0],), (torch.int64,), self.device, unit_stride=False)
        from lightning_indexer.ops import backend_of  # which takes caches itself

        backend_of(self.device).write(self, keys, slot_mapping)

    def held_by(self, shard: Shard) -> "IndexCache":
        """A copy of the pages that a rank holds where a group holds the cache once: this one's `rank`, `rank + world`, ...

        One page, of zeros, where the rank holds none. With `by="block"` every rank holds the whole cache: no copy.
        """
        if shard.by == "block":
            return self
        own = shard.owned_blocks(torch.arange(self.num_pages, device=self.device))
        data = self._raw[own]
        scale = None if self.scale is None else self.scale[own]
        if not len(data):
            data = data.new_zeros((1, *data.shape[1:]))
            scale = None if scale is None else scale.new_zeros((1, *scale.shape[1:]))
        return IndexCache(data.view(self.data.dtype), self.spec, self.format, scale)

    @torch.no_grad()
    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Some pages as they are stored, scales included: page ids `[n]` int64 to bytes `[n, page_bytes]` on this device.

        Raises:
            ValueError: not int64, on another device, or on the CPU an id outside the cache.
        """
        self._check_pages(pages)
        keys = self._raw.index_select(0, pages).flatten(1).view(torch.uint8)
        if self.scale is None:
            return keys
        return torch.cat((keys, self.scale.index_select(0, pages).view(torch.uint8)), dim=1)

    @torch.no_grad()
    def write_pages(self, pages: torch.Tensor, data: torch.Tensor) -> None:
        """Put pages back that `read_pages` took out, of this cache or another of the same geometry and format.

        Args:
            pages: `[n]` int64, distinct.
            data: `[n, page_bytes]` uint8.

        Raises:
            ValueError: as `read_pages`, or bytes of another format.
        """
        self._check_pages(pages)
        check_tensor("data", data, (len(pages), self.page_bytes), (torch.uint8,), self.device)
        keys = data[:, : self._raw[0].numel() * self._raw.element_size()].contiguous()
        self._raw[pages] = keys.view(self._raw.dtype).view(len(pages), *self._raw.shape[1:])
        if self.scale is not None:
            self.scale[pages] = data[:, keys.shape[1] :].contiguous().view(torch.float32)

    def _check_pages(self, pages: torch.Tensor) -> None:
        check_tensor("pages", pages, ("n",), (torch.int64,), self.device)
        if self.device.type == "cpu" and len(pages):
            found = f"{int(pages.min())} to {int(pages.max())}"
            inside = int(pages.min()) >= 0 and int(pages.max()) < self.num_pages
            require(inside, "pages", f"ids below {self.num_pages}", found)

    def load_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """The keys of some pages as the scorer sees them: page ids `[n]`, clamped into the cache, to `[n, B, D]` float32."""
        inside = pages.clamp(0, self.num_pages - 1)
        keys = self.format.load(self._raw.index_select(0, inside))
        return keys if self.scale is None else keys * self.scale.index_select(0, inside)[..., None]

    def dequantize(self) -> torch.Tensor:
        """All pages as the scorer sees them: `[pages, B, D]` float32."""
        keys = self.format.load(self._raw)
        return keys if self.scale is None else keys * self.scale[..., None]

    def store_tokens(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """`write` in torch, of keys `[n, D]` whose slots are all inside."""
        page, offset = slots // self.spec.block_size, slots % self.spec.block_size
        if self.scale is not None and isinstance(self.format, Fp8Format):
            keys = keys.float()
            # By a tensor: on a GPU torch multiplies with the reciprocal of a number instead.
            factor = keys.abs().amax(dim=-1) / torch.tensor(self.format.largest, device=keys.device)
            factor = torch.where((factor > 0) & factor.isfinite(), factor, 1.0)
            self.scale[page, offset] = factor
            keys = keys / factor[:, None]
        self._raw[page, offset] = _as_bytes(self.format.store(keys))

    @property
    def _raw(self) -> torch.Tensor:
        """The pages, as bytes where torch indexes nothing else."""
        return _as_bytes(self.data)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


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
