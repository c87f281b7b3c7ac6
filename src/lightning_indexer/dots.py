# SPDX-License-Identifier: Apache-2.0
"""fp32 dot products whose bits depend on nothing but the two vectors.

A selection can only be the same for every batch, shard and thread count if a score is. A matrix product does not promise
that: BLAS libraries pick another order of summation by shape. So there are two ways to compute a dot here, both fixed:

- a chain of fused multiply-adds over ascending dims. CPU BLAS kernels for wide enough matrices compute exactly this, fast.
  Whether the one at hand does, for every shape used here, is found out once by `_matmul_is_chain` and not assumed;
- products summed by halving (dim d with dim d + D/2, and so on), elementwise and therefore fixed by IEEE 754 on any device.
"""

from functools import lru_cache
from typing import Any

import torch

COLUMNS = 16  # a CPU matrix product of fewer columns may take another route; a multiple keeps all on one


def fixed_dots(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """`out[m, c] = dot(keys[m], queries[c])`, bitwise the same for every other M, C, order of rows and thread count.

    Args:
        keys: `[M, D]` float32, M at least 64.
        queries: `[C, D]` float32.

    Returns:
        `[M, C]` float32.
    """
    if arithmetic(keys.device) == "chain":
        columns = queries.shape[0]
        padded = torch.nn.functional.pad(queries, (0, 0, 0, -columns % COLUMNS))
        return _matmul(keys, padded)[:, :columns]
    return torch.stack([_halving_dot(keys, query) for query in queries], dim=1)


def arithmetic(device: torch.device) -> str:
    """Which of the two ways `fixed_dots` takes on a device: "chain" or "halving". Ranks of a group must take the same."""
    precision = torch.get_float32_matmul_precision()
    return "chain" if device.type == "cpu" and _matmul_is_chain(torch.get_num_threads(), precision) else "halving"


def _matmul(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    with torch.autocast(keys.device.type, enabled=False):  # it would round to bf16
        return keys @ queries.t()


def _halving_dot(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    terms = keys * query
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


@lru_cache(maxsize=64)
def _matmul_is_chain(threads: int, precision: str) -> bool:
    """Whether `keys @ queries.t()` is the chain of fused multiply-adds, bit for bit, on this CPU.

    Keyed by what may change the route: the thread count, and the fp32 precision that the process asked for, which may
    swap in bf16 products.
    """
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    for dim in (64, 128):
        keys, queries = torch.randn(256, dim, **options), torch.randn(64, dim, **options)
        chain = torch.zeros(256, 64, dtype=torch.float32, device="cpu")
        for d in range(dim):
            # Products are exact in float64, so this rounds to float32 as a fused multiply-add does.
            chain = (chain.double() + keys[:, d, None].double() * queries[:, d].double()).float()
        for rows in (64, 192, 2048):
            for columns in (COLUMNS, 3 * COLUMNS, 512):
                many = _matmul(keys.repeat(-(-rows // 256), 1)[:rows], queries.repeat(-(-columns // 64), 1)[:columns])
                if not torch.equal(many, chain.repeat(-(-rows // 256), -(-columns // 64))[:rows, :columns]):
                    return False
    return True
