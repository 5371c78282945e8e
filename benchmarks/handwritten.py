"""The step as one would write it by hand: plain JAX and optax in a hundred lines, jitted once.

Its layers are a Python loop, which is faster for a few of them; `--scanned` loops over stacked layers in the program,
as one would for a model of many.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import workload
from benchmarks.workload import Preset, Weights

Params = dict[str, Any]


def make_params(weights: Weights, *, scanned: bool) -> Params:
    """Arrays on the device; the layers as a list, or stacked."""
    arrays = {name: jnp.asarray(value) for name, value in weights.items()}
    outside = {name: arrays.pop(name) for name in ("embedding", "final_norm", "head")}
    if scanned:
        return {"layers": arrays, **outside}
    layers = [{name: value[i] for name, value in arrays.items()} for i in range(len(arrays["query"]))]
    return {"layers": layers, **outside}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """[..., embed] -> [..., embed]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + workload.NORM_EPSILON) * scale


def rope_tables(length: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[length, 1, head_dim / 2]`."""
    frequencies = workload.ROPE_THETA ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles = jnp.arange(length)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """[batch, sequence, heads, head_dim] -> the same."""
    cosines, sines = rope
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def attention(x: jax.Array, layer: Params, rope: tuple[jax.Array, jax.Array], heads: int) -> jax.Array:
    """Causal self-attention, [batch, sequence, embed] -> the same."""
    batch, length, embed = x.shape
    queries, keys, values = (
        (x @ layer[name]).reshape(batch, length, heads, embed // heads) for name in ("query", "key", "value")
    )
    queries, keys = rotate(queries, rope), rotate(keys, rope)
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / jnp.sqrt(embed // heads)
    causal = jnp.tril(jnp.ones((length, length), bool))
    probabilities = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, values)
    return mixed.reshape(batch, length, embed) @ layer["output"]


def mlp(x: jax.Array, layer: Params) -> jax.Array:
    """SwiGLU, [batch, sequence, embed] -> the same."""
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def loss_of(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    """Mean cross-entropy of the next tokens of `tokens` [batch, sequence]."""
    x = params["embedding"][tokens]
    rope = rope_tables(tokens.shape[1], x.shape[-1] // heads)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = x + attention(rms_norm(x, layer["attention_norm"]), layer, rope, heads)
        return x + mlp(rms_norm(x, layer["mlp_norm"]), layer), None

    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x, _ = block(x, layer)
    else:
        x, _ = jax.lax.scan(block, x, params["layers"])
    logits = rms_norm(x, params["final_norm"]) @ params["head"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, axis=1))
    return losses[:, :-1].mean()


def make_optimizer() -> optax.GradientTransformation:
    """Clipped AdamW with decay on matrices."""
    adamw = optax.adamw(
        workload.LEARNING_RATE,
        b1=workload.BETA1,
        b2=workload.BETA2,
        eps=workload.EPSILON,
        weight_decay=workload.WEIGHT_DECAY,
        mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, params),
    )
    return optax.chain(optax.clip_by_global_norm(workload.CLIP_NORM), adamw)


@partial(jax.jit, static_argnames=("optimizer", "heads"), donate_argnames=("params", "state"))
def train_step(
    params: Params, state: optax.OptState, tokens: jax.Array, optimizer: optax.GradientTransformation, heads: int
) -> tuple[Params, optax.OptState, jax.Array]:
    """One update."""
    loss, gradient = jax.value_and_grad(loss_of)(params, tokens, heads)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


class Training:
    """Parameters, optimizer state and data of a run; calling it does one step and returns its loss."""

    def __init__(self, preset: Preset, *, scanned: bool) -> None:
        self.heads = preset.heads
        self.params = make_params(workload.first_weights(preset), scanned=scanned)
        self.optimizer = make_optimizer()
        self.state = self.optimizer.init(self.params)
        self.batches = workload.batches(preset)

    def __call__(self) -> jax.Array:
        """One update."""
        tokens = jnp.asarray(next(self.batches))
        self.params, self.state, loss = train_step(self.params, self.state, tokens, self.optimizer, self.heads)
        return loss


if __name__ == "__main__":
    options = workload.arguments()
    workload.serve(Training(workload.PRESETS[options.preset], scanned=options.scanned), float, {"jax": jax.__version__})
