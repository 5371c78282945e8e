"""Cross-entropy and z-loss: exact against float64, and never all logits at one time."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.cluster.mesh import make_mesh
from jaxscale.config.schema import MeshConfig
from jaxscale.model.loss import Output, cross_entropy
from jaxscale.plan.collectives import collectives
from jaxscale.plan.program import read_program
from tests import tiny

ROWS, SEQUENCE, EMBED, VOCABULARY, PADDED = 8, 24, 16, 50, 128


class Inputs(NamedTuple):
    """Arguments of `cross_entropy`."""

    hidden: np.ndarray
    output: Output
    targets: np.ndarray
    weights: np.ndarray


def inputs(*, bias: bool, scale: float = 1.0) -> Inputs:
    """Random inputs; `scale` is the standard deviation of the logits. The padding of the table is not zero."""
    random = np.random.default_rng(31)
    weights = random.uniform(0.5, 2, (ROWS, SEQUENCE)) * (random.random((ROWS, SEQUENCE)) < 0.8)
    weights[2], weights[:, -1] = 0, 0
    table = scale * random.normal(size=(PADDED, EMBED)) / math.sqrt(EMBED)
    return Inputs(
        random.normal(size=(ROWS, SEQUENCE, EMBED)).astype(np.float32),
        Output(table.astype(np.float32), random.normal(size=PADDED).astype(np.float32) if bias else None),
        random.integers(0, VOCABULARY, (ROWS, SEQUENCE)).astype(np.int32),
        weights.astype(np.float32),
    )


def exact(inputs: Inputs, z_weight: float) -> tuple[np.ndarray, tuple[Any, Output]]:
    """The three sums, and the gradients of the first for hidden states and output, in float64 from the definition."""
    hidden, table = np.float64(inputs.hidden), np.float64(inputs.output.table)
    logits = hidden @ table.T
    if inputs.output.bias is not None:
        logits = logits + np.float64(inputs.output.bias)
    logits = logits[..., :VOCABULARY]
    largest = logits.max(axis=-1, keepdims=True)
    normaliser = largest + np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
    hit = np.eye(VOCABULARY)[inputs.targets]
    weights = np.float64(inputs.weights)
    loss = (weights * (normaliser[..., 0] - (logits * hit).sum(axis=-1))).sum()
    z = (weights * normaliser[..., 0] ** 2).sum()
    d_logits = weights[..., None] * (np.exp(logits - normaliser) * (1 + 2 * z_weight * normaliser) - hit)
    d_logits = np.concatenate([d_logits, np.zeros((ROWS, SEQUENCE, PADDED - VOCABULARY))], axis=-1)
    d_bias = None if inputs.output.bias is None else d_logits.sum(axis=(0, 1))
    d_table = np.einsum("bsv,bse->ve", d_logits, hidden)
    return np.array([loss + z_weight * z, loss, z]), (d_logits @ table, Output(d_table, d_bias))


def total_and_sums(hidden: Any, output: Output, targets: Any, weights: Any, **static: Any) -> tuple[Any, Any]:
    sums = cross_entropy(hidden, output, targets, weights, vocabulary_size=VOCABULARY, **static)
    return sums.total, sums


def evaluated_and_differentiated(arguments: Inputs, **static: Any) -> tuple[Any, Any, Any]:
    """The sums as evaluation computes them, those of the training step, and the gradients."""
    function = partial(total_and_sums, **static)
    (_, sums), gradients = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)(*arguments)
    return function(*arguments)[1], sums, gradients


@pytest.mark.parametrize(
    ("chunk", "bias", "z_weight", "scale"),
    [
        (24, False, 0.0, 1),
        (8, True, 0.1, 1),
        (7, True, 0.1, 1),
        (1000, True, 0.0, 1),
        (1, False, 0.1, 1),
        (8, True, 0.1, 300),
    ],
)
def test_sums_and_gradients_are_exact(chunk: int, bias: bool, z_weight: float, scale: float) -> None:
    """Whether chunks divide the sequence or not; padding of the vocabulary is in no softmax and has no gradient."""
    arguments = inputs(bias=bias, scale=scale)
    expected, expected_gradients = exact(arguments, z_weight)
    evaluated, trained, gradients = jax.jit(partial(evaluated_and_differentiated, z_weight=z_weight, chunk=chunk))(
        arguments
    )
    np.testing.assert_allclose(np.array(evaluated), expected, rtol=2e-6)
    np.testing.assert_allclose(np.array(trained), expected, rtol=2e-6)

    def close(ours: Any, theirs: np.ndarray) -> None:
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6 * np.abs(theirs).max())

    jax.tree.map(close, gradients, expected_gradients)
    assert not np.asarray(gradients[1].table)[VOCABULARY:].any()
    assert not np.asarray(gradients[0])[arguments.weights == 0].any()


def test_no_weight_at_all_is_zero() -> None:
    """Sums and gradients of a batch in which nothing is predicted are 0."""
    arguments = inputs(bias=True)._replace(weights=np.zeros((ROWS, SEQUENCE), np.float32))
    results = evaluated_and_differentiated(arguments, z_weight=0.1, chunk=24)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(results))


def test_only_the_total_carries_a_gradient_and_it_is_scaled() -> None:
    """The gradient of total / count is that of total, divided."""
    arguments, static = inputs(bias=True), {"z_weight": 0.1, "chunk": 24}
    total = jax.grad(lambda *x: total_and_sums(*x, **static)[0], argnums=(0, 1))(*arguments)
    mean = jax.grad(lambda *x: total_and_sums(*x, **static)[0] / 77, argnums=(0, 1))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a / 77, b, rtol=1e-5, atol=1e-7), total, mean)


def test_bfloat16_is_as_exact_as_its_rounding() -> None:
    """Logits, softmax and sums are float32: the sums are exact for the rounded inputs, gradients to a rounding."""
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, inputs(bias=False))
    arguments = rounded._replace(weights=inputs(bias=False).weights)
    wide = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x, arguments)
    expected, expected_gradients = exact(wide, 0.1)
    evaluated, trained, gradients = evaluated_and_differentiated(arguments, z_weight=0.1, chunk=8)
    for sums in (evaluated, trained):
        np.testing.assert_allclose(np.array(sums), expected, rtol=2e-6)

    def close(ours: Any, theirs: np.ndarray) -> None:
        assert ours.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(ours, np.float64) - theirs) < 2**-8 * np.linalg.norm(theirs)

    jax.tree.map(close, gradients, expected_gradients)


@pytest.mark.parametrize("chunk", [8, 7, 24])
def test_all_logits_never_exist(chunk: int) -> None:
    """The largest array computed, forward and backward, is the logits of one chunk."""
    function = partial(evaluated_and_differentiated, z_weight=0.1, chunk=chunk)
    largest = max(map(math.prod, tiny.traced_shapes(function, inputs(bias=True))))
    assert largest == ROWS * chunk * PADDED


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}], ids=["fsdp 8", "fsdp 2 x tensor 4"])
def test_eight_devices(axes: dict[str, int]) -> None:
    """The same sums and gradients, and gradients of the output exchanged once, not for each chunk."""
    arguments = inputs(bias=True)
    mesh = make_mesh(MeshConfig(**axes), jax.devices())

    def place(x: np.ndarray, *axes: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    table, bias = arguments.output.table, arguments.output.bias
    placed = Inputs(
        place(arguments.hidden, "fsdp"),
        Output(place(table, "tensor"), place(bias, "tensor")),
        place(arguments.targets, "fsdp"),
        place(arguments.weights, "fsdp"),
    )
    with jax.set_mesh(mesh):
        function = jax.jit(partial(evaluated_and_differentiated, z_weight=0.1, chunk=7))
        compiled = function.lower(placed).compile()
        results = compiled(placed)
    expected, expected_gradients = exact(arguments, 0.1)
    for sums in results[:2]:
        np.testing.assert_allclose(np.array(sums), expected, rtol=2e-6)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6 * np.abs(theirs).max()),
        results[2],
        expected_gradients,
    )
    read = collectives(read_program(compiled.as_text()), mesh.shape)
    exchanged = sum(collective.payload_bytes for collective in read if "fsdp" in collective.axes)
    once = 4 * PADDED * EMBED // axes.get("tensor", 1)
    assert once <= exchanged < 1.5 * once
