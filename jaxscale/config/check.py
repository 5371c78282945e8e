"""What needs two fields to judge: every cross-check of the config alone, in one place, without jax.

A rule is a function that yields what is wrong. `mistakes` runs them all, so that a person sees everything at once.
Checks against the devices that are really there are made by `devices.fit` when they are known.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxscale.config.check_build import build_mistakes
from jaxscale.config.data import DataConfig
from jaxscale.config.devices import AXES, check_tensor, closest, divisors, fit
from jaxscale.config.errors import Refused, WrongValue
from jaxscale.config.length import parse_length
from jaxscale.config.model import RopeConfig
from jaxscale.config.phases import Phase, lengths_of, phases_of
from jaxscale.config.schema import Config, ScheduleConfig

Mistakes = Iterator[WrongValue]


def check(config: Config) -> None:
    """Raises Refused with a line for each mistake, if there is one."""
    if found := mistakes(config):
        raise Refused("\n".join(map(str, found)))


def mistakes(config: Config) -> list[WrongValue]:
    """Everything wrong with a config that is visible without the devices and the dataset."""
    found = [wrong for rule in RULES for wrong in rule(config)]
    return found or list(simulated_devices(config))


def heads(config: Config) -> Mistakes:
    """Heads divide the width, key and value heads divide the heads, rotation needs pairs."""
    model = config.model
    if model.head_dim is None and model.embed_dim % model.heads:
        works = closest(divisors(model.embed_dim), model.heads)
        allowed = f"must divide model.embed_dim = {model.embed_dim}, or model.head_dim be set; nearest: {works}"
        yield WrongValue("model.heads", model.heads, allowed)
    elif model.positions == "rope" and model.width_of_head % 2:
        key, value = ("head_dim", model.head_dim) if model.head_dim else ("heads", model.heads)
        width = model.width_of_head
        allowed = f"rotary positions need an even head width, not {width}; nearest: {width - 1 or 2} or {width + 1}"
        yield WrongValue(f"model.{key}", value, allowed)
    if model.heads % model.key_value_heads:
        works = closest(divisors(model.heads), model.key_value_heads)
        yield WrongValue("model.kv_heads", model.kv_heads, f"must divide model.heads = {model.heads}; nearest: {works}")


def positions(config: Config) -> Mistakes:
    """A table of learned positions is long enough; settings of the other kind of positions are not silently ignored."""
    model = config.model
    lengths = _sequence_lengths(config)
    longest = max(lengths, key=lambda place: lengths[place])
    length = lengths[longest]
    if model.positions == "learned":
        if model.max_positions is None:
            yield WrongValue("model.max_positions", None, f'positions = "learned" needs it; at least {length}')
        elif model.max_positions < length:
            allowed = f"must be at least {longest}.sequence_length = {length}; nearest: {length}"
            yield WrongValue("model.max_positions", model.max_positions, allowed)
        if model.rope != RopeConfig():
            yield WrongValue("model.rope", None, 'is for positions = "rope"; leave it out where they are "learned"')
    elif model.max_positions is not None:
        allowed = 'is for positions = "learned"; leave it out where they are "rope"'
        yield WrongValue("model.max_positions", model.max_positions, allowed)
    elif model.rope.low_frequency_factor >= model.rope.high_frequency_factor:
        allowed = f"must be below model.rope.high_frequency_factor = {model.rope.high_frequency_factor}"
        yield WrongValue("model.rope.low_frequency_factor", model.rope.low_frequency_factor, allowed)


def objective(config: Config) -> Mistakes:
    """The objective fits the direction of attention; shares of the masked tokens and the mask's id are possible."""
    goal, model = config.objective, config.model
    if goal.kind == "causal":
        if not model.causal:
            allowed = 'an encoder (model.causal = false) would see its own targets; use "masked"'
            yield WrongValue("objective.kind", "causal", allowed)
        return
    if model.causal:
        yield WrongValue("objective.kind", "masked", 'needs an encoder: set model.causal = false, or use "causal"')
    if goal.replace_share + goal.random_share > 1 + 1e-9:
        rest = round(1 - goal.replace_share, 6)
        allowed = f"with objective.replace_share = {goal.replace_share} more than all tokens; at most {rest}"
        yield WrongValue("objective.random_share", goal.random_share, allowed)
    if goal.mask_id is not None and goal.mask_id >= model.vocabulary_size:
        allowed = f"must be below model.vocabulary_size = {model.vocabulary_size}"
        yield WrongValue("objective.mask_id", goal.mask_id, allowed)


