"""The plan of a run: the very step that `train` would run, compiled for simulated devices, and what it says."""

from __future__ import annotations

import time
from typing import Any

import jax

from jaxscale.cluster import distributed
from jaxscale.config.schema import Config
from jaxscale.flops import flops_per_token, parameter_count
from jaxscale.plan.collectives import collectives
from jaxscale.train.build import Lengths, build


def plan(config: Config) -> dict[str, Any]:
    """Compiles the training step of a config and reads memory and collectives off the compiled program.

    Neither data nor arrays are needed: lengths in epochs count as one update, and a mask token that only the dataset
    knows as id 0; neither changes the program but for a constant.

    Returns:
        `devices`, `mesh` (axis -> size), `microsteps`, `parameters`, `tokens_an_update`, `flops_an_update`,
        `compile_seconds`, `memory` (bytes of one device: arguments, outputs, aliased, temporaries, peak) and
        `collectives` (a list; see `collectives.py`).

    Raises:
        Refused: the config does not fit the devices.
    """
    distributed.start(config.cluster)
    run = build(config, jax.devices(), Lengths(1, 0, 0), mask_id=0)
    begin = time.perf_counter()
    compiled = run.lower_train_step().compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    tokens = config.batch.global_size * config.data.sequence_length
    device = run.mesh.devices.flat[0]
    return {
        "devices": run.mesh.devices.size,
        "device_kind": device.device_kind,
        "mesh": {axis: size for axis, size in run.mesh.shape.items()},
        "microsteps": run.batch["tokens"].shape[0],
        "parameters": parameter_count(config.model),
        "tokens_an_update": tokens,
        "flops_an_update": flops_per_token(config.model, config.data.sequence_length) * tokens,
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
        "collectives": [collective.as_dict() for collective in collectives(compiled.as_text(), run.mesh)],
    }
