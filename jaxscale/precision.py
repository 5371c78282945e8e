"""Number formats, and the one function through which every matrix product of a layer goes."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxscale.config.schema import PrecisionConfig


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Parameters and optimizer state are float32, so that small updates are not lost to rounding; norms, softmax, losses,
    sums over tokens and the sum of gradients over microsteps are float32 too. Matrix products and the activations
    between them are in `compute`, and so is what the matrix products of the backward pass give: the gradient of a
    matrix, within one microstep and between devices.
    """

    compute: jnp.dtype


def resolve_precision(config: PrecisionConfig, platform: str) -> Precision:
    """The dtypes on `platform` (of the mesh's devices: "cpu", "gpu"); `auto` computes in bfloat16 on GPUs only."""
    if config.compute == "auto":
        return Precision(compute=jnp.dtype(jnp.bfloat16 if platform == "gpu" else jnp.float32))
    return Precision(compute=jnp.dtype(config.compute))


def product(x: jax.Array, kernel: jax.Array, contracted: int = 1) -> jax.Array:
    """x contracted over its last axes with the first axes of a kernel: [..., a] x [a, b] -> [..., b].

    Args:
        x: activations `[..., *inner]` in the compute dtype.
        kernel: `[*inner, *outer]` in the compute dtype.
        contracted: number of inner axes.

    Returns:
        `[..., *outer]` in the compute dtype, summed in float32. Float32 means float32: no reduced-precision passes.
    """
    first = x.ndim - contracted
    dimensions = ((tuple(range(first, x.ndim)), tuple(range(contracted))), ((), ()))
    return jax.lax.dot_general(x, kernel, dimensions, precision=_passes(x.dtype))


def einsum_float32(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two arrays in the compute dtype, summed and returned in float32: attention scores and logits."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32, precision=_passes(a.dtype))


def _passes(dtype: jnp.dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
