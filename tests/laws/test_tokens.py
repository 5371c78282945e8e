"""The law *tokens*: sums over valid tokens divided by their global count, however a batch is cut or padded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.model.attention import Mask
from jaxscale.model.objective import Examples, row_keys
from jaxscale.train.build import Run
from jaxscale.train.state import TrainState, to_int
from jaxscale.train.step import MASKS
from tests import tiny

TOLERANCE = 2e-6
ROWS, STEPS = 8, 3
MODELS = {"decoder": tiny.DECODER, "dropout": {**tiny.DECODER, "dropout": 0.1}, "encoder": tiny.ENCODER}

Metrics = list[dict[str, np.ndarray]]


class Case(NamedTuple):
    """A model, the rows of its microbatches and of its global batch."""

    model: str
    microbatch: int = ROWS
    rows: int = ROWS

    def __str__(self) -> str:
        return f"{self.model}, {self.rows // self.microbatch} microsteps"


DECODER, DROPOUT, ENCODER = (Case(model) for model in MODELS)
"""With one microstep."""


@cache
def make_run(case: Case) -> Run:
    """A run on one device. Epsilon stands above the rounding of gradients, so that weights can be compared exactly."""
    return tiny.make_run(
        tiny.config(
            MODELS[case.model],
            mesh={"fsdp": 1},
            batch={"global_size": case.rows, "microbatch": case.microbatch},
            objective={"z_loss": 1e-3, "logits_chunk": 24},
            optimizer={"learning_rate": 1e-2, "epsilon": 1e-3},
        )
    )


@cache
def train_step(case: Case) -> Any:
    """The compiled training step of a case."""
    run = make_run(case)
    return run.lower_train_step(run.batch(0)).compile(compiler_options=tiny.QUICK)


def updates(case: Case, batches: list[dict[str, np.ndarray]], state: TrainState | None = None) -> tuple[Any, Metrics]:
    """The state and the metrics after an update with each batch."""
    run = make_run(case)
    state = tiny.random_state(run) if state is None else state
    metrics = []
    for batch in batches:
        state, values = train_step(case)(state, tiny.device_batch(run, batch))
        metrics.append(jax.device_get(values))
    return jax.device_get(state), metrics


def counted(run: Run, **counters: int) -> TrainState:
    """The state before the first update, with counters that stand elsewhere."""

    def words(number: int) -> jax.Array:
        return jax.device_put(np.array([number >> 32, number & 0xFFFFFFFF], np.uint32), run.state.step.sharding)

    return replace(tiny.random_state(run), **{name: words(number) for name, number in counters.items()})


def uneven(step: int) -> dict[str, np.ndarray]:
    """8 rows: full ones, one with a third of its tokens, an empty one; microbatches of all sizes get unlike shares."""
    batch = tiny.host_batch(make_run(DECODER), step)
    assert sorted({0, 21, 64}) == sorted(set(batch["lengths"].tolist()))
    return batch


@cache
def trained(case: Case) -> tuple[Any, Metrics]:
    """Three updates."""
    return updates(case, [uneven(step) for step in range(STEPS)])


def assert_same(one: tuple[Any, Metrics], other: tuple[Any, Metrics]) -> None:
    """Metrics and parameters agree to the tolerance of the law."""
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=TOLERANCE, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), one[0].params, other[0].params
    )


@pytest.mark.parametrize("case", [Case("dropout", 4), Case("dropout", 2), Case("encoder", 1)], ids=str)
def test_microbatches_change_nothing(case: Case) -> None:
    """1, 2, 4 or 8 microsteps: the same loss, gradient norm, learning rate and weights in each of three updates.

    Dropout follows the row of the batch, masks of the masked objective the row of the dataset.
    """
    run, (state, metrics) = make_run(case), trained(case)
    assert run.batch(0)["tokens"].shape == (ROWS // case.microbatch, case.microbatch, 64)
    assert_same((state, metrics), trained(Case(case.model)))
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [run.schedule(n) for n in range(STEPS)])
    counts = [int(count) for _, count in optax.tree.get_all_with_path(state.optimizer_state, "count")]
    assert counts
    assert set(counts) == {STEPS}, "the schedule counts updates, not microsteps"


def test_rows_of_padding_change_nothing() -> None:
    """Four more rows without tokens, in three microbatches instead of one."""

    def padded(step: int) -> dict[str, np.ndarray]:
        return {name: np.concatenate([x, np.zeros_like(x[:4])]) for name, x in uneven(step).items()}

    longer = Case("dropout", microbatch=4, rows=ROWS + 4)
    assert_same(updates(longer, [padded(step) for step in range(STEPS)]), trained(DROPOUT))


def loss_of_logits(run: Run, params: Any, examples: Examples) -> tuple[jax.Array, jax.Array]:
    """Mean over the weighted tokens of loss and z-loss, as one reads it, from all logits at once; and these logits."""
    model = tiny.merge(run, params)
    hidden = model(examples.inputs, examples.positions, Mask(run.config.model.causal, examples.segments))
    logits = model.logits(hidden)
    z = jax.nn.logsumexp(logits, axis=-1)
    losses = z - jnp.take_along_axis(logits, examples.targets[..., None], axis=-1)[..., 0]
    return (examples.weights * (losses + 1e-3 * z**2)).sum() / examples.weights.sum(), logits


@pytest.mark.parametrize("case", [DECODER, ENCODER], ids=["decoder", "encoder"])
def test_loss_and_gradient_are_those_of_all_logits(case: Case) -> None:
    """The gradient of a sum over the batch in one piece; the loss by NumPy in float64 from the model's logits."""
    run, batch = make_run(case), {name: jnp.asarray(x)[None] for name, x in uneven(0).items()}
    keys = row_keys(jax.random.fold_in(jax.random.key(run.config.seed), MASKS), jnp.zeros(2, jnp.uint32), (1, ROWS))
    examples = jax.tree.map(lambda x: x[0], jax.jit(run.objective.examples)(batch, keys))
    differentiate = jax.value_and_grad(partial(loss_of_logits, run), has_aux=True)
    (_, narrow), gradient = jax.jit(differentiate, compiler_options=tiny.QUICK)(tiny.random_params(run), examples)
    first = trained(case)[1][0]
    np.testing.assert_allclose(first["grad_norm"], optax.tree.norm(gradient), rtol=TOLERANCE)

    logits, weights = np.asarray(narrow, np.float64), np.asarray(examples.weights, np.float64)
    targets = np.take_along_axis(logits, np.asarray(examples.targets)[..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - targets
    np.testing.assert_allclose(first["loss"], (losses * weights).sum() / weights.sum(), rtol=TOLERANCE)
    assert to_int(first["valid_tokens"]) == (weights > 0).sum()


def test_a_batch_without_a_valid_token() -> None:
    """Its loss and gradient are 0, not 0 / 0; it is an update like any other."""
    empty = {name: np.zeros_like(x) for name, x in uneven(0).items()}
    state, (metrics,) = updates(DECODER, [empty])
    assert metrics["loss"] == metrics["grad_norm"] == metrics["skipped"] == 0
    assert to_int(state.valid_tokens) == 0
    assert to_int(state.cursor) == ROWS
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def first_loss(case: Case, **counters: int) -> float:
    """The loss of one and the same batch and weights where the counters stand so."""
    return float(updates(case, [uneven(0)], counted(make_run(case), **counters))[1][0]["loss"])


def test_masks_are_those_of_the_rows_number() -> None:
    """Masked tokens differ by cursor, also beyond 2^32, and by nothing else."""
    assert len({first_loss(ENCODER, cursor=cursor) for cursor in (0, ROWS, 2**32)}) == 3
    assert first_loss(ENCODER, cursor=ROWS, step=5) == first_loss(ENCODER, cursor=ROWS)


def test_dropout_differs_by_step_and_is_absent_in_evaluation() -> None:
    """The same weights and batch: another loss at each step of training; in evaluation, that without dropout."""
    run = make_run(DROPOUT)
    losses = {first_loss(DROPOUT, step=step) for step in (0, 1, 2**32)}
    assert len(losses) == 3
    without = float(trained(DECODER)[1][0]["loss"])
    assert all(abs(loss - without) > 1e-4 for loss in losses)

    batch = {name: jax.device_put(uneven(0)[name][None], x.sharding) for name, x in run.evaluation_batch.items()}
    evaluate = run.lower_evaluation_step().compile(compiler_options=tiny.QUICK)
    cursor = jax.device_put(np.zeros(2, np.uint32), run.state.cursor.sharding)
    terms = evaluate(params=tiny.random_params(run), model_state={}, batch=batch, cursor=cursor)
    np.testing.assert_allclose(terms["loss"].total / terms["loss"].items, without, rtol=TOLERANCE)


POISON = 7
"""A token whose embedding is infinite."""


def poisoned(state: TrainState) -> TrainState:
    clean = state.params["embedding"]["tokens"]["table"]
    table = jax.device_put(np.where(np.arange(len(clean))[:, None] == POISON, np.inf, clean), clean.sharding)
    return replace(state, params={**state.params, "embedding": {"tokens": {"table": table}}})


def test_an_update_that_is_not_finite_is_skipped() -> None:
    """Step, cursor and counters advance; parameters, moments and the schedule go on as if it had not been there."""
    run = make_run(DECODER)
    good = [
        {**batch, "tokens": np.where(batch["tokens"] == POISON, 8, batch["tokens"])} for batch in map(uneven, (0, 1))
    ]
    bad = {**good[0], "tokens": np.where(good[0]["tokens"] == 9, POISON, good[0]["tokens"])}
    expected, expected_metrics = updates(DECODER, good, poisoned(tiny.random_state(run)))
    state, metrics = updates(DECODER, [good[0], bad, good[1]], poisoned(tiny.random_state(run)))
    assert not np.isfinite(metrics[1]["loss"])
    assert [int(m["skipped"]) for m in metrics] == [0, 1, 1]
    for kept in ("params", "optimizer_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, kept), getattr(expected, kept))
    assert (to_int(state.step), to_int(state.cursor), int(state.skipped)) == (3, 3 * ROWS, 1)
    assert (to_int(expected.step), to_int(expected.cursor), int(expected.skipped)) == (2, 2 * ROWS, 0)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert metrics[2][name] == expected_metrics[1][name]
    assert metrics[2]["learning_rate"] == run.schedule(1) != run.schedule(2)


def test_counters_are_64_bits_wide() -> None:
    """They pass 2^32 in three updates as anywhere else."""
    run = make_run(DECODER)
    state = counted(run, step=2**32 - 2, cursor=2**32 - 2 * ROWS, valid_tokens=2**32 - 1000)
    state, metrics = updates(DECODER, [uneven(step) for step in range(STEPS)], state)
    valid = [to_int(m["valid_tokens"]) for m in trained(DECODER)[1]]
    assert valid[-1] > 1000
    assert [to_int(m["valid_tokens"]) for m in metrics] == [2**32 - 1000 + count for count in valid]
    assert to_int(state.step) == 2**32 + 1
    assert to_int(state.cursor) == 2**32 + ROWS
    assert to_int(state.valid_tokens) == 2**32 - 1000 + valid[-1]
