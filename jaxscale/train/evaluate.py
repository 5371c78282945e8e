"""Evaluation of a token dataset: sums over its tokens, whatever the evaluation batch and the number of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.config.phases import Phase
from jaxscale.data.feed import Feed
from jaxscale.data.loader import Reading
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Spread
from jaxscale.train.build import Run
from jaxscale.train.state import ModelArrays, from_int


def evaluate_splits(
    run: Run, evaluation_step: Any, model: ModelArrays, splits: Mapping[str, Mixture]
) -> dict[str, dict[str, Any]]:
    """`evaluate` for each of several splits."""
    return {name: evaluate(run, evaluation_step, model, split) for name, split in splits.items()}


def evaluate(run: Run, evaluation_step: Any, model: ModelArrays, split: Mixture) -> dict[str, Any]:
    """Losses of the rows of a dataset in stored order; the last batch is filled up with rows that count nothing.

    Args:
        run: what `evaluation_step` was built from.
        evaluation_step: compiled, or jitted.
        model: its arrays, on the run's mesh.
        split: one dataset to evaluate on; `evaluate.rows` of its rows, or all.

    Returns:
        For each term of the objective its mean (`loss` in nats a token), and `perplexity`, `bits_per_byte` (None for a
        masked objective, and where the bytes of the text are not known) and `valid_tokens`,
        the number of tokens predicted.
    """
    batch, length = run.evaluation_batch["tokens"].shape[1:]
    dataset, rows = split.first, split.rows(length)
    wanted = min(rows, run.config.evaluate.rows or rows)
    order = Spread(rows, wanted, (Phase(0, batch, length),))
    steps = math.ceil(wanted / batch)
    reading = Reading(threads=run.config.data.read_threads, ahead=run.config.data.read_ahead)
    feed = Feed(split, order, lambda step: run.evaluation_batch, reading, first_step=0, last_step=steps)

    totals: dict[str, np.ndarray] = {}
    pending = None
    for step in range(steps + 1):
        following = None
        if step < steps:
            cursor = jax.device_put(from_int(step * batch), run.state.cursor.sharding)
            following = evaluation_step(**model, batch=feed.next()[0].arrays, cursor=cursor)
        if pending is not None:
            for name, term in jax.device_get(pending).items():
                totals[name] = totals.get(name, 0) + np.array(term, np.float64)
        pending = following

    means = {name: float(total / max(count, 1)) for name, (total, count) in totals.items()}
    bits_per_token = means["loss"] / math.log(2)
    text_bytes = None if run.config.objective.kind == "masked" else dataset.text_bytes
    return {
        **means,
        "perplexity": math.exp(min(means["loss"], 700)),
        "bits_per_byte": bits_per_token * dataset.tokens / text_bytes if text_bytes else None,
        "valid_tokens": int(totals["loss"][1]),
    }