def head(config: Config) -> Mistakes:
    """BERT's head has a plain activation; an encoder writes no text."""
    model = config.model
    if model.head_transform and model.activation == "swiglu":
        allowed = 'model.head_transform needs a plain activation: "gelu" or "gelu_tanh"'
        yield WrongValue("model.activation", model.activation, allowed)
    if config.sample.prompt is not None and not model.causal:
        allowed = "an encoder (model.causal = false) cannot continue a text; leave it out"
        yield WrongValue("sample.prompt", config.sample.prompt, allowed)


def attention(config: Config) -> Mistakes:
    """cuDNN's attention runs on GPUs and in half precision only."""
    if config.model.attention != "cudnn":
        return
    if config.cluster.simulate is not None:
        yield WrongValue("model.attention", "cudnn", 'needs GPUs, but cluster.simulate is set; nearest: "auto"')
    if config.precision.compute == "float32":
        yield WrongValue("model.attention", "cudnn", 'needs precision.compute = "bfloat16"; nearest: "auto"')


def sequence(config: Config) -> Mistakes:
    """A row of one token has nothing to predict."""
    if config.objective.kind == "causal":
        for place, length in _sequence_lengths(config).items():
            if length < 2:
                yield WrongValue(f"{place}.sequence_length", length, "there is nothing to predict; at least 2")


def _sequence_lengths(config: Config) -> dict[str, int]:
    """The sequence lengths of the run, by the sections that set them."""
    changes = {f"phases.{n}": phase.sequence_length for n, phase in enumerate(config.phases) if phase.sequence_length}
    return {"data": config.data.sequence_length, **changes}


def run_length(config: Config) -> Mistakes:
    """Exactly one of the keys of [train]."""
    given = {f"train.{key}": value for key, value in config.train if value is not None}
    if not given:
        yield WrongValue("train", None, "one of train.steps, train.tokens, train.epochs must be given")
    for key, value in list(given.items())[1:]:
        first = next(iter(given))
        allowed = f'only one of train.steps, train.tokens, train.epochs; {first} is given too ("none" unsets a key)'
        yield WrongValue(key, value, allowed)


def schedule(config: Config) -> Mistakes:
    """Lengths of the schedule can be read, belong to its kind, and fit into the run as far as that is known."""
    yield from _schedule_keys(config.schedule)
    unreadable = (*_schedule_keys(config.schedule), *run_length(config), *phases(config))
    if not unreadable:
        yield from schedule_fits(config, phases_of(config), rows=None)


def phases(config: Config) -> Mistakes:
    """Every phase begins where an update ends, and knows its sources; something is drawn in each of them."""
    try:
        found = phases_of(config)
    except WrongValue as wrong:
        yield wrong
        return
    for number, change in enumerate(config.phases):
        if not any(value is not None for name, value in change if name != "start"):
            yield WrongValue(
                f"phases.{number}",
                None,
                "changes nothing; it may set global_size, microbatch, sequence_length, weights",
            )
    for number, phase in enumerate(found):
        if not any(phase.weights):
            key = f"phases.{number - 1}.weights" if number else "data.train"
            yield WrongValue(key, None, "all weights are 0; at least one source must have more")


def passes(config: Config) -> Mistakes:
    """A length in epochs is about one dataset at one sequence length and batch."""
    if not config.phases and len(config.data.sources) == 1:
        return
    lengths = (
        ("train.epochs", config.train.epochs),
        ("schedule.warmup", config.schedule.warmup),
        ("schedule.decay", config.schedule.decay),
    )
    for key, value in lengths:
        if value is not None and (key == "train.epochs" or (isinstance(value, str) and "epoch" in value)):
            yield WrongValue(
                key, value, 'epochs are for one dataset without phases; nearest: tokens, such as "10B tokens"'
            )


