"""The plan of a run: the very step that `train` would run, compiled for simulated devices, and what it says."""

from __future__ import annotations

import time
from typing import Any

import jax

from jaxscale.cluster import distributed
from jaxscale.config.phases import phases_of
from jaxscale.config.schema import ClusterConfig, Config
from jaxscale.data.packing import EndToEnd
from jaxscale.data.store import TokenDataset
from jaxscale.flops import flops_per_token, parameter_count
from jaxscale.plan.collectives import collectives
from jaxscale.plan.program import read_program
from jaxscale.train.build import Run, build, make_timeline

UPDATES_AN_EPOCH = 10**6
"""Taken for the length of an epoch while the dataset is not there."""


def plan(config: Config) -> dict[str, Any]:
    """Compiles the training step of a config and reads memory and collectives off the compiled program.

    Of several phases it is the one whose microstep has most tokens, which needs most memory.

    No array is made. Where the dataset is not there yet, what only it knows (the rows of an epoch, the id of the mask
    token) is made up; that changes constants of the program, but neither its memory nor its collectives. Several
    processes are planned as one that has the simulated devices of all.

    Returns:
        `devices`, `device_kind`, `mesh` (axis -> size), `microsteps`, `sequence_length`, `parameters`,
        `tokens_an_update`, `flops_an_update`, `compile_seconds`, `memory` (bytes of one device: arguments, outputs,
        aliased, temporaries, peak) and `collectives` (a list; see `collectives.py`).

    Raises:
        Refused: the config does not fit the devices.
    """
    distributed.start(in_one_process(config.cluster))
    run = build_without_data(config)
    largest = max(run.batches, key=lambda shape: shape[1] * shape[2])
    begin = time.perf_counter()
    compiled = run.compile(run.lower_train_step(run.batches[largest]))
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    microsteps, rows, length = largest
    tokens = microsteps * rows * length
    return {
        "devices": run.mesh.devices.size,
        "device_kind": run.mesh.devices.flat[0].device_kind,
        "mesh": dict(run.mesh.shape),
        "microsteps": microsteps,
        "sequence_length": length,
        "parameters": parameter_count(config.model),
        "tokens_an_update": tokens,
        "flops_an_update": flops_per_token(config.model, length) * tokens,
        "compile_seconds": seconds,
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
        },
        "collectives": [
            collective.as_dict() for collective in collectives(read_program(compiled.as_text()), run.mesh.shape)
        ],
    }


def in_one_process(cluster: ClusterConfig) -> ClusterConfig:
    """One process with the simulated devices of all, whatever environment it is started in."""
    simulate = cluster.simulate and cluster.simulate * (cluster.processes or 1)
    return cluster.model_copy(update={"processes": 1, "process_id": 0, "coordinator": None, "simulate": simulate})


def build_without_data(config: Config) -> Run:
    """The run that `train` would build on the devices of this process, also where there is no dataset yet.

    Raises:
        Refused: the config does not fit the devices.
    """
    found = [TokenDataset.find(source.path, config.data.tokenizer) for source in config.data.sources.values()]
    first = found[0]
    rows = (
        UPDATES_AN_EPOCH * config.batch.global_size
        if first is None
        else EndToEnd(first, config.data.sequence_length).rows
    )
    mask_id = 0 if first is None else first.mask_id
    return build(config, jax.devices(), make_timeline(config, phases_of(config), rows), mask_id)
