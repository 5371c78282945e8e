"""One Transformer, which its config makes a Llama, a Qwen, a GPT-2 or a BERT.

    tokens -> embeddings -> block, block, ... (one stacked block, scanned) -> hidden states -> loss or logits

The model knows no mesh, no batch size and no process: it names the logical axes of what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config.model import ModelConfig
from jaxscale.model.attention import Attention, Cache, Mask
from jaxscale.model.layers import (
    Linear,
    Norm,
    Parameter,
    dropout,
    parameter,
    rope_tables,
    vocabulary_table,
)
from jaxscale.model.mlp import ACTIVATIONS, Mlp
from jaxscale.parallel.sharding import constrain
from jaxscale.precision import Precision, einsum_float32


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Rematerialisation policy: keep everything but casts and changes of layout, which are how a parameter is gathered.

    Kept for all layers, gathered parameters would be the whole model on each device; the backward pass gathers again.
    """
    return primitive.name not in ("convert_element_type", "sharding_constraint")


REMAT: dict[str, Callable[..., bool] | None] = {
    "none": keep_all_but_gathered,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,
}
"""What the backward pass of a block finds kept of its forward pass, by `ModelConfig.remat`."""


class Transformer(nnx.Module):
    """The whole model; `__call__` gives hidden states, from which `model/loss.py` and `logits` go on."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, precision: Precision) -> None:
        self.config = config
        self.dtype = precision.compute
        self.embedding = Embedding(rngs, config, dtype=self.dtype)
        self.layers = stack(lambda rngs: Block(rngs, config, dtype=self.dtype), config.layers, rngs)
        final = config.norm_placement == "pre"
        self.final_norm = _norm(config, self.dtype) if final else None
        self.head = Head(rngs, config, dtype=self.dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, mask: Mask, dropout_keys: jax.Array | None = None
    ) -> jax.Array:
        """Hidden states of whole rows, ready for the output matrix.

        Args:
            tokens: `[batch, sequence] int32`.
            positions: `[batch, sequence] int32`, from 0 in each document.
            mask: which tokens see which.
            dropout_keys: `[batch]` PRNG keys, one a row; None: no dropout.

        Returns:
            `[batch, sequence, embed]` in the compute dtype.
        """
        return self._run(tokens, positions, mask, dropout_keys, None, 0)[0]

    def extend(self, tokens: jax.Array, cache: Cache, seen: jax.Array | int) -> tuple[jax.Array, Cache]:
        """Hidden states of the tokens that follow the `seen` ones in a cache, and the cache with them.

        Args:
            tokens: `[batch, new] int32`, at positions `seen`, `seen` + 1, ...
            cache: `[layers, batch, longest, kv_heads, head_dim]` of `empty_cache`.
        """
        positions = jnp.broadcast_to(seen + jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, extended = self._run(tokens, positions, Mask(causal=True), None, cache, seen)
        assert extended is not None
        return hidden, extended

    def empty_cache(self, batch: int, longest: int) -> Cache:
        """Zeros for the keys and values of `longest` tokens in each of `batch` rows, over all layers."""
        config = self.config
        shape = (config.layers, batch, longest, config.key_value_heads, config.width_of_head)
        return Cache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))

    def output_table(self) -> Parameter:
        """The output matrix `[padded vocabulary, embed]`: its own or, if tied, the token embedding."""
        return self.embedding.tokens.table if self.head.table is None else self.head.table

    def logits(self, hidden: jax.Array) -> jax.Array:
        """All logits `[batch, sequence, vocabulary] float32` of hidden states; for generation and small tests."""
        table = self.output_table().used(self.dtype)
        logits = einsum_float32("bse,ve->bsv", hidden, table)
        if self.head.bias is not None:
            logits = logits + self.head.bias.used(jnp.float32)
        return logits[..., : self.config.vocabulary_size]

    def _run(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        mask: Mask,
        dropout_keys: jax.Array | None,
        cache: Cache | None,
        seen: jax.Array | int,
    ) -> tuple[jax.Array, Cache | None]:
        config = self.config
        x = self.embedding(tokens, positions, dropout_keys)
        rope = rope_tables(positions, config.width_of_head, config.rope) if config.positions == "rope" else None
        structure, weights = nnx.split(self.layers)

        # A loop is a boundary that common subexpressions cannot cross, so they need no barriers against it.
        @partial(jax.checkpoint, policy=REMAT[config.remat], prevent_cse=False)
        def block(x: jax.Array, layer: tuple[Any, jax.Array, Cache | None]) -> tuple[jax.Array, Cache | None]:
            weights, index, cache = layer
            keys = None if dropout_keys is None else jax.vmap(partial(jax.random.fold_in, data=index + 1))(dropout_keys)
            return nnx.merge(structure, weights)(x, rope, mask, keys, cache, seen)

        x, cache = jax.lax.scan(block, x, (weights, jnp.arange(config.layers), cache), unroll=config.unroll)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.head(x), cache


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream; norms before them (`pre`) or after the sums (`post`)."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        output_scale = config.initializer_scale / math.sqrt(2 * config.layers)
        self.attention_norm = _norm(config, dtype)
        self.attention = Attention(rngs, config, output_scale=output_scale, dtype=dtype)
        self.mlp_norm = _norm(config, dtype)
        self.mlp = Mlp(rngs, config, output_scale=output_scale, dtype=dtype)
        self.pre = config.norm_placement == "pre"
        self.dropout = config.dropout

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array] | None,
        mask: Mask,
        dropout_keys: jax.Array | None,
        cache: Cache | None,
        seen: jax.Array | int,
    ) -> tuple[jax.Array, Cache | None]:
        """[batch, sequence, embed] -> the same, and this layer's cache."""
        branch, cache = self.attention(self.attention_norm(x) if self.pre else x, rope, mask, cache, seen)
        x = x + dropout(branch, self.dropout, _keys(dropout_keys, 0))
        x = x if self.pre else self.attention_norm(x)
        branch = self.mlp(self.mlp_norm(x) if self.pre else x)
        x = x + dropout(branch, self.dropout, _keys(dropout_keys, 1))
        x = x if self.pre else self.mlp_norm(x)
        return constrain(x, "batch", "sequence", "embed"), cache


