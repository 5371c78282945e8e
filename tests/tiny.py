"""Small models, batches and compiled runs that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.config.phases import phases_of
from jaxscale.config.schema import Config
from jaxscale.model.attention import Mask
from jaxscale.model.layers import ParameterAxes
from jaxscale.model.objective import Examples, row_keys
from jaxscale.model.transformer import Transformer
from jaxscale.train.build import Run, Timeline, build
from jaxscale.train.state import TrainState

DECODER = {"vocabulary_size": 250, "embed_dim": 64, "layers": 2, "heads": 4, "kv_heads": 4, "mlp_dim": 96}
ENCODER = {
    **DECODER,
    "causal": False,
    "positions": "learned",
    "max_positions": 64,
    "token_types": 2,
    "norm": "layer",
    "norm_placement": "post",
    "embedding_norm": True,
    "bias": True,
    "activation": "gelu",
    "tied_embeddings": True,
    "head_transform": True,
}
STEPS = 8
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Compiler options that halve the time to compile, for programs that run for a moment only."""


def config(model: Mapping[str, Any] = DECODER, **sections: Any) -> Config:
    """A config of 8 updates of 8 rows of 64 tokens; `sections` are laid over it, section by section."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model": dict(model),
        "objective": {"kind": "causal" if model.get("causal", True) else "masked"},
        "data": {"train": "datasets/none", "sequence_length": 64},
        "batch": {"global_size": 8},
        "train": {"steps": STEPS},
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup": 2},
    }
    for name, value in sections.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, Mapping) else value
    return Config.model_validate(values)


def make_run(config: Config, devices: int | None = None, mask_id: int = 249) -> Run:
    """The run of a config on the first so many simulated devices; unset: as many as its mesh asks for."""
    sizes = [size for _, size in config.mesh if size != -1]
    count = devices or int(np.prod(sizes))
    return build(config, jax.devices()[:count], Timeline(phases_of(config), STEPS, 2, 0), mask_id)


def host_batch(run: Run, step: int = 0) -> dict[str, np.ndarray]:
    """Random documents of random lengths: rows of all kinds, one of them with padding, one all padding."""
    random = np.random.default_rng([7, step])
    rows, length = run.config.batch.global_size, run.config.data.sequence_length
    vocabulary = run.config.model.vocabulary_size
    lengths = np.full(rows, length, np.int32)
    lengths[rows // 2] = length // 3
    lengths[-1] = 0
    real = np.arange(length) < lengths[:, None]
    tokens = np.where(real, random.integers(0, vocabulary, (rows, length)), 0).astype(np.uint16)
    starts = (random.random((rows, length)) < 0.05) & real
    return {"tokens": tokens, "starts": starts, "lengths": lengths}


def device_batch(run: Run, host: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The batch on the run's mesh, cut into its microsteps."""
    return {
        name: jax.device_put(host[name].reshape(shape.shape), shape.sharding) for name, shape in run.batch(0).items()
    }


def train(run: Run, steps: int = 3) -> tuple[Any, list[dict[str, np.ndarray]]]:
    """The state and the metrics of each of the first updates."""
    with jax.set_mesh(run.mesh):
        state = run.initialize()
        metrics = []
        for step in range(steps):
            state, values = run.train_step(state, device_batch(run, host_batch(run, step)))
            metrics.append(jax.device_get(values))
    return state, metrics


@cache
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).parent.parent


def merge(run: Run, params: Any) -> Transformer:
    """The model of a run with these parameters."""
    return nnx.merge(run.structure, params, {})


def random_params(run: Run) -> Any:
    """Parameters as no training makes them, on the run's mesh: scales near 1, all others of the order of 0.1.

    They are those of the model alone, the same on every mesh, and need nothing compiled.
    """
    vocabulary = run.config.model.vocabulary_size

    def draw(path: Any, axes: ParameterAxes, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        values = 0.1 * np.random.default_rng([29, *name.encode()]).normal(size=leaf.shape)
        if name.endswith("scale"):
            values += 1
        if "vocabulary" in axes.names:
            values[vocabulary:] = 0
        return jax.device_put(values.astype(np.float32), leaf.sharding)

    return jax.tree.map_with_path(draw, run.axes, run.state.params, is_leaf=lambda x: isinstance(x, ParameterAxes))


def examples(run: Run, host: Mapping[str, np.ndarray]) -> Examples:
    """The rows of a host batch as the one microstep of an update at cursor 0, `[rows, sequence]` a field."""
    batch = {name: jnp.asarray(x)[None] for name, x in host.items()}
    keys = row_keys(jax.random.key(0), jnp.zeros(2, jnp.uint32), batch["lengths"].shape)
    return jax.tree.map(lambda x: x[0], run.objective.examples(batch, keys))


def logits_of(run: Run) -> Callable[[Any, Mapping[str, np.ndarray]], np.ndarray]:
    """`(params, host batch) -> [rows, sequence, vocabulary] float32`: all logits, the tokens shown as they are."""

    @partial(jax.jit, compiler_options=QUICK)
    def compute(params: Any, host: Mapping[str, jax.Array]) -> jax.Array:
        ready, model = examples(run, host), merge(run, params)
        mask = Mask(run.config.model.causal, ready.segments, None if ready.segments is not None else ready.lengths)
        return model.logits(model(host["tokens"], ready.positions, mask))

    def logits(params: Any, host: Mapping[str, np.ndarray]) -> np.ndarray:
        with jax.set_mesh(run.mesh):
            return np.asarray(compute(params, {name: jnp.asarray(x) for name, x in host.items()}))

    return logits


def traced_shapes(function: Callable[..., Any], *arguments: Any) -> list[tuple[int, ...]]:
    """Shape of every array that a function computes, loops and inner functions included."""

    def within(jaxpr: Any) -> Iterator[tuple[int, ...]]:
        for equation in jaxpr.eqns:
            yield from (variable.aval.shape for variable in equation.outvars)
            for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from within(inner)

    return list(within(jax.make_jaxpr(function)(*arguments).jaxpr))


def random_state(run: Run) -> TrainState:
    """The state before the first update, with `random_params`; nothing is compiled."""
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), run.state)
    return replace(zeros, params=random_params(run))
