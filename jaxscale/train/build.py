"""From a config and devices to everything that a run computes with. The one place that knows all parts.

`train` runs what is built here and `plan` compiles it, so a plan is never about a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxscale.cluster.mesh import make_mesh
from jaxscale.config.check import schedule_fits
from jaxscale.config.devices import data_shards, fit, microsteps
from jaxscale.config.errors import Refused
from jaxscale.config.phases import Phase, cursor_at_step, lengths_of, phase_at, tokens_at_step
from jaxscale.config.schema import Config
from jaxscale.model.attention import choose_implementation
from jaxscale.model.layers import Parameter, ParameterAxes, parameter_axes
from jaxscale.model.objective import Field, Objective, make_objective
from jaxscale.model.transformer import Transformer
from jaxscale.parallel.sharding import computation_sharding, parameter_spec, replicated
from jaxscale.precision import Precision, resolve_precision
from jaxscale.train.optimizer import Schedule, make_optimizer, make_schedule
from jaxscale.train.state import TrainState, initial_state, model_of
from jaxscale.train.step import make_evaluation_step, make_train_step


@dataclass(frozen=True)
class Timeline:
    """The phases of a run, and its lengths in updates."""

    phases: tuple[Phase, ...]
    steps: int
    warmup: int
    decay: int

    def phase(self, step: int) -> Phase:
        """The phase of update `step` (from 0)."""
        return phase_at(self.phases, cursor_at_step(self.phases, step))

    def after(self, step: int) -> tuple[Phase, ...]:
        """The phases of the updates after so many."""
        return self.phases[self.phases.index(self.phase(step)) :]

    def place(self, step: int) -> dict[str, int]:
        """Where the run is after so many updates."""
        return {
            "step": step,
            "examples": cursor_at_step(self.phases, step),
            "tokens": tokens_at_step(self.phases, step),
        }


def make_timeline(config: Config, phases: tuple[Phase, ...], rows: int | None) -> Timeline:
    """The timeline of a config over phases, on a dataset with so many rows (None: not known; only epochs need it).

    Raises:
        Refused: warm-up and decay do not fit into the run.
    """
    for mistake in schedule_fits(config, phases, rows):
        raise mistake
    lengths = lengths_of(config, phases, rows)
    if lengths.steps is None or lengths.warmup is None or lengths.decay is None:
        raise Refused(f"{config.data.train}: a length in epochs needs the dataset, which is not there")
    end = cursor_at_step(phases, lengths.steps)
    begun = tuple(phase for phase in phases if phase.first_cursor < max(end, 1))
    return Timeline(begun, lengths.steps, lengths.warmup, lengths.decay)


BatchShape = tuple[int, int, int]
"""(microsteps, rows of a microstep over all data shards, sequence length)."""
Arrays = dict[str, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding of the arrays of a batch, `[microsteps, rows, ...]`."""


GPU_OPTIONS: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""Options of XLA's GPU compiler in every run. The scheduler moves what computes between the begin and the end of each
collective, so that FSDP's gathers are hidden; without it a collective ends where its result is next used."""


