"""Learning rates by update, and AdamW against its definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config.schema import OptimizerConfig, ScheduleConfig
from jaxscale.model.layers import ParameterAxes
from jaxscale.train.optimizer import make_optimizer, make_schedule
from tests import tiny

KINDS = ("constant", "cosine", "linear", "warmup_stable_decay")
PEAK = 0.1


def rates(kind: str, steps: int, warmup: int = 0, decay: int = 0, final_share: float = 0.1) -> np.ndarray:
    """The learning rate of each update of a run."""
    config = ScheduleConfig.model_validate({"kind": kind, "final_share": final_share})
    schedule = make_schedule(config, PEAK, steps, warmup=warmup, decay=decay)
    return np.array([schedule(jnp.uint32(update)) for update in range(steps)])


def test_warm_up_reaches_the_peak() -> None:
    """The first update does not stand still, the last of the warm-up has the peak."""
    for kind in KINDS:
        rising = rates(kind, 20, warmup=4, decay=4)[:4]
        np.testing.assert_allclose(rising, [0.025, 0.05, 0.075, 0.1], rtol=1e-6)


def test_constant() -> None:
    np.testing.assert_allclose(rates("constant", 5), [PEAK] * 5, rtol=1e-6)


def test_cosine() -> None:
    """Half a cosine from the peak, which the last update of the warm-up has, to the final share."""
    progress = np.arange(1, 17) / 16
    expected = PEAK * (0.1 + 0.9 * (1 + np.cos(np.pi * progress)) / 2)
    np.testing.assert_allclose(rates("cosine", 20, warmup=4)[4:], expected, rtol=1e-5)


def test_linear() -> None:
    expected = PEAK * (1 - 0.75 * np.arange(1, 17) / 16)
    np.testing.assert_allclose(rates("linear", 20, warmup=4, final_share=0.25)[4:], expected, rtol=1e-5)


def test_warmup_stable_decay() -> None:
    """The peak is kept until only `decay` updates are left."""
    ours = rates("warmup_stable_decay", 10, warmup=2, decay=4, final_share=0.2)
    np.testing.assert_allclose(ours, [0.05, 0.1, *[0.1] * 4, 0.08, 0.06, 0.04, 0.02], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_edges_of_schedules(kind: str) -> None:
    """Every combination that fits is finite, positive, rises to the peak at most and then never rises again."""
    for steps, warmup, decay in itertools.product((1, 2, 7), (0, 1, 7), (0, 1, 7)):
        decay = decay if kind == "warmup_stable_decay" else 0
        if warmup + decay > steps or (kind == "warmup_stable_decay" and decay == 0):
            continue
        values = rates(kind, steps, warmup, decay)
        assert np.isfinite(values).all()
        assert (values > 0).all(), "the first update does something"
        assert values.max() <= PEAK * (1 + 1e-6)
        assert (np.diff(values[:warmup]) > 0).all()
        assert (np.diff(values[max(warmup - 1, 0) :]) <= 1e-8).all()
        if kind != "constant" and warmup < steps:
            np.testing.assert_allclose(values[-1], 0.1 * PEAK, rtol=1e-5)
        if warmup:
            np.testing.assert_allclose(values[warmup - 1], PEAK, rtol=1e-6)


def test_only_matrices_decay() -> None:
    """With a gradient of 0, decay is the whole update: of matrices and tables, and not of scales and biases.

    Stacked layers do not turn a vector into a matrix, nor do the heads of a bias.
    """
    run = tiny.make_run(tiny.config({**tiny.ENCODER, "tied_embeddings": False}, mesh={"fsdp": 1}))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), run.state.params)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), lambda _: jnp.float32(0.1), run.axes)

    @jax.jit
    def update(params: Any) -> Any:
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    updates = jax.device_get(update(params))
    decayed, kept = set(), set()
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        (decayed if update.any() else kept).add(name)
        np.testing.assert_allclose(update, -0.05 if name in decayed else 0, rtol=1e-6)
    assert {name.rsplit(".")[-1] for name in decayed} == {"kernel", "table"}
    assert {name.rsplit(".")[-1] for name in kept} == {"scale", "bias"}
    assert {"layers.attention_norm.scale", "layers.attention.query.bias", "head.bias"} <= kept
    assert {"embedding.tokens.table", "embedding.positions.table", "head.table", "head.dense.kernel"} <= decayed


SETTINGS = OptimizerConfig(learning_rate=0.1, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2, clip_norm=1.0)
AXES = {"matrix": ParameterAxes(("embed", "mlp"), inner=1), "vector": ParameterAxes(("layers", "embed"), inner=0)}


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_adamw_by_hand(clip_norm: float | None) -> None:
    """Three updates in float64, from arXiv 1711.05101 with the global norm clipped before the moments."""
    config = SETTINGS.model_copy(update={"clip_norm": clip_norm})
    learning_rates = [0.1, 0.05, 0.2]
    optimizer = make_optimizer(config, lambda count: jnp.array(learning_rates)[count], AXES)
    random = np.random.default_rng(41)
    shapes = {"matrix": (3, 4), "vector": (2, 3)}
    expected = {name: random.normal(size=shape) for name, shape in shapes.items()}
    params: Any = jax.tree.map(jnp.float32, expected)
    state = optimizer.init(params)
    first = {name: np.zeros(shape) for name, shape in shapes.items()}
    second = {name: np.zeros(shape) for name, shape in shapes.items()}
    for count, (scale, learning_rate) in enumerate(zip((10, 0.01, 1), learning_rates, strict=True), start=1):
        gradient = {name: scale * random.normal(size=shape) for name, shape in shapes.items()}
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradient), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        clipped = min(1, clip_norm / norm) if clip_norm else 1
        assert clip_norm is None or (clipped < 1) == (scale >= 1)
        for name, g in gradient.items():
            first[name] = 0.8 * first[name] + 0.2 * clipped * g
            second[name] = 0.9 * second[name] + 0.1 * (clipped * g) ** 2
            step = first[name] / (1 - 0.8**count) / (np.sqrt(second[name] / (1 - 0.9**count)) + 1e-3)
            decay = 0.2 * expected[name] if name == "matrix" else 0
            expected[name] = expected[name] - learning_rate * (step + decay)
    for name in shapes:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5, atol=1e-6)


def test_small_updates_are_not_lost() -> None:
    """Under bfloat16 compute, 100 updates of 6e-4 to weights of 1 arrive, for masters and moments are float32.

    In bfloat16, 1 - 6e-4 is 1.
    """
    assert jnp.bfloat16(1) - jnp.bfloat16(6e-4) == 1
    run = tiny.make_run(tiny.config(mesh={"fsdp": 1}, precision={"compute": "bfloat16"}))
    assert run.precision.compute == jnp.bfloat16
    stored = jax.tree.leaves((run.state.params, run.state.optimizer_state))
    assert {leaf.dtype for leaf in stored if jnp.issubdtype(leaf.dtype, jnp.floating)} == {jnp.dtype(jnp.float32)}

    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.0), lambda _: jnp.float32(6e-4), AXES)
    params = {name: jnp.ones((3, 4), jnp.float32) for name in AXES}

    def update(_: int, carry: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params, _ = jax.lax.fori_loop(0, 100, update, (params, optimizer.init(params)))
    for leaf in params.values():
        np.testing.assert_allclose(leaf, 0.94, rtol=1e-4)
