"""Rotary tables, norms, dropout and rematerialisation."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config.model import ModelConfig, RopeConfig
from jaxscale.model.attention import Mask
from jaxscale.model.layers import Norm, dropout, rope_tables, rotate
from jaxscale.model.objective import row_keys
from tests import tiny

HEAD_DIM, POSITIONS = 128, 8192


def exact_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position, in float64, by the description of Llama 3.1.

    A pair of dimensions i turns by theta^(-2i / head_dim) a position. A turn takes a wavelength of positions: pairs
    with a wavelength above original_length / low_frequency_factor are slowed down by the factor, those below
    original_length / high_frequency_factor kept, and those between blended, linearly in original_length / wavelength.
    """
    frequencies = []
    for i in range(head_dim // 2):
        frequency = config.theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > config.original_length / config.low_frequency_factor:
            frequency /= config.scaling_factor
        elif wavelength > config.original_length / config.high_frequency_factor:
            low, high = config.low_frequency_factor, config.high_frequency_factor
            smooth = (config.original_length / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / config.scaling_factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


@pytest.mark.parametrize(
    "config",
    [
        RopeConfig(theta=1e4),
        RopeConfig(theta=5e5),
        RopeConfig(theta=5e5, scaling_factor=8.0),
        RopeConfig(theta=5e5, scaling_factor=32.0, low_frequency_factor=2.0, original_length=1024),
    ],
    ids=["theta 1e4", "theta 5e5", "Llama 3.1", "other factors"],
)
def test_rope_tables_are_exact(config: RopeConfig) -> None:
    """To 1e-3 over 8,192 positions: float32 angles, whatever the compute dtype."""
    positions = np.arange(POSITIONS)
    cosines, sines = rope_tables(jnp.asarray(positions, jnp.int32)[None], HEAD_DIM, config)
    assert cosines.dtype == sines.dtype == jnp.float32
    angles = positions[:, None] * exact_frequencies(config, HEAD_DIM)
    np.testing.assert_allclose(cosines[0], np.cos(angles), rtol=0, atol=1e-3)
    np.testing.assert_allclose(sines[0], np.sin(angles), rtol=0, atol=1e-3)


def test_rotation_pairs_the_halves_of_a_head() -> None:
    """Dimension i turns with dimension i + head_dim / 2, counter-clockwise, by the angle of pair i."""
    x = np.random.default_rng(1).normal(size=(1, 16, 2, 8)).astype(np.float32)
    angles = np.arange(16)[:, None] * exact_frequencies(RopeConfig(), 8)
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[None, :, None]
    tables = rope_tables(jnp.arange(16)[None], 8, RopeConfig())
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x), *tables), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_a_score_depends_on_the_distance_alone(theta: float) -> None:
    """In bfloat16 too: a query and a key at (0, 5) and at (8000, 8005), to the rounding of bfloat16."""
    random = np.random.default_rng(2)
    query, key = (jnp.asarray(random.normal(size=(1, 2, 64, HEAD_DIM)), jnp.bfloat16) for _ in range(2))
    query, key = (jnp.broadcast_to(x[:, :1], x.shape) for x in (query, key))

    def rotated(x: jax.Array, positions: list[int]) -> jax.Array:
        result = rotate(x, *rope_tables(jnp.array([positions], jnp.int32), HEAD_DIM, RopeConfig(theta=theta)))
        assert result.dtype == jnp.bfloat16
        return result.astype(jnp.float32)

    near, far = jnp.einsum("bshd,bshd->sh", rotated(query, [0, 8000]), rotated(key, [5, 8005])) / math.sqrt(HEAD_DIM)
    other, _ = jnp.einsum("bshd,bshd->sh", rotated(query, [0, 0]), rotated(key, [6, 6])) / math.sqrt(HEAD_DIM)
    assert np.abs(near - far).max() < 0.02
    assert np.abs(near - other).max() > 0.2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms(kind: str, dtype: Any) -> None:
    """Against the formulas in float64, on inputs whose squares would lose their meaning in bfloat16."""
    random = np.random.default_rng(3)
    x = jnp.asarray(100 + random.normal(size=(2, 3, 64)), dtype)
    scale, bias = random.normal(size=(2, 64))
    norm = Norm(
        ModelConfig.model_validate({**tiny.DECODER, "norm_epsilon": 1e-2}),
        "embed",
        64,
        kind=kind,
        dtype=jnp.dtype(dtype),
    )
    norm.scale[...] = jnp.asarray(scale, jnp.float32)
    wide = np.asarray(x, np.float64)
    if kind == "layer":
        assert norm.bias is not None
        norm.bias[...] = jnp.asarray(bias, jnp.float32)
        wide = wide - wide.mean(axis=-1, keepdims=True)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-2) * scale + (bias if kind == "layer" else 0)
    assert norm(x).dtype == dtype
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), expected, **tolerance(dtype))


def tolerance(dtype: Any) -> dict[str, float]:
    return {"rtol": 2e-4, "atol": 2e-4} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-6}


DROPPED = {
    **tiny.DECODER,
    "embed_dim": 32,
    "heads": 2,
    "kv_heads": 2,
    "mlp_dim": 32,
    "layers": 3,
    "dropout": 0.25,
    "norm": "layer",
    "bias": True,
}


