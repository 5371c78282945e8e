"""What blocks are made of: parameters that know their axes, linear maps, norms, rotary embeddings, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config.model import ModelConfig, RopeConfig
from jaxscale.parallel.sharding import constrain
from jaxscale.precision import product


class Parameter(nnx.Param[jax.Array]):
    """A trainable array that knows its logical axes.

    Metadata: `axes`, the logical name of each axis of one layer's array; `inner`, how many leading axes a matrix
    product contracts (0 for vectors: scales and biases); `stacked`, whether an axis of layers stands before `axes`.
    """

    def used(self, dtype: Any) -> jax.Array:
        """The array as a layer computes with it: cast first, then gathered, so that what travels is the small dtype."""
        return constrain(self[...].astype(dtype), *self.axes)


@dataclass(frozen=True)
class ParameterAxes:
    """What the rest of the system knows of a parameter: enough for sharding, decay masks and matrix optimizers."""

    names: tuple[str, ...]
    inner: int
    """Leading axes (after "layers") that a matrix product contracts; 0 for a vector."""

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a matrix (or a stack of them) rather than a vector of scales or biases."""
        return self.inner > 0


def parameter_axes(parameters: nnx.State) -> dict[str, Any]:
    """The ParameterAxes of each parameter, as a nested dict with the paths of the parameters."""

    def describe(parameter: Parameter) -> ParameterAxes:
        names = (("layers",) if parameter.stacked else ()) + tuple(parameter.axes)
        return ParameterAxes(names, parameter.inner)

    flat = {path: describe(parameter) for path, parameter in nnx.to_flat_state(parameters)}
    return nnx.traversals.unflatten_mapping(flat)


def parameter(value: jax.Array, axes: Sequence[str], inner: int) -> Parameter:
    """A Parameter of one layer; `stack` marks those that it stacks."""
    return Parameter(value, axes=tuple(axes), inner=inner, stacked=False)


def vocabulary_table(rngs: nnx.Rngs, config: ModelConfig) -> Parameter:
    """A table `[padded vocabulary, embed] float32` whose padding is zero."""
    rows = config.padded_vocabulary
    values = config.initializer_scale * jax.random.normal(rngs.params(), (rows, config.embed_dim))
    real = jnp.arange(rows)[:, None] < config.vocabulary_size
    return parameter(jnp.where(real, values, 0), ("vocabulary", "embed"), inner=1)


class Linear(nnx.Module):
    """A linear map from the last axes of its input to new axes, with an optional bias."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        inner: dict[str, int],
        outer: dict[str, int],
        *,
        scale: float,
        bias: bool,
        dtype: jnp.dtype,
    ) -> None:
        """`inner` and `outer` map logical axis names to sizes; `scale` is the standard deviation of the kernel."""
        shape = (*inner.values(), *outer.values())
        self.kernel = parameter(
            scale * jax.random.normal(rngs.params(), shape), (*inner.keys(), *outer.keys()), inner=len(inner)
        )
        self.bias = parameter(jnp.zeros(tuple(outer.values())), tuple(outer.keys()), inner=0) if bias else None
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *inner] -> [..., *outer] in the compute dtype."""
        y = product(x, self.kernel.used(self.dtype), contracted=self.kernel.inner)
        return y if self.bias is None else y + self.bias.used(self.dtype)


class Norm(nnx.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last axis, computed in float32."""

    def __init__(self, config: ModelConfig, axis: str, size: int, *, kind: str, dtype: jnp.dtype) -> None:
        self.scale = parameter(jnp.ones((size,)), (axis,), inner=0)
        self.bias = parameter(jnp.zeros((size,)), (axis,), inner=0) if kind == "layer" else None
        self.epsilon = config.norm_epsilon
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in the compute dtype."""
        x = x.astype(jnp.float32)
        if self.bias is not None:
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        x = x * self.scale.used(jnp.float32)
        if self.bias is not None:
            x = x + self.bias.used(jnp.float32)
        return x.astype(self.dtype)


def rope_tables(positions: jax.Array, head_dim: int, config: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles (arXiv 2104.09864), with the frequency scaling of Llama 3.1.

    Args:
        positions: `[batch, sequence] int32`.
        head_dim: even width of a head.

    Returns:
        Two `[batch, sequence, head_dim / 2] float32`: angles lose their meaning in shorter formats.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = config.theta**-exponents
    if config.scaling_factor > 1:
        # Llama 3.1: rotations longer than the original context are slowed down, short ones kept, the rest blended.
        turns = config.original_length * frequencies / (2 * math.pi)
        kept = (turns - config.low_frequency_factor) / (config.high_frequency_factor - config.low_frequency_factor)
        kept = jnp.clip(kept, 0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / config.scaling_factor
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """x `[batch, sequence, heads, head_dim]` rotated in float32; the halves of a head are the pairs (half-split)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    rotated = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return rotated.astype(x.dtype)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Inverted dropout of x `[batch, sequence, embed]` with one key a row, so that a mask follows its row.

    `keys` is `[batch]` PRNG keys, or None where nothing is dropped (evaluation, generation).
    """
    if rate == 0 or keys is None:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
