"""The training step compiled for devices that are not there, in a process of its own.

XLA's GPU compiler needs a description of the GPU, not the GPU. What it needs beside jax is the extra `plan`; where that
is missing, the same step is compiled for simulated CPU devices, by another compiler with other fusions.

The process is `python -m jaxscale.plan.compile FOLDER`: the plugin and its environment belong to it alone. It reads
FOLDER/request.json, and writes FOLDER/compiled.json and the program's text, FOLDER/program.txt.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.config.errors import Fault, Refused
from jaxscale.config.phases import phases_of
from jaxscale.config.schema import Config
from jaxscale.hardware import Cluster, CompilerTarget

if TYPE_CHECKING:
    import jax

    from jaxscale.train.build import Run

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
    """`gpu`, or `cpu` for simulated devices."""
    device_kind: str
    axes: dict[str, int]
    """The mesh, outermost axis first."""
    microsteps: int
    rows: int
    """Of a microstep, over all devices."""
    sequence_length: int
    memory: dict[str, int]
    """Bytes of one device: `parameters`, `optimizer`, `batch` and the rest of the arguments, `other_state`; `outputs`
    that take no argument's place; `temporaries`. Together they are the compiler's peak."""
    compile_seconds: float
    compiler_memory: int
    """Most bytes that the compiling process held."""
    program: str
    """The text of the module."""

    @property
    def peak(self) -> int:
        """Bytes that a device holds at most."""
        return sum(self.memory.values())


def has_gpu_compiler() -> bool:
    """Whether the extra `plan` is installed."""
    return bool(find_spec("jax_plugins")) and any(find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def compile_for(config: Config, cluster: Cluster) -> Compiled:
    """The training step of a config compiled for a cluster: by the GPU compiler if it is installed and knows the GPU.

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
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_TRACEBACK_FILTERING": "off",
    }
    with tempfile.TemporaryDirectory(prefix="jaxscale-plan-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        command = [sys.executable, "-m", "jaxscale.plan.compile", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == REFUSED:
            raise Refused(done.stderr.strip())
        if done.returncode:
            raise Fault(f"the step could not be compiled for {cluster.name}: {_reason(done)}")
        facts = json.loads((folder / "compiled.json").read_text())
        return Compiled(**facts, program=(folder / "program.txt").read_text())


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process that compiles failed, in a line: the last exception that it told, or how it ended."""
    told = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    if told:
        return told[-1]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"its process ended with {ended}"


def compile_step(run: Run, options: Mapping[str, Any] | None = None) -> Compiled:
    """The training step of a run compiled in this process; no array is made.

    Of several phases it is the one whose microstep has most tokens, which needs most memory.
    """
    import jax

    shape = max(run.batches, key=lambda shape: shape[1] * shape[2])
    begin = time.perf_counter()
    compiled = run.compile(run.lower_train_step(run.batches[shape]), options)
    seconds = time.perf_counter() - begin

    def on_device(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    analysis = compiled.memory_analysis()
    memory = {
        "parameters": on_device(run.state.params),
        "optimizer": on_device(run.state.optimizer_state),
        "batch": on_device(run.batches[shape]),
    }
    memory["other_state"] = analysis.argument_size_in_bytes - sum(memory.values())
    memory["outputs"] = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    memory["temporaries"] = analysis.temp_size_in_bytes
    device = run.mesh.devices.flat[0]
    return Compiled(
        platform=device.platform,
        device_kind=device.device_kind,
        axes=dict(run.mesh.shape),
        microsteps=shape[0],
        rows=shape[1],
        sequence_length=shape[2],
        memory=memory,
        compile_seconds=seconds,
        compiler_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        program=compiled.as_text(),
    )


def build_without_data(config: Config, devices: Sequence[jax.Device]) -> Run:
    """The run that `train` would build on these devices, also where there is no dataset yet.

    What only the dataset knows (the rows of an epoch, the id of the mask token) is then made up; that changes constants
    of the program, but neither its memory nor its collectives.

    Raises:
        Refused: the config does not fit the devices.
    """
    from jaxscale.data.mixture import Mixture
    from jaxscale.data.store import TokenDataset
    from jaxscale.train.build import build, make_timeline

    found = {name: TokenDataset.find(one.path, config.data.tokenizer) for name, one in config.data.sources.items()}
    there = {name: dataset for name, dataset in found.items() if dataset is not None}
    rows, mask_id = UPDATES_AN_EPOCH * config.batch.global_size, 0 if not there else next(iter(there.values())).mask_id
    if len(there) == len(found):
        rows = Mixture(there, config.data.packing).rows(config.data.sequence_length)
    return build(config, devices, make_timeline(config, phases_of(config), rows), mask_id)


def target_text(cluster: Cluster, target: CompilerTarget) -> str:
    """XLA's GpuTargetConfigProto of a cluster's GPU, as text."""
    major, minor = target.compute_capability
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": target.shared_memory_per_core,
        "threads_per_core_limit": target.threads_per_core,
        "core_count": cluster.gpu.cores,
        "fpus_per_core": target.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": int(cluster.gpu.memory_bandwidth),
        "l2_cache_size": target.l2_bytes,
        "clock_rate_ghz": target.clock_ghz,
        "device_memory_size": int(cluster.gpu.memory_bytes),
        "shared_memory_per_block_optin": target.shared_memory_per_block,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
    }
    # Units that only this generation has, as XLA's own descriptions of these GPUs say.
    special = " feature_extension: ACCELERATED_FEATURES" if (major, minor) >= (9, 0) else ""
    described = " ".join(f"{name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{ {described} cuda_compute_capability {{ major: {major} minor: {minor}{special} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
        f'device_description_str: "{cluster.gpu.device_kind}"'
    )


def absent_devices(target: str, hosts: int, gpus_a_host: int) -> list[jax.Device]:
    """Devices to compile for, of GPUs that `target` describes (see `target_text`).

    The environment has had JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 since before jax was loaded: there
    is no driver whose version could be checked.
    """
    import jax
    from jax.experimental import topologies

    jax.devices()  # finds the plugin
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="absent", target_config=target, topology=f"1x{hosts}x{gpus_a_host}"
    )
    return list(described.devices)


def main(folder: Path) -> None:
    """The life of the process that compiles."""
    import jax

    from jaxscale.cluster.distributed import simulate_devices

    request = json.loads((folder / "request.json").read_text())
    hosts, gpus = request["hosts"], request["gpus_a_host"]
    config = Config.model_validate_json(json.dumps(request["config"]))
    if request["target"] is None:
        simulate_devices(hosts * gpus)
        devices, options = jax.devices(), {}
    else:
        devices, options = absent_devices(request["target"], hosts, gpus), WITHOUT_TUNING
    try:
        compiled = compile_step(build_without_data(config, devices), options)
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    (folder / "program.txt").write_text(compiled.program)
    facts = asdict(replace(compiled, program=""))
    (folder / "compiled.json").write_text(json.dumps({name: facts[name] for name in facts.keys() - {"program"}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
