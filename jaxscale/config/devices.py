"""Whether mesh, model and batch divide over a number of devices: plain arithmetic, without devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxscale.config.errors import WrongValue
from jaxscale.config.model import ModelConfig
from jaxscale.config.phases import Phase
from jaxscale.config.schema import Config, MeshConfig

AXES = tuple(MeshConfig.model_fields)
"""Names of the mesh axes."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def listed(numbers: list[int]) -> str:
    """The numbers as text."""
    return ", ".join(map(str, numbers))


def closest(allowed: list[int], to: int, count: int = 6) -> str:
    """The `count` allowed numbers nearest to `to`, ascending, as text."""
    return listed(sorted(sorted(allowed, key=lambda number: abs(number - to))[:count]))


def closest_multiples(number: int, of: int) -> str:
    """The multiples of `of` just below and above `number`, as text: "8 or 12"; only the one above if below is 0."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def resolve_mesh(mesh: MeshConfig, devices: int) -> dict[str, int]:
    """The size of every axis, -1 replaced by what is left of `devices`. Raises WrongValue if uneven."""
    sizes = {axis: int(getattr(mesh, axis)) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    written = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and devices % fixed == 0:
        return sizes | {free[0]: devices // fixed}
    if free:
        axis = max((axis for axis in AXES if sizes[axis] != -1), key=lambda axis: sizes[axis])
        others = fixed // sizes[axis]
        allowed = divisors(devices // others) if devices % others == 0 else [1]
        hint = f"nearest: {closest(allowed, sizes[axis])}"
        raise WrongValue(f"mesh.{axis}", sizes[axis], f"{written} = {fixed} must divide the {devices} devices; {hint}")
    if fixed != devices:
        others = fixed // sizes["fsdp"]
        hint = (
            f"nearest: mesh.fsdp = {devices // others}" if devices % others == 0 else "one axis may be -1: what is left"
        )
        raise WrongValue("mesh", None, f"the axes ({written}) make {fixed} devices, but there are {devices}; {hint}")
    return sizes


def data_shards(axes: Mapping[str, int]) -> int:
    """Parts that the rows of a microstep are divided into: replica x fsdp x expert."""
    return axes["replica"] * axes["fsdp"] * axes["expert"]


def microsteps(phase: Phase, shards: int, section: str = "batch") -> int:
    """Microsteps of an update: global batch = microbatch x microsteps x shards; 1 where microbatch is unset.

    Raises WrongValue, with the nearest legal values, if the global batch does not come out even; the keys are those of
    the config's `section`.
    """
    size, microbatch = phase.global_batch, phase.microbatch
    if size % shards:
        even = closest_multiples(size, shards)
        allowed = f"must be a multiple of the {shards} data shards; nearest: {even}"
        raise WrongValue(f"{section}.global_size", size, allowed)
    if microbatch is None:
        return 1
    if size % (microbatch * shards):
        raise WrongValue(
            f"{section}.global_size",
            size,
            f"must be a multiple of {section}.microbatch x data shards = {microbatch} x {shards}; "
            f"nearest: {closest_multiples(size, microbatch * shards)}, "
            f"or {section}.microbatch = {closest(divisors(size // shards), microbatch, 3)}",
        )
    return size // (microbatch * shards)


def check_tensor(model: ModelConfig, tensor: int) -> None:
    """Raises WrongValue if the `tensor` axis does not divide the heads, the MLP and the padded vocabulary."""
    sizes = {
        "model.heads": model.heads,
        "model.kv_heads": model.key_value_heads,
        "model.mlp_dim": model.mlp_dim,
        "the padded vocabulary": model.padded_vocabulary,
    }
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size % tensor]:
        works = closest(divisors(math.gcd(*sizes.values())), tensor)
        raise WrongValue("mesh.tensor", tensor, f"must divide {' and '.join(wrong)}; values that work: {works}")


def fit(config: Config, phases: Sequence[Phase], devices: int) -> dict[str, int]:
    """The mesh's axes on `devices`, after checking that model and batches divide over them. Raises WrongValue."""
    axes = resolve_mesh(config.mesh, devices)
    check_tensor(config.model, axes["tensor"])
    shards = data_shards(axes)
    for number, phase in enumerate(phases):
        microsteps(phase, shards, f"phases.{number - 1}" if number else "batch")
    evaluated = config.evaluate.batch_size
    if evaluated is not None and evaluated % shards:
        even = closest_multiples(evaluated, shards)
        raise WrongValue(
            "evaluate.batch_size", evaluated, f"must be a multiple of the {shards} data shards; nearest: {even}"
        )
    return axes
