"""Processes: who we are, how many, which devices are ours, and how processes agree without touching a device.

Where the number of processes comes from, first match wins, value by value: the config (`cluster.coordinator`,
`cluster.processes`, `cluster.process_id`), the environment (JAXSCALE_COORDINATOR, JAXSCALE_PROCESSES,
JAXSCALE_PROCESS_ID), the variables of a SLURM step, else one process. Under SLURM the address of process 0 is JAX's to
find; `JAXSCALE_COORDINATOR=HOST:PORT` overrides it, for instance where two jobs of one host would take the same port.

Agreement goes through the key-value store of JAX's coordination service (it lives in process 0 as long as the run), so
it works while devices are busy, before they exist, and when they are stuck.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxscale.config.errors import Fault, Refused
from jaxscale.config.schema import ClusterConfig

CONNECT_SECONDS = 300
AGREE_SECONDS = 600
LEAVE_SECONDS = 3

_calls = itertools.count()


@dataclass(frozen=True)
class Member:
    """One process of the run: its host's name and how many devices it drives."""

    host: str
    devices: int


@dataclass(frozen=True)
class Processes:
    """All processes of the run, in order of their index, and which of them this one is."""

    index: int
    members: tuple[Member, ...]

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self.members)

    @property
    def devices(self) -> int:
        """Number of devices of all processes."""
        return sum(member.devices for member in self.members)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and talks to the user."""
        return self.index == 0


ALONE = Processes(0, (Member("", 0),))
"""A process for itself."""


@dataclass(frozen=True)
class Place:
    """How one process joins the others. `coordinator` None: JAX finds it. `device_ids` empty: all that are visible."""

    coordinator: str | None
    processes: int
    process_id: int
    device_ids: tuple[int, ...]


def start(cluster: ClusterConfig, connect_seconds: int = CONNECT_SECONDS) -> Processes:
    """Join the other processes and return who is there. Must run before JAX touches a device; prints nothing.

    Every process of the run calls it once. Raises `Refused` for settings that cannot be right and `Fault` if the port
    is taken or a process sees another number of devices than process 0. If the others do not come within
    `connect_seconds`, it says so on stderr and ends the process with the exit code of a `Fault`.
    """
    place = find_place(cluster, os.environ, _gpus_on_host())
    # JAX would install a SIGTERM handler of its own; runtime/guard.py handles signals.
    jax.config.update("jax_enable_preemption_service", False)
    if cluster.simulate is not None:
        simulate_devices(cluster.simulate)
    elif not _has_driver() and not os.environ.get("JAX_PLATFORMS"):
        # Where JAX's GPU plugin is installed, as for planning, it would look for a driver and print a traceback.
        jax.config.update("jax_platforms", "cpu")
    if cluster.compilation_cache is not None:
        _use_compilation_cache(cluster.compilation_cache)
    if place.processes > 1:
        _connect(place, connect_seconds)
    own = Member(socket.gethostname(), jax.local_device_count())
    members = tuple(
        Member(host, int(devices))
        for host, devices in (text.decode().rsplit(" ", 1) for text in exchange(f"{own.host} {own.devices}".encode()))
    )
    for index, member in enumerate(members):
        if member.devices != members[0].devices:
            raise Fault(
                f"process {index} on {member.host} sees {member.devices} devices, process 0 on {members[0].host} sees "
                f"{members[0].devices}: all need as many; look at CUDA_VISIBLE_DEVICES and the tasks per node"
            )
    return Processes(jax.process_index(), members)


def simulate_devices(count: int) -> None:
    """Make JAX see `count` CPU devices and nothing else; must come before it touches a device.

    XLA runs the parts of a program that do not depend on each other in any order, on one pool of threads for all
    simulated devices. Two devices that begin with different collectives then wait for each other for ever once the pool
    is used up, which 8 devices on 2 cores do at once. A schedule that keeps the program's order, and threads to spare,
    prevent it.
    """
    in_order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {in_order}".strip()
    os.environ.setdefault("PJRT_NPROC", str(max(4 * count, os.cpu_count() or 1)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def find_place(cluster: ClusterConfig, environment: Mapping[str, str], gpus_on_host: int) -> Place:
    """The place of this process among all, from the config and the environment alone (see the module's text).

    `gpus_on_host` is the number of GPUs that the machine has, whether visible to this process or not.
    Raises `Refused` where the settings contradict each other.
    """
    slurm = {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= environment.keys()
    coordinator = cluster.coordinator or environment.get("JAXSCALE_COORDINATOR")
    processes = cluster.processes or _whole(environment, "JAXSCALE_PROCESSES")
    process_id = cluster.process_id if cluster.process_id is not None else _whole(environment, "JAXSCALE_PROCESS_ID")
    by_hand = processes is not None or process_id is not None
    if not by_hand and slurm:
        processes = _whole(environment, "SLURM_STEP_NUM_TASKS")
        process_id = _whole(environment, "SLURM_PROCID")
    processes = 1 if processes is None else processes
    if processes == 1 and not process_id:
        return Place(None, 1, 0, ())
    if process_id is None or not 0 <= process_id < processes:
        raise Refused(
            f"cluster.process_id = {process_id} with {processes} processes: each needs its own number from 0 to "
            f"{processes - 1} (cluster.process_id or JAXSCALE_PROCESS_ID)"
        )
    if coordinator is None and by_hand:
        raise Refused(
            f"cluster.coordinator is not set with {processes} processes: set it, or JAXSCALE_COORDINATOR, to HOST:PORT "
            "of process 0"
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise Refused(f'cluster.coordinator = "{coordinator}": must be HOST:PORT, for instance "{coordinator}:7733"')
    return Place(coordinator, processes, process_id, local_device_ids(environment, gpus_on_host))


def local_device_ids(environment: Mapping[str, str], gpus_on_host: int) -> tuple[int, ...]:
    """Which of the GPUs that this process can see are its own, as positions among them; empty: all of them.

    One process on the host, or processes that already see different GPUs each (SLURM's --gpus-per-task): all. Several
    processes that see the same GPUs: the i-th takes the i-th equal share. Raises `Refused` if shares are not equal.
    """
    on_host, index = _processes_on_host(environment)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    visible = gpus_on_host if listed is None else len([name for name in listed.split(",") if name not in ("", "-1")])
    if on_host == 1 or visible <= 1:
        return ()
    each_its_own = (
        environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == str(visible)
        or environment.get("SLURM_GPUS_ON_NODE") == str(visible * on_host)
    )  # fmt: skip
    if each_its_own:
        return ()
    if visible % on_host:
        raise Refused(
            f"{on_host} processes on this host share {visible} visible GPUs, which does not divide: start 1 process or "
            f"one that divides {visible}, or list others in CUDA_VISIBLE_DEVICES"
        )
    share = visible // on_host
    return tuple(range(index * share, (index + 1) * share))


def exchange(value: bytes, seconds: int = AGREE_SECONDS) -> list[bytes]:
    """Give `value` to all processes and return theirs, in order of process index. All must call it, in the same order.

    Meant for small values (a few kilobytes each). Raises `Fault` if a process does not come within so many seconds.
    """
    client = _client()
    if client is None:
        return [value]
    call, index = next(_calls), jax.process_index()
    folder = f"jaxscale/exchange/{call}/"
    with _coordination(f"exchange {call} between the processes"):
        client.key_value_set_bytes(f"{folder}{index}", value)
        client.wait_at_barrier(f"jaxscale/exchange/{call}", seconds * 1000)
        answers = {int(key.rpartition("/")[2]): data for key, data in client.key_value_dir_get_bytes(folder)}
        # Whoever has passed this barrier has long read the answers of the call before.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_delete(f"jaxscale/exchange/{call - 1}/{index}")
    return [answers[process] for process in range(jax.process_count())]


def propose(key: str, value: str) -> str:
    """Store `value` under `key` unless another process was first, and return what is stored. Several processes only."""
    client = _client()
    assert client is not None, "propose needs several processes"
    with _coordination(f"proposal of {key}"):
        try:
            client.key_value_set(f"jaxscale/{key}", value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        return str(client.blocking_key_value_get(f"jaxscale/{key}", AGREE_SECONDS * 1000))


def peek(key: str) -> str | None:
    """What some process proposed under `key`, or None; does not wait. One round trip (0.3 ms on one machine)."""
    client = _client()
    if client is None:
        return None
    with _coordination(f"reading of {key}"):
        try:
            return str(client.key_value_try_get(f"jaxscale/{key}"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None


def shutdown() -> None:
    """Leave together: waits until every process is here, so that none pulls the coordinator away from the others."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def leave(exit_code: int) -> NoReturn:
    """End this process now with `exit_code`, after a fault that the other processes may not share.

    An ordinary exit would wait minutes, in JAX's own clean-up, for processes that are stuck in a collective with us. If
    all leave (a refusal), they wait a few seconds for each other, so that all can show their message.
    """
    client = _client()
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.wait_at_barrier("jaxscale/leave", LEAVE_SECONDS * 1000)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _connect(place: Place, seconds: int) -> None:
    """`jax.distributed.initialize`, with errors that say what to set; out of time, it ends the process."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = place.coordinator or "the address that JAX derives from SLURM's variables"
    advice = "set JAXSCALE_COORDINATOR=HOST:PORT to process 0's host and a free port, the same for all processes"
    if place.process_id == 0 and place.coordinator is not None and not _port_is_free(place.coordinator):
        raise Fault(f"the port of {address} is in use on this host: {advice}")
    failure = f"process {place.process_id} of {place.processes} could not join the others at {address}"

    def give_up() -> None:
        print(f"{failure} within {seconds} s: check that all processes are running, or {advice}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(Fault.exit_code)

    # At its own time limit JAX aborts with a C++ stack that no handler can catch, so ours ends the process before.
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process_id,
            local_device_ids=list(place.device_ids),
            cluster_detection_method="slurm" if place.coordinator is None else "deactivate",
            initialization_timeout=2 * seconds,
        )
    except (RuntimeError, ValueError) as error:
        raise Fault(f"{failure} ({str(error).splitlines()[0]}): {advice}") from error
    finally:
        timer.cancel()


def _use_compilation_cache(folder: Path) -> None:
    """Keep every compiled program in `folder`; with several processes only process 0 writes (JAX sees to that)."""
    folder = folder.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        warnings.warn(f"cluster.compilation_cache is off: {folder}: {error.strerror}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processes_on_host(environment: Mapping[str, str]) -> tuple[int, int]:
    """How many processes of the run are on this host, and which of them this is."""
    if "JAXSCALE_PROCESSES" in environment:
        return (
            _whole(environment, "JAXSCALE_LOCAL_PROCESSES") or 1,
            _whole(environment, "JAXSCALE_LOCAL_PROCESS_ID") or 0,
        )
    layout = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if layout is None:
        return 1, 0
    tasks: list[int] = []
    for entry in layout.split(","):  # "2(x3),1" is 2,2,2,1
        number, _, repeat = entry.partition("(x")
        tasks += [int(number)] * int(repeat.rstrip(")") or 1)
    return tasks[_whole(environment, "SLURM_NODEID") or 0], _whole(environment, "SLURM_LOCALID") or 0


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    """A variable that must be a whole number, None where it is not set."""
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise Refused(f'{name} = "{text}": must be a whole number')
    return int(text)


def _has_driver() -> bool:
    """Whether the machine has a driver of GPUs: NVIDIA's, that of Windows' subsystem for Linux, or AMD's."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def _gpus_on_host() -> int:
    """NVIDIA GPUs of this machine, counted without starting their driver."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def _port_is_free(address: str) -> bool:
    """Whether the port of HOST:PORT can be bound on all interfaces of this host, as the coordinator will do."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(address.rpartition(":")[2])))
        except OSError:
            return False
        return True


def _client() -> Any:
    """The client of the coordination service, None in a single process. JAX has no public name for it."""
    from jax._src.distributed import global_state

    return global_state.client


@contextlib.contextmanager
def _coordination(what: str) -> Iterator[None]:
    """Turn errors of the coordination service into a `Fault`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise Fault(f"{what} failed, another process is gone or stuck: {str(error).splitlines()[0]}") from error
