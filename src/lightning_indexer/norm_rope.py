# SPDX-License-Identifier: Apache-2.0
"""What comes between the projections of an indexer layer and its scores: norm, rotary embedding, and the cache."""

import torch

from lightning_indexer.cache import FLOAT_DTYPES, IndexCache
from lightning_indexer.checks import check_int, check_number, check_tensor, require

INTEGERS = (torch.int32, torch.int64)


class NormRope:
    """RMS norm and rotary embedding of index queries and keys, as MiniMax-M3 has them; the keys go on into the cache.

        y = x / sqrt(mean(x^2) + eps) * (1 + weight)                               float32, over the D dims of a head
        y[d], y[d + r/2] = y[d] cos a - y[d + r/2] sin a, y[d + r/2] cos a + y[d] sin a     d < r/2,  r = rotary_dim
        a = position / theta^(2d / r);  dims from r on stay

    All of it is float32, rounded once at the end: to the queries' dtype, and to the format of the cache as
    `IndexCache.write` does. One launch on a GPU.

    Args:
        query_weight, key_weight: `[D]` of one float dtype, on the device of the calls.
        eps: the norm's.
        rotary_dim: r, how many leading dims turn: 0, or D divided by a power of two.
        theta: base of the frequencies.
        frequency: `[r/2]` float32, radians per position of each pair of dims, for a model whose frequencies are others.

    Raises:
        ValueError: shapes, dtypes, or a rotary_dim that does not fit.
    """

    def __init__(
        self,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        *,
        eps: float = 1e-6,
        rotary_dim: int = 64,
        theta: float = 5e6,
        frequency: torch.Tensor | None = None,
    ) -> None:
        check_tensor("query_weight", query_weight, ("D",), FLOAT_DTYPES)
        check_tensor("key_weight", key_weight, (query_weight.shape[0],), (query_weight.dtype,), query_weight.device)
        dim = query_weight.shape[0]
        check_int("rotary_dim", rotary_dim, 0)
        fits = rotary_dim == 0 or (rotary_dim >= 4 and any(rotary_dim << shift == dim for shift in range(8)))
        require(fits, "rotary_dim", f"0, or {dim} divided by a power of two, at least 4", rotary_dim)
        check_number("eps", eps, 0)
        check_number("theta", theta, 0, open=True)
        self.query_weight, self.key_weight, self.eps, self.rotary_dim = query_weight, key_weight, float(eps), rotary_dim
        if frequency is None:
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / max(1, rotary_dim)
            frequency = (1.0 / theta**exponents).to(query_weight.device)
        check_tensor("frequency", frequency, (rotary_dim // 2,), (torch.float32,), query_weight.device)
        self.frequency = frequency

    @torch.no_grad()
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cache: IndexCache,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and rotate the queries, and write the keys, normed and rotated, into the cache.

        Args:
            q: `[n, H, D]` bf16, fp16 or fp32 as projected, last dim contiguous.
            k: `[n, D]` of the same dtype.
            cache: takes the keys.
            slot_mapping: `[n]` int64, as in `IndexCache.write`. A row whose slot is ignored still gets its query.
            positions: `[n]` int32 or int64, of each row.
            out: `[n, H, D]` of a dtype that the cache is scored with; None makes one of q's, or of the cache's first if that
                is none. It may be q itself, but share no memory with q or k otherwise, nor with itself.

        Returns:
            `out`.

        Raises:
            ValueError: an argument's shape, dtype, device or stride.
        """
        from lightning_indexer.ops import backend_of

        require(isinstance(cache, IndexCache), "cache", "an IndexCache", type(cache).__name__)
        dim, device = cache.spec.head_dim, cache.device
        require(len(self.query_weight) == dim, "query_weight", f"{dim} dims as the cache", len(self.query_weight))
        require(self.query_weight.device == device, "query_weight", f"device {device}", self.query_weight.device)
        check_tensor("q", q, ("n", "H", dim), FLOAT_DTYPES, device)
        check_tensor("k", k, (q.shape[0], dim), (q.dtype,), device)
        check_tensor("slot_mapping", slot_mapping, (q.shape[0],), (torch.int64,), device, unit_stride=False)
        check_tensor("positions", positions, (q.shape[0],), INTEGERS, device, unit_stride=False)
        dtypes = cache.format.query_dtypes
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype if q.dtype in dtypes else dtypes[0], device=device)
        check_tensor("out", out, tuple(q.shape), dtypes, device)
        whole = all(stride > 0 for stride, size in zip(out.stride(), out.shape, strict=True) if size > 1)
        require(whole, "out", "a place of its own for every element", f"strides {out.stride()}")
        itself = out.data_ptr() == q.data_ptr() and out.stride() == q.stride() and out.dtype == q.dtype
        apart = itself or not (_overlap(out, q) or _overlap(out, k))
        require(apart, "out", "q itself, or memory of its own", "some that q or k lies in")
        backend_of(device).norm_rope_write(q, k, cache, slot_mapping, positions, self, out)
        return out

    def apply(self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows `[n, D]` or `[n, H, D]`, normed and rotated, in float32 by torch."""
        wide = x.float()
        y = wide * (1.0 / torch.sqrt(wide.square().mean(-1, keepdim=True) + self.eps)) * (1.0 + weight.float())
        half = self.rotary_dim // 2
        angle = positions.float().view(-1, *[1] * (x.dim() - 2), 1) * self.frequency
        cos, sin = angle.cos(), angle.sin()
        low, high, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether elements of two tensors may lie in the same memory: the runs from first to last element meet, and rows as well.

    Slices of one buffer along its last dims, as queries and keys out of one projection, do not meet though their runs do.
    """
    if not one.numel() or not other.numel():
        return False
    first, last = _run(one)
    begin, end = _run(other)
    if last <= begin or end <= first:
        return False
    row = one.stride(0) * one.element_size()
    if row != other.stride(0) * other.element_size() or row == 0:
        return True
    (first, last), (begin, end) = _run(one[:1]), _run(other[:1])
    gap = (begin - first) % row  # where the other's rows begin within one's
    return gap < last - first or gap + (end - begin) > row


def _run(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of that behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
