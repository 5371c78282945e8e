"""Attention behind one signature: `attention(queries, keys, values, mask)`.

`blockwise.py` is the reference for every other implementation: plain JAX, any mask, any device, and never a whole
score matrix. cuDNN's fused kernel is taken where the mesh's devices are GPUs and the mask is one that it can honour; an
implementation that cannot honour a mask is refused, never silently wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config.errors import Refused
from jaxscale.config.model import ModelConfig
from jaxscale.model.blockwise import Mask, blockwise, whole
from jaxscale.model.layers import Linear, Norm, rotate
from jaxscale.parallel.sharding import constrain

CUDNN_HEAD_DIM = 128
"""Widest head that cuDNN's attention has a kernel for on every GPU that has one at all."""


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far, each `[batch, longest, kv_heads, head_dim]` in the compute dtype."""

    keys: jax.Array
    values: jax.Array


class Attention(nnx.Module):
    """Multi-head attention with grouped queries (arXiv 2305.13245); rotary positions and norms as configured."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, *, output_scale: float, dtype: jnp.dtype) -> None:
        head_dim = config.width_of_head
        heads = {"heads": config.heads, "head_dim": head_dim}
        kv_heads = {"kv_heads": config.key_value_heads, "head_dim": head_dim}
        embed = {"embed": config.embed_dim}
        scale, bias = config.initializer_scale, config.bias
        self.query = Linear(rngs, embed, heads, scale=scale, bias=bias, dtype=dtype)
        self.key = Linear(rngs, embed, kv_heads, scale=scale, bias=bias, dtype=dtype)
        self.value = Linear(rngs, embed, kv_heads, scale=scale, bias=bias, dtype=dtype)
        self.output = Linear(rngs, heads, embed, scale=output_scale, bias=bias, dtype=dtype)
        normed = config.query_key_norm
        self.query_norm = Norm(config, "head_dim", head_dim, kind="rms", dtype=dtype) if normed else None
        self.key_norm = Norm(config, "head_dim", head_dim, kind="rms", dtype=dtype) if normed else None
        self.implementation = config.attention

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array] | None,
        mask: Mask,
        cache: Cache | None = None,
        seen: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None]:
        """Attend within x, or from x to all that a cache holds.

        Args:
            x: `[batch, sequence, embed]` in the compute dtype.
            rope: cosines and sines for the positions of x, or None.
            mask: which keys each query sees; without a cache only.
            cache: keys and values of the `seen` tokens before x; those of x are added.
            seen: number of tokens in the cache.

        Returns:
            `[batch, sequence, embed]` and the cache with the keys and values of x.
        """
        queries, keys, values = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if rope is not None:
            queries, keys = rotate(queries, *rope), rotate(keys, *rope)
        queries = constrain(queries, "batch", "sequence", "heads", "head_dim")
        keys = constrain(keys, "batch", "sequence", "kv_heads", "head_dim")
        values = constrain(values, "batch", "sequence", "kv_heads", "head_dim")
        if cache is None:
            mixed = attention(queries, keys, values, mask, implementation=self.implementation)
        else:
            start = (0, seen, 0, 0)
            cache = Cache(
                jax.lax.dynamic_update_slice(cache.keys, keys, start),
                jax.lax.dynamic_update_slice(cache.values, values, start),
            )
            mixed = attend_to_cache(queries, cache, seen)
        return self.output(mixed), cache


def attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: Mask, *, implementation: str = "auto"
) -> jax.Array:
    """Softmax attention with scores scaled by 1 / sqrt(head_dim).

    Args:
        queries: `[batch, sequence, heads, head_dim]`.
        keys, values: `[batch, sequence, kv_heads, head_dim]`; each serves heads / kv_heads query heads.
        mask: which keys each query sees.
        implementation: as in `ModelConfig.attention`.

    Returns:
        `[batch, sequence, heads, head_dim]` in the dtype of the queries.

    Raises:
        Refused: the implementation asked for cannot honour the mask, or does not exist on the mesh's devices.
    """
    chosen = choose_implementation(
        implementation,
        _platform(),
        documents=mask.segments is not None,
        dtype=queries.dtype,
        head_dim=queries.shape[-1],
    )
    if chosen == "cudnn":
        # A row of nothing but padding keeps one key: its output counts nothing, but must not be 0 / 0.
        lengths = None if mask.lengths is None else jnp.maximum(mask.lengths, 1)
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            is_causal=mask.causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    return blockwise(queries, keys, values, mask)


def choose_implementation(asked: str, platform: str, *, documents: bool, dtype: jnp.dtype, head_dim: int) -> str:
    """Either "cudnn" or "blockwise", by what the devices (`platform`) and the mask allow.

    cuDNN's kernel has no document mask but a bias of the size of the scores, no float32, and heads of limited width.

    Raises:
        Refused: `asked` is "cudnn" where it cannot serve.
    """
    obstacles = []
    if platform != "gpu":
        obstacles.append(f"the mesh's devices are {platform} devices")
    if documents:
        obstacles.append("data.attend_across_documents = false needs a document mask")
    if dtype not in (jnp.bfloat16, jnp.float16):
        obstacles.append(f"precision.compute is {jnp.dtype(dtype).name}, it takes bfloat16")
    if head_dim > CUDNN_HEAD_DIM or head_dim % 8:
        obstacles.append(f"heads are {head_dim} wide, it takes multiples of 8 up to {CUDNN_HEAD_DIM}")
    if asked == "cudnn" and obstacles:
        raise Refused(f'model.attention = "cudnn" cannot be used: {"; ".join(obstacles)}; use "auto" or "blockwise"')
    return "blockwise" if obstacles or asked == "blockwise" else "cudnn"


def _platform() -> str:
    """Platform of the ambient mesh's devices, which need not be the process's own (when compiling for absent ones)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def attend_to_cache(queries: jax.Array, cache: Cache, seen: jax.Array | int) -> jax.Array:
    """Causal attention of the tokens `seen`, `seen` + 1, ... to a cache that holds their keys and values already."""
    length, longest = queries.shape[1], cache.keys.shape[1]
    allowed = jnp.arange(longest)[None, :] <= seen + jnp.arange(length)[:, None]
    return whole(queries, cache.keys, cache.values, allowed)