class Table(nnx.Module):
    """A table of vectors."""

    def __init__(self, table: Parameter) -> None:
        self.table = table


class Embedding(nnx.Module):
    """Sum of the token's vector and, where configured, those of its position and its type."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        def table(rows: int) -> Table:
            values = config.initializer_scale * jax.random.normal(rngs.params(), (rows, config.embed_dim))
            return Table(parameter(values, ("table", "embed"), inner=1))

        self.tokens = Table(vocabulary_table(rngs, config))
        learned = config.positions == "learned" and config.max_positions is not None
        self.positions = table(config.max_positions or 0) if learned else None
        self.types = table(config.token_types) if config.token_types else None
        self.norm = _norm(config, dtype) if config.embedding_norm else None
        self.dropout = config.dropout
        self.dtype = dtype

    def __call__(self, tokens: jax.Array, positions: jax.Array, dropout_keys: jax.Array | None) -> jax.Array:
        """[batch, sequence] int32 tokens and positions -> [batch, sequence, embed] in the compute dtype."""
        x = self.tokens.table.used(self.dtype)[tokens]
        if self.positions is not None:
            x = x + self.positions.table.used(self.dtype)[positions]
        if self.types is not None:
            x = x + self.types.table.used(self.dtype)[0]
        if self.norm is not None:
            x = self.norm(x)
        return constrain(dropout(x, self.dropout, _keys(dropout_keys, 0)), "batch", "sequence", "embed")


class Head(nnx.Module):
    """What lies between the last hidden states and the logits: BERT's transform, an output matrix unless it is tied."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        inner, outer = {"embed": config.embed_dim}, {"embed_out": config.embed_dim}
        transformed = config.head_transform
        scale = config.initializer_scale
        self.dense = Linear(rngs, inner, outer, scale=scale, bias=True, dtype=dtype) if transformed else None
        self.norm = _norm(config, dtype) if transformed else None
        rows = config.padded_vocabulary
        self.bias = parameter(jnp.zeros((rows,)), ("vocabulary",), inner=0) if transformed else None
        self.table = None if config.tied_embeddings else vocabulary_table(rngs, config)
        self.activation = config.activation

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[batch, sequence, embed] -> what the output matrix multiplies, same shape."""
        if self.dense is None or self.norm is None:
            return hidden
        return self.norm(ACTIVATIONS[self.activation](self.dense(hidden)))


def stack(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """One module whose parameters are those of `layers` modules, stacked on a new first axis."""
    make_all = nnx.split_rngs(splits=layers)(nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: None}))
    stacked = make_all(rngs)
    for _, variable in nnx.to_flat_state(nnx.state(stacked, Parameter)):
        variable.set_metadata(stacked=True)
    return stacked


def _norm(config: ModelConfig, dtype: jnp.dtype) -> Norm:
    return Norm(config, "embed", config.embed_dim, kind=config.norm, dtype=dtype)


def _keys(keys: jax.Array | None, purpose: int) -> jax.Array | None:
    """Per-row keys for one of several masks of a layer."""
    return None if keys is None else jax.vmap(partial(jax.random.fold_in, data=purpose))(keys)
