"""The plan of a run: the very step that `train` would run, compiled for its cluster, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Literal

from jaxscale.config.phases import lengths_of, phases_of
from jaxscale.config.schema import ClusterConfig, Config
from jaxscale.flops import flops_per_token, parameter_count
from jaxscale.hardware import RESERVED_BYTES, Cluster
from jaxscale.plan.advice import advice
from jaxscale.plan.analytical import estimate
from jaxscale.plan.collectives import collectives
from jaxscale.plan.compile import Compiled, build_without_data, compile_for, compile_step
from jaxscale.plan.layout import Layout
from jaxscale.plan.liveness import parts_of_temporaries
from jaxscale.plan.money import money
from jaxscale.plan.program import Program, read_program
from jaxscale.plan.replay import Replay, replay
from jaxscale.report.timeline import Span


def plan_here(config: Config) -> tuple[dict[str, Any], list[Span]]:
    """The step compiled in this process for the devices that the config simulates, or that are there.

    Several processes are planned as one that has the simulated devices of all. What follows from a cluster (times,
    costs, advice) is not known.

    Returns:
        As `plan`, `time`, `money` and `advice` being None.

    Raises:
        Refused: the config does not fit the devices.
    """
    import jax

    from jaxscale.cluster import distributed

    distributed.start(in_one_process(config.cluster))
    compiled = compile_step(build_without_data(config, jax.devices()))
    program = read_program(compiled.program)
    return {**_facts(config, compiled, program, None), "time": None, "money": None, "advice": None}, []


def plan(
    config: Config, cluster: Cluster, price: float | None = None, failures_a_gpu_day: float | None = None
) -> tuple[dict[str, Any], list[Span]]:
    """The step compiled for a cluster that is not there, and replayed on it; where it can be compiled for simulated CPU
    devices only, its time is reckoned by the formulas of `analytical.py`.

    Args:
        config: checked by the first stage of refusal.
        cluster: what it is to run on.
        price: of a GPU-hour.
        failures_a_gpu_day: failures that end a run, for each GPU and day; None: as published, see `money.py`.

    Returns:
        Facts by name, and the events of one step (none where the program is not one of GPUs). The facts are `cluster`,
        `devices`, `device_kind`, `mesh` (axis -> size), `microsteps`, `sequence_length`, `parameters`,
        `tokens_an_update`, `flops_an_update`, `updates`, `compile_seconds`, `compiler_memory`, `memory` (bytes of one
        device), `collectives` (a list; see `collectives.py`), `time`, `money` and `advice`.

    Raises:
        Refused: the config does not fit the cluster.
        Fault: the compiler failed.
    """
    compiled = compile_for(config, cluster)
    program = read_program(compiled.program)
    facts = _facts(config, compiled, program, cluster)
    if compiled.platform == "gpu":
        timed = replay(program, cluster, compiled.axes, lambda origin: "/optimizer/" in origin)
    else:
        found = estimate(config.model, compiled.sequence_length, layout_of(config, compiled), cluster)
        timed = Replay(found.step_seconds, found.parts)
    rate = facts["tokens_an_update"] / timed.seconds
    peak = next(cluster.gpu.peaks[dtype] for dtype in ("bfloat16", "float16", "float32") if dtype in cluster.gpu.peaks)
    facts["time"] = {
        "step_seconds": timed.seconds,
        "tokens_per_second": rate,
        "tokens_per_second_a_gpu": rate / cluster.gpus,
        "mfu": facts["flops_an_update"] / timed.seconds / (peak * cluster.gpus),
        "parts": {name: seconds for name, seconds in sorted(timed.parts.items(), key=lambda part: -part[1]) if seconds},
        "communication": dict(timed.communication),
        "hidden": {
            axes: seconds - timed.parts.get(f"exposed {axes}", 0.0) for axes, seconds in timed.communication.items()
        },
        "kernels": timed.kernels,
    }
    chosen = {} if failures_a_gpu_day is None else {"failures_a_gpu_day": failures_a_gpu_day}
    facts["money"] = None
    if facts["updates"] is not None:  # it is not where epochs are asked for of a dataset that is not there
        facts["money"] = asdict(money(timed.seconds, facts["updates"], cluster, price=price, **chosen))
    facts["advice"] = advice(facts, cluster)
    return facts, timed.events


def layout_of(config: Config, compiled: Compiled) -> Layout:
    """The layout of a step in the words of the analytical path."""
    axes = compiled.axes
    shards = axes["replica"] * axes["fsdp"] * axes["expert"]
    recomputed: dict[str, Literal["none", "selective", "full"]] = {"dots": "selective", "full": "full"}
    return Layout(
        replica=axes["replica"],
        fsdp=axes["fsdp"],
        tensor=axes["tensor"],
        shard="parameters" if axes["fsdp"] > 1 else "nothing",
        microbatch=compiled.rows // shards,
        microsteps=compiled.microsteps,
        recompute=recomputed.get(config.model.remat, "none"),
        logits_chunk=config.objective.logits_chunk,
    )


def _facts(config: Config, compiled: Compiled, program: Program, cluster: Cluster | None) -> dict[str, Any]:
    """What the compiled program says by itself."""
    tokens = compiled.microsteps * compiled.rows * compiled.sequence_length
    axes = compiled.axes
    temporaries = parts_of_temporaries(program, config.model, compiled.sequence_length, compiled.memory["temporaries"])
    capacity = None if cluster is None else int(cluster.gpu.memory_bytes) - RESERVED_BYTES
    return {
        "cluster": cluster and cluster.name,
        "platform": compiled.platform,
        "devices": math.prod(axes.values()),
        "device_kind": compiled.device_kind if cluster is None else cluster.gpu.name,
        "mesh": axes,
        "microsteps": compiled.microsteps,
        "sequence_length": compiled.sequence_length,
        "parameters": parameter_count(config.model),
        "tokens_an_update": tokens,
        "flops_an_update": flops_per_token(config.model, compiled.sequence_length) * tokens,
        "updates": lengths_of(config, phases_of(config), None).steps,
        "compile_seconds": compiled.compile_seconds,
        "compiler_memory": compiled.compiler_memory,
        "memory": {**compiled.memory, **temporaries, "peak": compiled.peak, "capacity": capacity},
        "collectives": [collective.as_dict() for collective in collectives(program, axes)],
    }


def in_one_process(cluster: ClusterConfig) -> ClusterConfig:
    """One process with the simulated devices of all, whatever environment it is started in."""
    simulate = cluster.simulate and cluster.simulate * (cluster.processes or 1)
    return cluster.model_copy(update={"processes": 1, "process_id": 0, "coordinator": None, "simulate": simulate})