def keys(step: int, rows: int = 4) -> jax.Array:
    """The keys of the rows of one microstep, as the training step makes them."""
    return row_keys(jax.random.key(step), jnp.zeros(2, jnp.uint32), (1, rows))[0]


def test_dropout_keeps_the_mean() -> None:
    """A quarter of the elements is zero, the others are scaled up by 4 / 3."""
    dropped = np.asarray(dropout(jnp.ones((4, 64, 128)), 0.25, keys(0)))
    assert set(np.unique(dropped)) == {0, np.float32(4 / 3)}
    assert abs((dropped == 0).mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / dropped.size)
    for row, other in itertools.combinations(dropped == 0, 2):
        assert abs((row == other).mean() - (0.25**2 + 0.75**2)) < 0.02, "rows have masks of their own"


def test_no_keys_or_no_rate_is_no_dropout() -> None:
    """Evaluation and generation have no keys; a rate of 0 changes nothing."""
    x = jnp.arange(8.0).reshape(1, 2, 4)
    np.testing.assert_array_equal(dropout(x, 0.25, None), x)
    np.testing.assert_array_equal(dropout(x, 0.0, keys(0, 1)), x)


def test_dropout_masks_of_a_model() -> None:
    """Masks differ by layer, by place in the layer, by row and by step; the same keys give the same masks.

    The model is one whose residual stream tells the masks. All its weights are zero but the embeddings, which are 1,
    and the biases that end its branches, which are 10, 100, ...: so an element of the stream is a number whose decimal
    digits say which masks have kept it.
    """
    run = tiny.make_run(tiny.config(DROPPED, mesh={"fsdp": 1}))
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), run.state.params)
    params["embedding"]["tokens"]["table"] += 1
    params["layers"]["attention"]["output"]["bias"] += np.array([[1e1], [1e3], [1e5]], np.float32)
    params["layers"]["mlp"]["down"]["bias"] += np.array([[1e2], [1e4], [1e6]], np.float32)

    @partial(jax.jit, compiler_options=tiny.QUICK)
    def stream(keys: jax.Array | None) -> jax.Array:
        model = tiny.merge(run, jax.tree.map(jnp.asarray, params))
        model.final_norm = None
        tokens = jnp.zeros((4, 64), jnp.int32)
        return model(tokens, tokens, Mask(causal=True), keys)

    def masks(keys: jax.Array) -> list[np.ndarray]:
        """For each of 7 places (the embeddings, two a layer) and each row, which elements are kept."""
        digits = np.rint(0.75 * np.asarray(stream(keys), np.float64)).astype(int)
        found = [digits[row] // 10**place % 10 for place in range(7) for row in range(4)]
        assert all(set(np.unique(mask)) == {0, 1} for mask in found)
        return found

    first, again, second = masks(keys(1)), masks(keys(1)), masks(keys(2))
    np.testing.assert_array_equal(first, again)
    for mask in (*first, *second):
        assert abs(mask.mean() - 0.75) < 0.05
    for one, other in itertools.combinations((*first, *second), 2):
        assert abs((one == other).mean() - (0.25**2 + 0.75**2)) < 0.07
    np.testing.assert_array_equal(np.unique(stream(None)), [1111111])


REMAT = ("none", "dots", "full")


@cache
def gradients(remat: str) -> tuple[Any, Any]:
    """Loss and gradients of a model with dropout."""
    run = tiny.make_run(tiny.config({**DROPPED, "remat": remat}, mesh={"fsdp": 1}))

    def loss(params: Any) -> jax.Array:
        examples = tiny.examples(run, tiny.host_batch(run))
        return run.objective.loss(tiny.merge(run, params), examples, keys(0, 8))[0] / 300

    return jax.jit(jax.value_and_grad(loss), compiler_options=tiny.QUICK)(tiny.random_params(run))


@pytest.mark.parametrize("remat", REMAT[1:])
def test_rematerialisation_changes_no_number(remat: str) -> None:
    """The same loss and gradients, dropout masks included."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients("none"), gradients(remat)
    )


WIDE = {**tiny.DECODER, "layers": 3, "embed_dim": 80, "heads": 5, "kv_heads": 5, "head_dim": 16, "mlp_dim": 176}


@pytest.mark.parametrize(("remat", "compute"), [("none", "float32"), ("none", "bfloat16"), ("dots", "bfloat16")])
def test_no_policy_keeps_gathered_parameters(remat: str, compute: str) -> None:
    """Under fsdp, a parameter of all layers at once exists only sharded: its layers are gathered one at a time."""
    config = tiny.config({**WIDE, "remat": remat}, mesh={"fsdp": 8}, precision={"compute": compute})
    run = tiny.make_run(config)
    program = run.lower_train_step(run.batch(0)).compile(compiler_options=tiny.QUICK).as_text()
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"[a-z0-9]+\[([\d,]+)\]", program)}
    up, query = (80, 176), (80, 5, 16)
    assert {up, (3, 10, 176), (3, 10, 5, 16)} <= shapes, "gathered for a layer, sharded for all"
    assert not shapes & {(3, *up), (3, *query), (3, 80, 80)}
