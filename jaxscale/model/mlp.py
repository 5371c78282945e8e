"""The position-wise part of a block: a gated (SwiGLU) or a plain two-matrix MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config.model import ModelConfig
from jaxscale.model.layers import Linear
from jaxscale.parallel.sharding import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""By `ModelConfig.activation`; SwiGLU (arXiv 2002.05202) multiplies its SiLU by a linear gate."""


class Mlp(nnx.Module):
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)) for SwiGLU."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, *, output_scale: float, dtype: jnp.dtype) -> None:
        embed, mlp = {"embed": config.embed_dim}, {"mlp": config.mlp_dim}
        scale, bias = config.initializer_scale, config.bias
        gated = config.activation == "swiglu"
        self.gate = Linear(rngs, embed, mlp, scale=scale, bias=bias, dtype=dtype) if gated else None
        self.up = Linear(rngs, embed, mlp, scale=scale, bias=bias, dtype=dtype)
        self.down = Linear(rngs, mlp, embed, scale=output_scale, bias=bias, dtype=dtype)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, embed] -> the same, in the compute dtype."""
        activation = ACTIVATIONS[self.activation]
        hidden = activation(self.up(x)) if self.gate is None else activation(self.gate(x)) * self.up(x)
        return self.down(constrain(hidden, "batch", "sequence", "mlp"))
