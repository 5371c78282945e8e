"""The simplest baseline: a model that knows how often each token occurs, and nothing else."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxscale.data.scan import pieces
from jaxscale.data.store import TokenDataset

MOST_TOKENS = 2**27
"""Larger datasets are not counted: it would take longer than a person wants to wait."""


def unigram_loss(train: Collection[TokenDataset], validation: TokenDataset) -> float | None:
    """Nats a token of `validation` under the token frequencies of `train` together, each count plus one.

    None for large datasets.
    """
    if sum(dataset.tokens for dataset in train) + validation.tokens > MOST_TOKENS:
        return None
    counts = sum((_counts(dataset) for dataset in train), np.ones(validation.vocabulary_size, np.int64))
    seen = _counts(validation)
    return float(-(seen * np.log(counts / counts.sum())).sum() / seen.sum())


def _counts(dataset: TokenDataset) -> np.ndarray:
    """How often each id occurs, `[vocabulary_size] int64`."""
    counts = np.zeros(dataset.vocabulary_size, np.int64)
    for number in range(len(dataset.shards)):
        for block in pieces(dataset.shard(number)[0]):
            counts += np.bincount(block, minlength=len(counts))[: len(counts)]  # reading refuses damaged ids
    return counts
