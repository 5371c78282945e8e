"""Evaluation of token datasets: sums over their tokens, whatever the evaluation batch and the number of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.config.phases import Phase
from jaxscale.data.feed import Feed
from jaxscale.data.loader import Reading
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Spread
from jaxscale.data.store import TokenDataset
from jaxscale.train.build import Run
from jaxscale.train.state import ModelArrays, from_int


class Sums(NamedTuple):
    """What was added up over rows of a dataset."""

    terms: dict[str, np.ndarray]
    """For each term of the objective `[2] float64`: its sum, and the number of tokens that it is over."""
    text_bytes: float | None
    """Text behind the tokens that were predicted, in bytes, at the dataset's own bytes a token; None: not known."""


def evaluate_splits(
    run: Run, evaluation_step: Any, model: ModelArrays, splits: Mapping[str, Mixture]
) -> dict[str, dict[str, Any]]:
    """The losses of each of several sets, and of each source of a set that has several, as SET/SOURCE.

    A set's losses are those of all its tokens, whichever source they are from.

    Args:
        run: what `evaluation_step` was built from.
        evaluation_step: compiled, or jitted.
        model: its arrays, on the run's mesh.
        splits: what to evaluate on; `evaluate.rows` of a set's rows, or all.

    Returns:
        For each term of the objective its mean (`loss` in nats a token), and `perplexity`, `bits_per_byte` (None for a
        masked objective, and where the bytes of the text are not known) and `valid_tokens`,
        the number of tokens predicted.
    """
    results: dict[str, dict[str, Any]] = {}
    for name, split in splits.items():
        rows = [split.view(number, run.config.data.sequence_length).rows for number in range(len(split.datasets))]
        wanted = shared_rows(rows, run.config.evaluate.rows)
        sources = {
            source: evaluate(run, evaluation_step, model, Mixture({source: dataset}, split.packing), count)
            for (source, dataset), count in zip(split.datasets.items(), wanted, strict=True)
        }
        results[name] = _summary(list(sources.values()))
        if len(sources) > 1:
            results |= {f"{name}/{source}": _summary([sums]) for source, sums in sources.items()}
    return results


def shared_rows(rows: Sequence[int], wanted: int | None) -> list[int]:
    """Rows to take of each source when `wanted` (None: all) are to be taken together: in proportion, at least one each.

    What the proportion leaves over goes to the sources that lost most by rounding down.
    """
    total = sum(rows)
    if wanted is None or wanted >= total:
        return list(rows)
    taken = [max(1, count * wanted // total) for count in rows]
    by_loss = sorted(range(len(rows)), key=lambda source: (taken[source] - rows[source] * wanted / total, source))
    for source in by_loss[: max(0, wanted - sum(taken))]:
        taken[source] += 1
    return taken


def evaluate(run: Run, evaluation_step: Any, model: ModelArrays, data: Mixture, wanted: int) -> Sums:
    """The sums over `wanted` rows of one dataset, evenly spread over it in stored order.

    The last batch is filled up with rows that count nothing. Other arguments as for `evaluate_splits`.
    """
    batch, length = run.evaluation_batch["tokens"].shape[1:]
    order = Spread(data.rows(length), wanted, (Phase(0, batch, length),))
    steps = math.ceil(wanted / batch)
    reading = Reading(threads=run.config.data.read_threads, ahead=run.config.data.read_ahead)
    feed = Feed(data, order, lambda step: run.evaluation_batch, reading, first_step=0, last_step=steps)

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
    text_bytes = None if run.config.objective.kind == "masked" else _text_bytes(data.first, float(totals["loss"][1]))
    return Sums(totals, text_bytes)


def _text_bytes(dataset: TokenDataset, tokens: float) -> float | None:
    """Bytes of text behind so many tokens."""
    return tokens * dataset.text_bytes / dataset.tokens if dataset.text_bytes else None


def _summary(sums: Sequence[Sums]) -> dict[str, Any]:
    """The results of datasets together."""
    totals = {name: np.sum([one.terms[name] for one in sums], axis=0) for name in sums[0].terms}
    means = {name: float(total / max(count, 1)) for name, (total, count) in totals.items()}
    known = [one.text_bytes for one in sums if one.text_bytes is not None]
    text_bytes = sum(known) if len(known) == len(sums) else None
    bits = float(totals["loss"][0]) / math.log(2)
    return {
        **means,
        "perplexity": math.exp(min(means["loss"], 700)),
        "bits_per_byte": bits / text_bytes if text_bytes else None,
        "valid_tokens": int(totals["loss"][1]),
    }