def skips(config: Config) -> Mistakes:
    """Ranges to skip are not empty, and of a length that the run has."""
    lengths = set(_sequence_lengths(config).values())
    for number, skip in enumerate(config.data.skip):
        if skip.end <= skip.first:
            yield WrongValue(f"data.skip.{number}.end", skip.end, f"must be above first = {skip.first}")
        if skip.sequence_length not in lengths:
            known = closest(sorted(lengths), skip.sequence_length)
            allowed = f"no part of the run has rows of this length; nearest: {known}"
            yield WrongValue(f"data.skip.{number}.sequence_length", skip.sequence_length, allowed)


def _schedule_keys(plan: ScheduleConfig) -> Mistakes:
    for key, text in (("warmup", plan.warmup), ("decay", plan.decay)):
        if text is not None:
            try:
                parse_length(text)
            except ValueError as error:
                yield WrongValue(f"schedule.{key}", text, str(error))
    if plan.kind == "warmup_stable_decay" and plan.decay is None:
        yield WrongValue("schedule.decay", None, 'kind = "warmup_stable_decay" needs it, such as "1B tokens" or 1000')
    if plan.kind == "warmup_stable_decay" and plan.decay == 0:
        yield WrongValue("schedule.decay", 0, 'must be at least one update; without decay the kind is "constant"')
    if plan.kind != "warmup_stable_decay" and plan.decay is not None:
        allowed = f'is for kind = "warmup_stable_decay"; "{plan.kind}" has no stretch of its own for it'
        yield WrongValue("schedule.decay", plan.decay, allowed)
    if plan.kind == "constant" and plan.final_share not in (ScheduleConfig().final_share, 1.0):
        yield WrongValue("schedule.final_share", plan.final_share, 'kind = "constant" does not decay; leave it out')


def schedule_fits(config: Config, phases: Sequence[Phase], rows: int | None) -> Mistakes:
    """Warm-up and decay together are not longer than the run; `rows` are the dataset's, None while they are unknown."""
    lengths, plan = lengths_of(config, phases, rows), config.schedule
    parts = [("schedule.warmup", plan.warmup, lengths.warmup), ("schedule.decay", plan.decay, lengths.decay)]
    known = [(key, text, count) for key, text, count in parts if count]
    if lengths.steps is None or not known:
        return
    used = sum(count for *_, count in known)
    if used > lengths.steps:
        key, text, count = known[-1]
        together = "with the others" if len(known) > 1 else "alone"
        most = max(lengths.steps - used + count, 0)
        yield WrongValue(key, text, f"{together} takes {used} updates of a run of {lengths.steps}; at most {most} here")


def mesh(config: Config) -> Mistakes:
    """Sizes of axes are possible, and only axes that are built are used; `tensor` divides what it shards."""
    sizes = dict(config.mesh)
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            yield WrongValue(f"mesh.{axis}", size, "must be at least 1, or -1 for what is left; nearest: 1")
        elif axis in ("expert", "context", "pipe") and size != 1:
            yield WrongValue(f"mesh.{axis}", size, "this axis is not built yet; only 1 is allowed")
    free = [axis for axis in AXES if sizes[axis] == -1]
    for axis in free[1:]:
        yield WrongValue(
            f"mesh.{axis}", -1, f"only one axis may be -1 (what is left), and mesh.{free[0]} is; nearest: 1"
        )
    if sizes["tensor"] >= 1:
        try:
            check_tensor(config.model, sizes["tensor"])
        except WrongValue as wrong:
            yield wrong


def batch(config: Config) -> Mistakes:
    """Microbatches come out even on one data shard; the number of shards is `devices.fit`'s matter."""
    if any(phases(config)):
        return
    for number, phase in enumerate(phases_of(config)):
        place = f"phases.{number - 1}" if number else "batch"
        if phase.microbatch is not None and phase.global_batch % phase.microbatch:
            works = closest(divisors(phase.global_batch), phase.microbatch)
            allowed = f"must divide {place}.global_size = {phase.global_batch}; nearest: {works}"
            yield WrongValue(f"{place}.microbatch", phase.microbatch, allowed)


