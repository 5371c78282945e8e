"""The simplest baseline: a model that knows how often each token occurs, and nothing else."""

from __future__ import annotations

import numpy as np

from jaxscale.data.store import TokenDataset

LENGTH = 4096
MOST_TOKENS = 2**27
"""Larger datasets are not counted: it would take longer than a person wants to wait."""


def unigram_loss(train: TokenDataset, validation: TokenDataset) -> float | None:
    """Nats a token of `validation` under the token frequencies of `train`, each count plus one.

    None for large datasets.
    """
    if train.tokens + validation.tokens > MOST_TOKENS:
        return None
    counts = _counts(train, train.vocabulary_size) + 1
    seen = _counts(validation, train.vocabulary_size)
    return float(-(seen * np.log(counts / counts.sum())).sum() / seen.sum())


def _counts(dataset: TokenDataset, vocabulary_size: int) -> np.ndarray:
    """How often each id occurs, `[vocabulary_size] int64`."""
    counts = np.zeros(vocabulary_size, np.int64)
    rows = np.arange(dataset.rows(LENGTH))
    for part in np.array_split(rows, max(1, len(rows) // 256)):
        tokens, _, lengths = dataset.gather(part, LENGTH)
        counts += np.bincount(tokens[np.arange(LENGTH) < lengths[:, None]], minlength=vocabulary_size)
    return counts
