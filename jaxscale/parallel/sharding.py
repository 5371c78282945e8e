"""From logical axes to mesh axes: two tables, and the only place that makes a PartitionSpec.

Models name what an axis *is* ("embed", "heads", "batch"); the tables say where it lies. `PARAMETERS` places what is
stored between steps (parameters, gradients, optimizer state); `COMPUTATION` places what is used inside a step
(activations, and parameters after they are gathered). Fully sharded data parallelism is nothing but the difference of
the two in the row "embed".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config.devices import divisors, listed
from jaxscale.config.errors import Refused

MeshAxes = str | tuple[str, ...] | None

DATA_AXES = ("replica", "fsdp", "expert")
"""The mesh axes over which the rows of a batch are spread."""

PARAMETERS: Mapping[str, MeshAxes] = {
    "layers": None,
    "vocabulary": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": "fsdp",
    "embed_out": None,
    "head_dim": None,
    "table": None,
}

COMPUTATION: Mapping[str, MeshAxes] = {
    "microstep": None,
    "batch": DATA_AXES,
    "sequence": "context",
    "local_batch": None,  # rows of one data shard, inside over_rows
    "chunk": None,
    "vocabulary": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": None,
    "embed_out": None,
    "head_dim": None,
    "table": None,
}

COPIED_BYTES = 2**20
"""A parameter smaller than this (bytes in float32) may be copied to every device where `fsdp` does not divide it."""


def computation_spec(axes: Sequence[str]) -> PartitionSpec:
    """Where an array with these logical axes lies inside a step."""
    return PartitionSpec(*(COMPUTATION[axis] for axis in axes))


def computation_sharding(axes: Sequence[str], mesh: jax.sharding.Mesh) -> NamedSharding:
    """`computation_spec` on a mesh, for arrays that enter a step."""
    return NamedSharding(mesh, computation_spec(axes))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """One copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """x, laid out over the ambient mesh (`jax.set_mesh`) as COMPUTATION says; without a mesh, x as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, computation_spec(axes))


def over_rows(function: Callable[..., tuple[Any, Any]], by_row: Any, shared: Any) -> tuple[Any, Any]:
    """`function(by_row, shared) -> (results by row, sums over rows)`, run by each data shard on its own rows.

    The sums of the shards are added once, at the end. Left to the partitioner, a loop inside `function` that adds to a
    sum would exchange it between the shards in every iteration.

    Args:
        by_row: arrays whose first axis is the batch.
        shared: arrays without a batch axis; over the other mesh axes they stay as the partitioner has them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.shape.get(axis, 1) for axis in DATA_AXES) == 1:
        return function(by_row, shared)

    def shard(by_row: Any, shared: Any) -> tuple[Any, Any]:
        results, sums = function(by_row, shared)
        return results, jax.tree.map(lambda x: x[None], sums)

    rows = PartitionSpec(DATA_AXES)
    results, sums = jax.shard_map(
        shard, in_specs=(rows, PartitionSpec()), out_specs=(rows, rows), axis_names=set(DATA_AXES), check_vma=False
    )(by_row, shared)
    return results, jax.tree.map(_sum_over_shards, sums)


def _sum_over_shards(parts: jax.Array) -> jax.Array:
    """The sum over the first axis in the dtype of the parts; `jnp.sum` would send the narrow ones as float32."""
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))


def parameter_spec(name: str, axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Where a parameter is stored.

    An axis that PARAMETERS gives to `tensor` must divide. The axis that it gives to `fsdp` falls back to the next axis
    of the same parameter that divides; a vector or a small parameter for which none does is copied.

    Args:
        name: dotted path, for messages.
        axes: logical name of each axis.
        shape: size of each axis.
        sizes: size of each mesh axis.

    Raises:
        Refused: an axis does not divide and there is no fallback.
    """
    placed: list[MeshAxes] = [None] * len(axes)
    for i, axis in enumerate(axes):
        if PARAMETERS[axis] == "tensor":
            if shape[i] % sizes["tensor"]:
                raise Refused(
                    f"mesh.tensor = {sizes['tensor']} does not divide {axis} = {shape[i]} of {name}; "
                    f"values that do: {listed(divisors(shape[i]))}"
                )
            placed[i] = "tensor"
    for wanted in [i for i, axis in enumerate(axes) if PARAMETERS[axis] == "fsdp"]:
        free = [i for i, axis in enumerate(axes) if axis != "layers" and (placed[i] is None or sizes["tensor"] == 1)]
        divided = [i for i in sorted(free, key=lambda i: i != wanted) if shape[i] % sizes["fsdp"] == 0]
        if divided:
            placed[divided[0]] = "fsdp"
        elif len(free) > 1 and 4 * math.prod(shape) >= COPIED_BYTES:
            raise Refused(
                f"mesh.fsdp = {sizes['fsdp']} divides no axis of {name} {tuple(shape)}, which is too large to copy; "
                f"values that divide {axes[wanted]}: {listed(divisors(shape[wanted]))}"
            )
    return PartitionSpec(*placed)
