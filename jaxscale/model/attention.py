"""Attention behind one signature: `attention(queries, keys, values, mask)`.

`blockwise` is the reference for every other implementation: plain JAX, any mask, any device, and never a whole score
matrix. cuDNN's fused kernel is taken where the mesh's devices are GPUs and the mask is one that it can honour; an
implementation that cannot honour a mask is refused, never silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config.errors import Refused
from jaxscale.config.schema import ModelConfig
from jaxscale.model.layers import Linear, Norm, rotate
from jaxscale.parallel.sharding import constrain
from jaxscale.precision import einsum_float32

BLOCK = 128
"""Queries whose scores exist at one time."""
BANDS = 16
"""Most parts into which the queries are cut, each of which sees only the keys that its causal mask allows."""
MASKED = float(jnp.finfo(jnp.float32).min)
"""Score of a pair that must not attend; finite, so that a row of nothing but masked pairs gives no NaN."""


@partial(jax.tree_util.register_dataclass, data_fields=("segments", "lengths"), meta_fields=("causal",))
@dataclass(frozen=True)
class Mask:
    """Which keys a query may see.

    Attributes:
        causal: only those at its own position and before.
        segments: `[batch, sequence] int32`: only those with its own number (documents; -1 is padding). None: any.
        lengths: `[batch] int32`: only the first so many of the row (padding, where segments is None). None: any.
    """

    causal: bool
    segments: jax.Array | None = None
    lengths: jax.Array | None = None


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far, each `[batch, longest, kv_heads, head_dim]` in the compute dtype."""

    keys: jax.Array
    values: jax.Array


class Attention(nnx.Module):
    """Multi-head attention with grouped queries (arXiv 2305.13245), rotary positions and query/key norms as configured."""

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
    chosen = choose_implementation(implementation, _platform(), documents=mask.segments is not None, dtype=queries.dtype)
    if chosen == "cudnn":
        return jax.nn.dot_product_attention(
            queries,
            keys,
            values,
            is_causal=mask.causal,
            query_seq_lengths=mask.lengths,
            key_value_seq_lengths=mask.lengths,
            implementation="cudnn",
        )
    return blockwise(queries, keys, values, mask)


def choose_implementation(asked: str, platform: str, *, documents: bool, dtype: jnp.dtype) -> str:
    """"cudnn" or "blockwise", by what the devices (`platform`) and the mask allow.

    cuDNN's kernel has no document mask but a bias of the size of the scores, and no float32.

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
    if asked == "cudnn" and obstacles:
        raise Refused(f'model.attention = "cudnn" cannot be used: {"; ".join(obstacles)}; use "auto" or "blockwise"')
    return "blockwise" if obstacles or asked == "blockwise" else "cudnn"


def _platform() -> str:
    """Platform of the ambient mesh's devices, which need not be the process's own (when compiling for absent ones)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def attend_to_cache(queries: jax.Array, cache: Cache, seen: jax.Array | int) -> jax.Array:
    """Causal attention of the tokens `seen`, `seen` + 1, ... to a cache that holds their keys and values already."""
    batch, length, heads, head_dim = queries.shape
    kv_heads = cache.keys.shape[2]
    grouped, keys, values = _grouped(queries, kv_heads), _heads_first(cache.keys), _heads_first(cache.values)
    allowed = jnp.arange(keys.shape[2])[None, :] <= seen + jnp.arange(length)[:, None]
    mixed, _ = _attend(grouped / math.sqrt(head_dim), keys, values, allowed)
    return _ungrouped(mixed.astype(queries.dtype))


def blockwise(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: Mask) -> jax.Array:
    """Exact attention, a block of queries at a time (shapes as `attention`).

    Forward keeps the output and each query's log-normaliser; backward computes the scores again from them, as in
    FlashAttention (arXiv 2205.14135, algorithms 1 and 4). So no pass holds more than BLOCK x sequence scores a head.
    """
    segments = mask.segments
    if segments is None and mask.lengths is not None:
        real = jnp.arange(queries.shape[1])[None, :] < mask.lengths[:, None]
        segments = jnp.where(real, 0, -1)
    kv_heads, head_dim = keys.shape[2:]
    grouped = _grouped(queries / math.sqrt(head_dim), kv_heads)
    mixed = _blockwise(grouped, _heads_first(keys), _heads_first(values), segments, mask.causal)
    return _ungrouped(mixed)


