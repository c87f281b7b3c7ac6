# SPDX-License-Identifier: Apache-2.0
"""A short proof that selections are right here: every format that works, one rank and four, against the reference."""

from collections.abc import Callable, Iterator

import torch

from lightning_indexer.cache import FORMATS
from lightning_indexer.spec import IndexerSpec
from lightning_indexer.verify import synthetic
from lightning_indexer.verify.compare import Outcome, compare

WORLDS = [1, 4]
CONTEXT = 4000  # tokens: 32 blocks, of which 16 are kept


def self_test(formats: list[str], device: torch.device, progress: Callable[[str, int, int], None]) -> Iterator[Outcome]:
    """Outcomes of random requests of two query rows in bf16, with keys in each of `formats` that takes them."""
    drawn = synthetic.draw(IndexerSpec(), batch=3, context=CONTEXT, query_len=2, seed=0)
    scored = [format for format in formats if torch.bfloat16 in FORMATS[format].query_dtypes]
    yield from compare([case.stored_as(format) for case in drawn for format in scored], WORLDS, progress, device)
