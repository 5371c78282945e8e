"""The training step compiled for devices that are not there, in a process of its own.

XLA's GPU compiler needs a description of the GPU, not the GPU. What it needs beside jax is the extra `plan`; where that
is missing, the same step is compiled for simulated CPU devices, which is another compiler with other fusions.

The process is `python -m jaxscale.plan.compile FOLDER`: the plugin and its environment belong to it alone. It reads
FOLDER/request.json, and writes FOLDER/compiled.json and the program's text, FOLDER/program.txt.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxscale.config.errors import Fault, Refused
from jaxscale.config.phases import phases_of
from jaxscale.config.schema import Config
from jaxscale.hardware import Cluster, CompilerTarget

WITHOUT_TUNING = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Kernels cannot be timed on GPUs that are not there. Without timing XLA would take Triton for every matrix product;
cuBLAS is what a run's tuning picks for most."""
UPDATES_AN_EPOCH = 10**6
"""Taken for the length of an epoch while the dataset is not there."""
REFUSED = 2
"""Exit code of the process where the config does not fit the devices."""


@dataclass(frozen=True)
class Compiled:
    """What is known of a compiled training step."""

    platform: str
    """`gpu`, or `cpu` where the GPU compiler is not installed."""
    axes: dict[str, int]
    """The mesh, outermost axis first."""
    microsteps: int
    rows: int
    """Of a microstep, over all devices."""
    sequence_length: int
    attention: str
    """The implementation that was chosen."""
    memory: dict[str, int]
    """Bytes of one device: `parameters`, `optimizer`, `batch` and other `state` (the arguments), `outputs` that take no
    argument's place, `temporaries`, and their sum, `peak`."""
    lower_seconds: float
    compile_seconds: float
    compiler_memory: int
    """Most bytes that the compiling process held."""
    program: str
    """The text of the module."""


def has_gpu_compiler() -> bool:
    """Whether the extra `plan` is installed."""
    return any(find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13) if find_spec("jax_plugins"))


def compile_step(config: Config, cluster: Cluster) -> Compiled:
    """The training step of a config compiled for a cluster, by the GPU compiler if it is installed and knows the GPU.

    Of several phases it is the one whose microstep has most tokens, which needs most memory. Where the dataset is not
    there yet, what only it knows (the rows of an epoch, the id of the mask token) is made up; that changes constants of
    the program only.

    Args:
        config: checked by the first stage of refusal.
        cluster: what it is to run on.

    Raises:
        Refused: the config does not fit the cluster.
        Fault: the compiler failed.
    """
    target = cluster.gpu.compiler if has_gpu_compiler() else None
    request = {
        "config": config.model_dump(mode="json"),
        "hosts": cluster.hosts,
        "gpus_a_host": cluster.gpus_a_host,
        "target": target and target_text(cluster, target),
    }
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    with tempfile.TemporaryDirectory(prefix="jaxscale-plan-") as folder:
        (Path(folder) / "request.json").write_text(json.dumps(request))
        command = [sys.executable, "-m", "jaxscale.plan.compile", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == REFUSED:
            raise Refused(done.stderr.strip())
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise Fault(f"the step could not be compiled for {cluster.gpu.name}: {reason[0]}")
        facts = json.loads((Path(folder) / "compiled.json").read_text())
        return Compiled(**facts, program=(Path(folder) / "program.txt").read_text())


def target_text(cluster: Cluster, target: CompilerTarget) -> str:
    """XLA's GpuTargetConfigProto of a GPU, as text."""
    major, minor = target.compute_capability
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": target.shared_memory_per_core,
        "threads_per_core_limit": target.threads_per_core,
        "core_count": target.cores,
        "fpus_per_core": target.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": int(cluster.gpu.memory_bandwidth),
        "l2_cache_size": target.l2_bytes,
        "clock_rate_ghz": target.clock_ghz,
        "device_memory_size": int(cluster.gpu.memory_bytes),
        "shared_memory_per_block_optin": target.shared_memory_per_block,
        "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    described = " ".join(
        f"{name} {value}" if str(value).startswith("{") else f"{name}: {value}" for name, value in fields.items()
    )
    name = cluster.gpu.device_kind or cluster.gpu.name
    return (
        f'gpu_device_info {{ {described} }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{name}"'
    )