def _heads_first(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


def _grouped(queries: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, sequence, heads, head_dim] -> [batch, kv_heads, heads / kv_heads, sequence, head_dim]."""
    batch, length, heads, head_dim = queries.shape
    return jnp.transpose(queries.reshape(batch, length, kv_heads, heads // kv_heads, head_dim), (0, 2, 3, 1, 4))


def _ungrouped(x: jax.Array) -> jax.Array:
    batch, kv_heads, group, length, head_dim = x.shape
    return jnp.transpose(x, (0, 3, 1, 2, 4)).reshape(batch, length, kv_heads * group, head_dim)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(
    queries: jax.Array, keys: jax.Array, values: jax.Array, segments: jax.Array | None, causal: bool
) -> jax.Array:
    """[batch, kv_heads, group, sequence, head_dim] from scaled queries of that shape, keys and values without group."""
    return _forward(queries, keys, values, segments, causal)[0]


def _forward(
    queries: jax.Array, keys: jax.Array, values: jax.Array, segments: jax.Array | None, causal: bool
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    mixed, normalisers = [], []
    for rows, seen in _bands(queries.shape[3], causal):
        k, v = keys[:, :, :seen], values[:, :, :seen]

        def block(start: jax.Array, q: jax.Array, k=k, v=v, seen=seen) -> tuple[jax.Array, jax.Array]:
            return _attend(q, k, v, _allowed(start, q.shape[3], seen, segments, causal))

        out, normaliser = _each_block(block, rows, queries)
        mixed.append(out)
        normalisers.append(normaliser)
    out = jnp.concatenate(mixed, axis=3).astype(queries.dtype)
    return out, (queries, keys, values, segments, out, jnp.concatenate(normalisers, axis=3))


def _backward(
    causal: bool, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    queries, keys, values, segments, out, normalisers = saved
    # Row sums of probabilities x their gradients (FlashAttention, algorithm 4, line 4).
    sums = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    d_queries = []
    d_keys = jnp.zeros(keys.shape, jnp.float32)
    d_values = jnp.zeros(values.shape, jnp.float32)
    for rows, seen in _bands(queries.shape[3], causal):
        k, v = keys[:, :, :seen], values[:, :, :seen]

        def block(start, q, normaliser, g, s, k=k, v=v, seen=seen):
            allowed = _allowed(start, q.shape[3], seen, segments, causal)
            scores = einsum_float32("bkgqd,bksd->bkgqs", q, k)
            weights = jnp.where(allowed, jnp.exp(scores - normaliser), 0)
            d_weights = einsum_float32("bkgqd,bksd->bkgqs", g, v)
            d_scores = (weights * (d_weights - s)).astype(q.dtype)
            d_q = einsum_float32("bkgqs,bksd->bkgqd", d_scores, k)
            d_k = einsum_float32("bkgqs,bkgqd->bksd", d_scores, q)
            d_v = einsum_float32("bkgqs,bkgqd->bksd", weights.astype(q.dtype), g)
            return d_q, d_k, d_v

        d_q, d_k, d_v = _each_block(block, rows, queries, normalisers, gradient, sums, summed=2)
        d_queries.append(d_q)
        d_keys = d_keys.at[:, :, :seen].add(d_k)
        d_values = d_values.at[:, :, :seen].add(d_v)
    d_queries = jnp.concatenate(d_queries, axis=3)
    return d_queries.astype(queries.dtype), d_keys.astype(keys.dtype), d_values.astype(values.dtype), None


_blockwise.defvjp(_forward, _backward)


def _bands(length: int, causal: bool) -> Iterator[tuple[range, int]]:
    """Cuts the queries into at most BANDS bands of whole blocks (and a rest): (their indices, number of keys seen)."""
    if not causal:
        whole = length - length % BLOCK
        yield from ((rows, length) for rows in (range(0, whole), range(whole, length)) if rows)
        return
    band = math.ceil(math.ceil(length / BANDS) / BLOCK) * BLOCK
    whole = length - length % BLOCK
    starts = [*range(0, whole, band), whole, length]
    yield from ((range(a, b), b) for a, b in zip(starts, starts[1:], strict=False) if b > a)


def _each_block(block, rows: range, *arrays: jax.Array, summed: int = 0):
    """`block(start, *parts)` for each block of queries in a band; its last `summed` results are added up over blocks.

    A band of one block is computed directly; more are a loop, so that only one block's scores exist at a time.
    """
    parts = [x[:, :, :, rows.start : rows.stop] for x in arrays]
    count = max(1, len(rows) // BLOCK)
    if count == 1:
        return block(rows.start, *parts)
    blocks = [jnp.moveaxis(x.reshape(*x.shape[:3], count, BLOCK, x.shape[4]), 3, 0) for x in parts]
    starts = rows.start + BLOCK * jnp.arange(count)
    shapes = jax.eval_shape(block, starts[0], *(x[0] for x in blocks))
    kept = len(shapes) - summed

    def body(totals, inputs):
        results = block(*inputs)
        return jax.tree.map(jnp.add, totals, results[kept:]), results[:kept]

    zeros = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes[kept:])
    totals, results = jax.lax.scan(body, zeros, (starts, *blocks))
    joined = [jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], len(rows), x.shape[5]) for x in results]
    return (*joined, *totals)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of one block: output and log-normaliser `[..., queries, 1]`, both float32."""
    scores = jnp.where(allowed, einsum_float32("bkgqd,bksd->bkgqs", q, k), MASKED)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = einsum_float32("bkgqs,bksd->bkgqd", weights.astype(v.dtype), v) / total
    return mixed, largest + jnp.log(total)


def _allowed(
    start: jax.Array | int, count: int, seen: int, segments: jax.Array | None, causal: bool
) -> jax.Array | bool:
    """Which of the first `seen` keys each of `count` queries from `start` on may see; broadcasts to the scores."""
    allowed: jax.Array | bool = True
    if causal:
        allowed = jnp.arange(seen)[None, :] <= start + jnp.arange(count)[:, None]
    if segments is not None:
        own = jax.lax.dynamic_slice_in_dim(segments, start, count, axis=1)
        same = own[:, :, None] == segments[:, None, :seen]
        allowed = same[:, None, None] & allowed
    return allowed

