"""The simplest baseline: a model that knows how often each token occurs, and nothing else."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxscale.data.store import TokenDataset

LENGTH = 4096
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
    rows = np.arange(dataset.rows(LENGTH))
    for part in np.array_split(rows, max(1, len(rows) // 256)):
        tokens, _, lengths = dataset.gather(part, LENGTH)
        counts += np.bincount(tokens[np.arange(LENGTH) < lengths[:, None]], minlength=dataset.vocabulary_size)
    return counts