def cluster(config: Config) -> Mistakes:
    """The process is one of the processes, and the coordinator's address has a port."""
    group = config.cluster
    if group.process_id is not None and group.processes is not None and group.process_id >= group.processes:
        allowed = f"must be below cluster.processes = {group.processes}; nearest: {group.processes - 1}"
        yield WrongValue("cluster.process_id", group.process_id, allowed)
    if group.coordinator is not None:
        host, _, port = group.coordinator.rpartition(":")
        if not host or not is_port(port):
            yield WrongValue("cluster.coordinator", group.coordinator, 'must be HOST:PORT, such as "node1:12321"')


def is_port(text: str) -> bool:
    """Whether it is the number of a port."""
    return text.isdecimal() and 0 < int(text) < 65536


def evaluation(config: Config) -> Mistakes:
    """Asking for evaluations needs something to evaluate on, and every line of theirs a name of its own."""
    if config.evaluate.every_steps is not None and not config.data.validation:
        allowed = "there is nothing to evaluate on: name a dataset in [data.validation]"
        yield WrongValue("evaluate.every_steps", config.evaluate.every_steps, allowed)
    for name, data in config.data.validation.items():
        if not data:
            yield WrongValue(f"data.validation.{name}", data, "must be the path of a dataset, or paths by name")
        for part in (name, *(data if isinstance(data, Mapping) else ())):
            if "/" in part:
                yield WrongValue(
                    "data.validation", part, 'names have no "/": it stands between those of set and source'
                )


def dataset(config: Config) -> Mistakes:
    """The rules of [data], and that the model knows every token that a trained tokenizer makes."""
    yield from data_mistakes(config.data)
    build, size = config.data.build, config.model.vocabulary_size
    if build and build.train_vocabulary is not None and build.train_vocabulary > size:
        allowed = f"must be at most model.vocabulary_size = {size}; nearest: {size}"
        yield WrongValue("data.build.train_vocabulary", build.train_vocabulary, allowed)


def data_mistakes(data: DataConfig) -> Mistakes:
    """The rules of [data] alone: where the text comes from, and where the parts go."""
    build = data.build
    if build is None:
        return
    if not isinstance(data.train, Path):
        yield WrongValue(
            "data.build", None, "builds one dataset, but data.train is a mixture; build each with a config of its own"
        )
        return
    yield from build_mistakes(build)
    if build.validation_share > 0 and data.held_out is None:
        allowed = (
            "needs a split in [data.validation] that is one dataset, to write to: the only such, or the one that is "
            'called "validation"'
        )
        yield WrongValue("data.build.validation_share", build.validation_share, allowed)
    elif build.validation_share > 0 and data.train == data.held_out:
        yield WrongValue("data.train", data.train, "the held-out split must have a folder of its own")


def simulated_devices(config: Config, environment: Mapping[str, str] = os.environ) -> Mistakes:
    """Mesh and batches fit the devices, where the config says how many there are.

    It does if every axis has a size, or if the devices are simulated and nothing but the config sets the processes.
    """
    sizes = [getattr(config.mesh, axis) for axis in AXES]
    processes = config.cluster.processes
    if processes is None and not {"JAXSCALE_PROCESSES", "SLURM_JOB_ID"} & environment.keys():
        processes = 1
    if config.cluster.simulate is not None and processes is not None:
        devices = config.cluster.simulate * processes
    elif -1 not in sizes:
        devices = math.prod(sizes)
    else:
        return
    try:
        fit(config, phases_of(config), devices)
    except WrongValue as wrong:
        yield wrong


RULES: tuple[Callable[[Config], Mistakes], ...] = (
    heads,
    positions,
    objective,
    head,
    attention,
    sequence,
    run_length,
    phases,
    passes,
    skips,
    schedule,
    mesh,
    batch,
    cluster,
    evaluation,
    dataset,
)
"""Every rule; `simulated_devices` comes after them, since its arithmetic needs possible numbers."""