@dataclass(frozen=True)
class Run:
    """What a run computes with: shapes, shardings and functions, but not one array yet."""

    config: Config
    timeline: Timeline
    mesh: Mesh
    precision: Precision
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    schedule: Schedule
    structure: nnx.GraphDef
    """The model without its arrays: `nnx.merge(structure, params, model_state)` is the model."""
    axes: dict[str, Any]
    """ParameterAxes of each parameter."""
    state: TrainState
    """Shape, dtype and sharding of every leaf of the state."""
    batches: dict[BatchShape, Arrays]
    """The training batches of all phases; those of one shape are one program."""
    evaluation_batch: Arrays
    """The batch of evaluation, with one microstep."""

    def batch(self, step: int) -> Arrays:
        """The batch of update `step` (from 0)."""
        return self.batches[batch_shape(self.timeline.phase(step), self.mesh.shape)]

    @cached_property
    def initialize(self) -> Any:
        """Jitted: the state before the first update, made in place on every mesh with the same bits."""

        def initialize() -> TrainState:
            return make_state(self.config, self.precision, self.optimizer)

        return jax.jit(initialize, out_shardings=shardings(self.state))

    @cached_property
    def train_step(self) -> Any:
        """Jitted `train_step(state, batch) -> (state, metrics)`: the state is donated and keeps its shardings."""
        step = make_train_step(
            self.structure,
            self.objective,
            self.optimizer,
            self.schedule,
            self.config.seed,
            dropout=self.config.model.dropout > 0,
        )
        return jax.jit(step, donate_argnums=0, out_shardings=(shardings(self.state), replicated(self.mesh)))

    @cached_property
    def evaluation_step(self) -> Any:
        """Jitted `evaluation_step(params=, model_state=, batch=, cursor=) -> terms`."""
        step = make_evaluation_step(self.structure, self.objective, self.config.seed)
        return jax.jit(step, out_shardings=replicated(self.mesh))

    def lower_train_step(self, batch: Arrays) -> Any:
        """The training step for one of the run's batches lowered for the mesh, ready to `compile()`."""
        with jax.set_mesh(self.mesh):
            return self.train_step.lower(self.state, batch)

    def lower_evaluation_step(self) -> Any:
        """The evaluation step lowered for the mesh, ready to `compile()`."""
        cursor = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            return self.evaluation_step.lower(**model_of(self.state), batch=self.evaluation_batch, cursor=cursor)

    def lower_initialize(self) -> Any:
        """The initialisation lowered for the mesh, ready to `compile()`."""
        with jax.set_mesh(self.mesh):
            return self.initialize.lower()

    def compile(self, lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
        """A lowered function compiled for the mesh's devices, as `precision.deterministic` asks.

        `options` are further ones of the compiler.
        """
        chosen = dict(options or {})
        if self.mesh.devices.flat[0].platform == "gpu":
            chosen = GPU_OPTIONS | chosen
            if self.config.precision.deterministic:
                chosen["xla_gpu_deterministic_ops"] = True
        return lowered.compile(chosen or None)


def build(config: Config, devices: Sequence[jax.Device], timeline: Timeline, mask_id: int | None) -> Run:
    """Everything that a run computes with, on these devices; nothing is computed or compiled.

    Args:
        config: checked by `config/check.py` (the first stage of refusal).
        devices: all devices of the run, of all processes, real, simulated or absent.
        timeline: phases of the run, its updates and those of the parts of its schedule.
        mask_id: mask token of the dataset's tokenizer, None if it has none.

    Raises:
        Refused: the config does not fit the devices (the second stage).
    """
    sizes = fit(config, timeline.phases, len(devices))
    mesh = make_mesh(config.mesh, devices)
    platform = devices[0].platform
    precision = resolve_precision(config.precision, platform)
    choose_implementation(
        config.model.attention,
        platform,
        documents=not config.data.attend_across_documents,
        dtype=precision.compute,
        head_dim=config.model.width_of_head,
    )
    if config.objective.kind == "masked" and config.objective.mask_id is None and mask_id is None:
        raise Refused(
            "objective.mask_id is not set and the dataset's tokenizer has no mask token; set objective.mask_id"
        )

    objective = make_objective(config, mask_id)
    abstract = nnx.eval_shape(lambda: make_model(config, precision))
    structure, parameters, *_ = nnx.split(abstract, Parameter, ...)
    axes = parameter_axes(parameters)
    schedule = make_schedule(
        config.schedule, config.optimizer.learning_rate, timeline.steps, warmup=timeline.warmup, decay=timeline.decay
    )
    optimizer = make_optimizer(config.optimizer, schedule, axes)
    return Run(
        config=config,
        timeline=timeline,
        mesh=mesh,
        precision=precision,
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
        structure=structure,
        axes=axes,
        state=abstract_state(config, precision, optimizer, axes, mesh, sizes),
        batches={
            shape: _on_mesh(objective.batch(*shape), mesh)
            for shape in {batch_shape(phase, sizes): None for phase in timeline.phases}
        },
        evaluation_batch=_on_mesh(
            objective.batch(1, config.evaluate.batch_size or config.batch.global_size, config.data.sequence_length),
            mesh,
        ),
    )


@dataclass(frozen=True)
class Steps:
    """Compiled functions of a run; every shape that it will meet is there, so none is ever compiled again."""

    by_shape: dict[BatchShape, Any]
    """The training step for each shape of a batch."""
    evaluate: Any
    """(params=, model_state=, batch=, cursor=) -> terms; None where nothing is evaluated."""
    initialize: Any
    """() -> state; None where a checkpoint is restored."""

    def train(self, state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        """(state, batch) -> (state, metrics); consumes the state."""
        microsteps, rows, length = batch["tokens"].shape
        return self.by_shape[microsteps, rows, length](state, batch)


def compile_steps(run: Run, *, evaluates: bool, initializes: bool, first: int = 0) -> Steps:
    """Compiles what a run needs for the updates after the first so many, side by side."""
    shapes = {batch_shape(phase, run.mesh.shape): None for phase in run.timeline.after(first)}
    with ThreadPoolExecutor() as pool:
        train = {shape: pool.submit(run.compile, run.lower_train_step(run.batches[shape])) for shape in shapes}
        initialize = pool.submit(run.compile, run.lower_initialize()) if initializes else None
        evaluate = pool.submit(run.compile, run.lower_evaluation_step()) if evaluates else None
        return Steps(
            {shape: compiled.result() for shape, compiled in train.items()},
            evaluate.result() if evaluate else None,
            initialize.result() if initialize else None,
        )


def make_model(config: Config, precision: Precision) -> Transformer:
    """The model with its initial weights, which depend on the seed alone."""
    return Transformer(nnx.Rngs(params=config.seed), config.model, precision)


def make_state(config: Config, precision: Precision, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update; parameters and model state are nested dicts of arrays."""
    _, parameters, *rest = nnx.split(make_model(config, precision), Parameter, ...)
    (model_state,) = rest
    params = nnx.to_pure_dict(parameters)
    return initial_state(params, nnx.to_pure_dict(model_state), optimizer.init(params))


def batch_shape(phase: Phase, sizes: Mapping[str, int]) -> BatchShape:
    """The shape of a phase's batches on a mesh of these sizes."""
    count = microsteps(phase, data_shards(sizes))
    return count, phase.global_batch // count, phase.sequence_length


def abstract_state(
    config: Config,
    precision: Precision,
    optimizer: optax.GradientTransformation,
    axes: dict[str, Any],
    mesh: Mesh,
    sizes: dict[str, int],
) -> TrainState:
    """Shape, dtype and sharding of every leaf: moments lie where their parameters lie, the rest on every device."""
    shapes = jax.eval_shape(lambda: make_state(config, precision, optimizer))

    def place(path: Any, axes: ParameterAxes, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = ".".join(str(key.key) for key in path)
        spec = parameter_spec(name, axes.names, leaf.shape, sizes)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map_with_path(place, axes, shapes.params, is_leaf=lambda x: isinstance(x, ParameterAxes))
    everywhere = replicated(mesh)

    def copied(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    optimizer_state = optax.tree.map_params(
        optimizer,
        lambda leaf, param: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding),
        shapes.optimizer_state,
        params,
        transform_non_params=copied,
    )
    rest = jax.tree.map(copied, shapes)
    return TrainState(
        step=rest.step,
        cursor=rest.cursor,
        valid_tokens=rest.valid_tokens,
        skipped=rest.skipped,
        params=params,
        model_state=rest.model_state,
        optimizer_state=optimizer_state,
        extras=rest.extras,
    )


def shardings(abstract: Any) -> Any:
    """The sharding of each leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _on_mesh(fields: dict[str, Field], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=computation_sharding(field.axes, mesh))
        for name, field in fields.items()
    }