def main(folder: Path) -> None:
    """The life of the process that compiles."""
    request = json.loads((folder / "request.json").read_text())
    config = Config.model_validate(request["config"])
    try:
        facts, program = _compile(config, request)
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    (folder / "program.txt").write_text(program)
    (folder / "compiled.json").write_text(json.dumps(facts))


def _compile(config: Config, request: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The facts of `Compiled`, and the program."""
    import jax

    from jaxscale.cluster.distributed import simulate_devices
    from jaxscale.model.attention import choose_implementation

    hosts, gpus = request["hosts"], request["gpus_a_host"]
    if request["target"] is None:
        simulate_devices(hosts * gpus)
        devices = jax.devices()
    else:
        devices = absent_devices(request["target"], hosts, gpus)
    run = build_without_data(config, devices)
    shape = max(run.batches, key=lambda shape: shape[1] * shape[2])
    batch = run.batches[shape]
    begin = time.perf_counter()
    lowered = run.lower_train_step(batch)
    lowering = time.perf_counter()
    compiled = run.compile(lowered, WITHOUT_TUNING if devices[0].platform == "gpu" else {})
    end = time.perf_counter()
    def on_device(tree: Any) -> int:
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
        )

    analysis = compiled.memory_analysis()
    parts = {"parameters": run.state.params, "optimizer": run.state.optimizer_state, "batch": batch}
    memory = {name: on_device(tree) for name, tree in parts.items()}
    memory["state"] = analysis.argument_size_in_bytes - sum(memory.values())
    memory["outputs"] = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    memory["temporaries"] = analysis.temp_size_in_bytes
    facts = {
        "platform": devices[0].platform,
        "axes": dict(run.mesh.shape),
        "microsteps": shape[0],
        "rows": shape[1],
        "sequence_length": shape[2],
        "attention": choose_implementation(
            config.model.attention,
            devices[0].platform,
            documents=not config.data.attend_across_documents,
            dtype=run.precision.compute,
        ),
        "memory": {**memory, "peak": sum(memory.values())},
        "lower_seconds": lowering - begin,
        "compile_seconds": end - lowering,
        "compiler_memory": _most_memory(),
    }
    return facts, compiled.as_text()


def absent_devices(target: str, hosts: int, gpus_a_host: int) -> list[Any]:
    """`jax.Device`s to compile for, of GPUs that `target` describes (see `target_text`).

    The environment has JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 since before jax was loaded: there is no
    driver whose version could be checked.
    """
    import jax
    from jax.experimental import topologies

    jax.devices()  # finds the plugin
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="absent", target_config=target, topology=f"1x{hosts}x{gpus_a_host}"
    )
    return list(described.devices)


def build_without_data(config: Config, devices: list[Any]) -> Any:
    """The `Run` that `train` would build on these devices, also where there is no dataset yet.

    Raises:
        Refused: the config does not fit the devices.
    """
    from jaxscale.data.mixture import Mixture
    from jaxscale.data.store import TokenDataset
    from jaxscale.train.build import build, make_timeline

    found = {name: TokenDataset.find(one.path, config.data.tokenizer) for name, one in config.data.sources.items()}
    there = {name: dataset for name, dataset in found.items() if dataset is not None}
    rows, mask_id = UPDATES_AN_EPOCH * config.batch.global_size, 0
    if len(there) == len(found):
        mixture = Mixture(there, config.data.packing)
        rows, mask_id = mixture.rows(config.data.sequence_length), mixture.first.mask_id
    return build(config, devices, make_timeline(config, phases_of(config), rows), mask_id)


def _most_memory() -> int:
    """Most bytes that this process ever held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
