"""From rows of documents to inputs, targets, weights and masks, against a slow reading of the rules."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.model.objective import Examples, Objective, fold_words, make_objective, row_keys
from jaxscale.train.state import to_int
from tests import tiny

ROWS, SEQUENCE, MASK = 12, 40, 249


def random_batch(seed: int) -> dict[str, np.ndarray]:
    """Rows with documents of all lengths from 1, a first document that is cut at the row or not, and padding."""
    random = np.random.default_rng([37, seed])
    lengths = random.integers(0, SEQUENCE + 1, ROWS)
    lengths[:4] = [0, 1, SEQUENCE, SEQUENCE - 1]
    real = np.arange(SEQUENCE) < lengths[:, None]
    starts = (random.random((ROWS, SEQUENCE)) < 0.2) & real
    starts[::2, 0] = real[::2, 0]
    starts[2, 1:] = False  # one document that fills its row
    tokens = np.where(real, random.integers(0, 250, (ROWS, SEQUENCE)), 0)
    return {"tokens": tokens.astype(np.uint16), "starts": starts, "lengths": lengths.astype(np.int32)}


def as_microsteps(batch: dict[str, np.ndarray], microsteps: int) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x.reshape(microsteps, ROWS // microsteps, *x.shape[1:])) for name, x in batch.items()}


def keys(cursor: int, microsteps: int = 1) -> jax.Array:
    """Keys of the rows from `cursor` on, as the training step makes them."""
    words = jnp.array([cursor >> 32, cursor & 0xFFFFFFFF], jnp.uint32)
    return row_keys(jax.random.key(5), words, (microsteps, ROWS // microsteps))


def objective(kind: str, **settings: float) -> Objective:
    across = bool(settings.pop("across", False))
    model = tiny.DECODER if kind == "causal" else tiny.ENCODER
    config = tiny.config(model, objective={"kind": kind, **settings}, data={"attend_across_documents": across})
    return make_objective(config, MASK)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_layout_of_rows(seed: int, across: bool) -> None:
    """Segments, positions, targets and weights, token by token.

    A token predicts the one after it if that belongs to the same document, also where attention crosses documents.
    """
    batch = random_batch(seed)
    examples = objective("causal", across=across).examples(as_microsteps(batch, 1), keys(0))
    examples = jax.tree.map(lambda x: np.asarray(x[0]), examples)
    np.testing.assert_array_equal(examples.inputs, batch["tokens"])
    np.testing.assert_array_equal(examples.lengths, batch["lengths"])
    assert (examples.segments is None) == across
    predictions = 0
    for row in range(ROWS):
        document, position = 0, -1
        length = batch["lengths"][row]
        for i in range(length):
            new = bool(batch["starts"][row, i])
            document, position = document + new, 0 if new else position + 1
            assert examples.positions[row, i] == (i if across else position)
            if examples.segments is not None:
                assert examples.segments[row, i] == document
            follows = i + 1 < length and not batch["starts"][row, i + 1]
            assert examples.weights[row, i] == follows
            if follows:
                predictions += 1
                assert examples.targets[row, i] == batch["tokens"][row, i + 1]
        assert not examples.weights[row, length:].any()
        if examples.segments is not None:
            assert (examples.segments[row, length:] == -1).all()
    assert predictions > 100


def test_a_batch_is_declared() -> None:
    """Names, shapes and axes of what the host sends; examples fit to it."""
    fields = objective("causal").batch(2, 6, SEQUENCE)
    made = {name: (x.shape, x.dtype) for name, x in as_microsteps(random_batch(0), 2).items()}
    assert {name: (field.shape, field.dtype) for name, field in fields.items()} == made
    assert all(len(field.axes) == len(field.shape) for field in fields.values())


def masked(cursor: int, microsteps: int = 1, batch: dict[str, np.ndarray] | None = None, **settings: float) -> Examples:
    """Masked examples of a batch as `[rows, sequence]` arrays."""
    parts = as_microsteps(random_batch(0) if batch is None else batch, microsteps)
    made = objective("masked", **settings).examples(parts, keys(cursor, microsteps))
    return jax.tree.map(lambda x: np.asarray(x).reshape(ROWS, *x.shape[2:]), made)


def test_masks_touch_only_real_tokens() -> None:
    """Targets are the tokens themselves; what is not predicted is shown as it is."""
    batch = random_batch(0)
    real = np.arange(SEQUENCE) < batch["lengths"][:, None]
    examples = masked(0, mask_share=0.5)
    chosen = examples.weights == 1
    assert set(np.unique(examples.weights)) == {0, 1}
    assert not (chosen & ~real).any()
    assert chosen.any(axis=1).sum() >= ROWS - 3, "all rows but the shortest have targets"
    np.testing.assert_array_equal(examples.targets, batch["tokens"])
    np.testing.assert_array_equal(examples.inputs[~chosen], batch["tokens"][~chosen])
    assert (examples.inputs[chosen] != batch["tokens"][chosen]).any()


def test_masks_follow_the_cursor_of_the_row() -> None:
    """They depend on nothing else: not on the microsteps, not on the place of a row in its batch."""
    whole = masked(1000)
    jax.tree.map(np.testing.assert_array_equal, whole, masked(1000, microsteps=4))
    rotated = {name: np.roll(x, -3, axis=0) for name, x in random_batch(0).items()}
    later = masked(1003, batch=rotated)
    np.testing.assert_array_equal(later.inputs[: ROWS - 3], whole.inputs[3:])
    np.testing.assert_array_equal(later.weights[: ROWS - 3], whole.weights[3:])


def test_masks_differ_by_cursor_and_row() -> None:
    """The next batch of the same rows has other masks, and so has each row of a batch."""
    tokens = np.full((ROWS, SEQUENCE), 7, np.int32)
    same = {"tokens": tokens, "starts": np.zeros(tokens.shape, bool), "lengths": np.full(ROWS, SEQUENCE, np.int32)}
    first, second = (masked(cursor, batch=same, mask_share=0.5).weights for cursor in (0, ROWS))
    assert len({row.tobytes() for row in (*first, *second)}) == 2 * ROWS
    assert abs((first == second).mean() - 0.5) < 0.1


@pytest.mark.parametrize(
    "shares", [{}, {"mask_share": 0.4, "replace_share": 0.5, "random_share": 0.3}], ids=["BERT", "other"]
)
def test_shares_of_masked_tokens(shares: dict[str, float]) -> None:
    """15 % are predicted, of which 80 % shown as the mask, 10 % as a random token of the vocabulary, 10 % unchanged."""
    share, replace, random = (
        shares.get(name, default)
        for name, default in (("mask_share", 0.15), ("replace_share", 0.8), ("random_share", 0.1))
    )
    shape = (ROWS, 6000)
    batch = {"tokens": np.full(shape, 3, np.int32), "starts": np.zeros(shape, bool), "lengths": np.full(ROWS, 6000)}
    examples = masked(0, batch=batch, **shares)
    chosen = examples.weights == 1
    within(chosen.sum(), chosen.size, share)
    shown, count = examples.inputs[chosen], int(chosen.sum())
    # A random token is the mask or the token itself once in a vocabulary each.
    within((shown == MASK).sum(), count, replace + random / 250)
    within((shown == 3).sum(), count, 1 - replace - random + random / 250)
    others = shown[(shown != MASK) & (shown != 3)]
    within(len(others), count, random * 248 / 250)
    assert others.min() >= 0
    assert others.max() < 250, "ids of the vocabulary's padding are never shown"
    assert len(np.unique(others)) > 200
    within((others < 125).sum(), len(others), 124 / 248)


def within(count: int, of: int, share: float) -> None:
    """A count of independent draws is within 5 standard deviations of its mean."""
    assert abs(count - of * share) < 5 * math.sqrt(of * share * (1 - share))


def test_row_keys_count_beyond_32_bits() -> None:
    """The key of a row is that of its 64-bit number, also where the low word overflows inside a batch."""
    key = jax.random.key(5)
    numbers = 2**32 - 5 + np.arange(ROWS)
    ours = jax.random.key_data(keys(2**32 - 5)[0])
    for number, words in zip(numbers.tolist(), ours, strict=True):
        high_low = jnp.array([number >> 32, number & 0xFFFFFFFF], jnp.uint32)
        np.testing.assert_array_equal(words, jax.random.key_data(fold_words(key, high_low)))
        assert to_int(high_low) == number
    assert len({tuple(words.tolist()) for words in np.asarray(ours)}) == ROWS
