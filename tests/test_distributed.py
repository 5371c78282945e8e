"""Processes: who joins whom, which devices are whose, agreement, and clean ends."""

from __future__ import annotations

import re
import socket
import time

import pytest

from jaxscale.cluster.distributed import Place, find_place, local_device_ids
from jaxscale.config.errors import Refused
from jaxscale.config.schema import ClusterConfig
from tests.processes import run_together, start, start_together

STEP = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}

START = """
import jax
from jaxscale.cluster import distributed
from jaxscale.config.schema import ClusterConfig
processes = distributed.start(ClusterConfig(simulate=2, compilation_cache=None), connect_seconds=20)
"""


def slurm(layout: str, node: int, local: int, **variables: str) -> dict[str, str]:
    """The variables of a task of a SLURM step."""
    place = {"SLURM_STEP_TASKS_PER_NODE": layout, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
    return {**place, **variables}


@pytest.mark.parametrize(
    ("environment", "gpus", "expected"),
    [
        ({}, 8, ()),  # no SLURM: all
        (slurm("1(x2)", 1, 0, CUDA_VISIBLE_DEVICES="0,1"), 2, ()),  # one task a node: all visible
        (slurm("1(x2)", 1, 0), 2, ()),
        (slurm("1", 0, 0, CUDA_VISIBLE_DEVICES="2,3"), 8, ()),  # positions among the visible, never 2 and 3
        (slurm("2(x2)", 0, 0, CUDA_VISIBLE_DEVICES="0,1"), 2, (0,)),  # tasks that share: the i-th share
        (slurm("2(x2)", 1, 1, CUDA_VISIBLE_DEVICES="0,1"), 2, (1,)),
        (slurm("2(x2)", 1, 1, CUDA_VISIBLE_DEVICES="2,3"), 4, (1,)),
        (slurm("2(x2)", 1, 1), 4, (2, 3)),
        (slurm("2,1", 1, 0, CUDA_VISIBLE_DEVICES="0,1"), 2, ()),  # uneven nodes
        (slurm("2,1", 0, 1, CUDA_VISIBLE_DEVICES="0,1"), 2, (1,)),
        (slurm("4", 0, 3, CUDA_VISIBLE_DEVICES="0"), 4, ()),  # --gpus-per-task=1: each sees its own
        (slurm("2", 0, 1, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_PER_TASK="h100:2"), 4, ()),
        (slurm("2", 0, 1, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="4"), 4, ()),
        (slurm("4", 0, 3, CUDA_VISIBLE_DEVICES=""), 4, ()),  # no GPU on purpose
        (slurm("4", 0, 3), 0, ()),  # a CPU node
        ({"JAXSCALE_PROCESSES": "2", "JAXSCALE_LOCAL_PROCESSES": "2", "JAXSCALE_LOCAL_PROCESS_ID": "1"}, 4, (2, 3)),
        ({"JAXSCALE_PROCESSES": "2"} | slurm("2", 0, 1), 4, ()),  # by hand, inside an allocation
    ],
)
def test_device_ids(environment: dict[str, str], gpus: int, expected: tuple[int, ...]) -> None:
    assert local_device_ids(environment, gpus) == expected


def test_shares_must_be_equal() -> None:
    with pytest.raises(Refused, match="3 processes on this host share 4 visible GPUs"):
        local_device_ids(slurm("3", 0, 1), 4)


@pytest.mark.parametrize(
    ("cluster", "environment", "expected"),
    [
        ({}, {}, Place(None, 1, 0, ())),
        ({}, STEP, Place(None, 2, 1, ())),  # JAX finds the coordinator
        ({}, STEP | {"JAXSCALE_COORDINATOR": "n1:7000"}, Place("n1:7000", 2, 1, ())),
        ({"coordinator": "n1:7001"}, STEP | {"JAXSCALE_COORDINATOR": "n1:7000"}, Place("n1:7001", 2, 1, ())),
        ({}, STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Place(None, 1, 0, ())),
        ({}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Place(None, 1, 0, ())),  # a batch script outside srun
        (
            {},
            {"JAXSCALE_COORDINATOR": "h:1", "JAXSCALE_PROCESSES": "4", "JAXSCALE_PROCESS_ID": "3"} | STEP,
            Place("h:1", 4, 3, ()),
        ),
        ({"coordinator": "h:1", "processes": 4, "process_id": 2}, {}, Place("h:1", 4, 2, ())),
    ],
)
def test_place(cluster: dict[str, object], environment: dict[str, str], expected: Place) -> None:
    assert find_place(ClusterConfig(**cluster), environment, 0) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAXSCALE_PROCESSES": "2"}, "each needs its own number from 0 to 1"),
        ({"JAXSCALE_PROCESSES": "2", "JAXSCALE_PROCESS_ID": "2"}, "cluster.process_id = 2 with 2 processes"),
        ({"JAXSCALE_PROCESSES": "2", "JAXSCALE_PROCESS_ID": "0"}, "to HOST:PORT of process 0"),
        ({"JAXSCALE_PROCESSES": "two"}, 'JAXSCALE_PROCESSES = "two": must be a whole number'),
        (
            {"JAXSCALE_PROCESSES": "2", "JAXSCALE_PROCESS_ID": "0", "JAXSCALE_COORDINATOR": "host"},
            'must be HOST:PORT, for instance "host:7733"',
        ),
    ],
)
def test_place_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        find_place(ClusterConfig(), environment, 0)


def test_agreement_and_clean_end() -> None:
    script = START + (
        "import time\n"
        "print(processes.count, processes.devices, jax.device_count(), processes.first == (processes.index == 0))\n"
        "for round in range(3):\n"
        "    time.sleep(0.05 * processes.index)\n"
        "    print(distributed.exchange(b'%d of %d' % (processes.index, round)))\n"
        "assert distributed.peek('nothing') is None\n"
        "chosen = distributed.propose('key', str(processes.index))\n"
        "assert distributed.peek('key') == chosen\n"
        "print('chosen', chosen)\n"
        "distributed.shutdown()\n"
    )
    outputs = [[line for line in output.splitlines() if "Gloo" not in line] for output in run_together(3, script)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][0] == "3 6 6 True"
    assert outputs[0][3] == "[b'0 of 2', b'1 of 2', b'2 of 2']"


def test_a_failed_process_does_not_wait_for_the_others() -> None:
    script = START + "import time\nif processes.index == 0: time.sleep(60)\ndistributed.leave(3)\n"
    sleeper, failed = start_together(2, script)
    try:
        failed.communicate(timeout=30)
        assert failed.returncode == 3
    finally:
        sleeper.kill()
        failed.kill()
        sleeper.communicate()


def test_no_coordinator_ends_in_bounded_time() -> None:
    began = time.monotonic()
    child = start(
        START.replace("connect_seconds=20", "connect_seconds=2"),
        JAXSCALE_COORDINATOR="127.0.0.1:1",
        JAXSCALE_PROCESSES="2",
        JAXSCALE_PROCESS_ID="1",
    )
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert output.startswith("process 1 of 2 could not join the others at 127.0.0.1:1 within 2 s")
    assert "set JAXSCALE_COORDINATOR" in output
    assert time.monotonic() - began < 30


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        child = start(START, JAXSCALE_COORDINATOR=f"127.0.0.1:{port}", JAXSCALE_PROCESSES="2", JAXSCALE_PROCESS_ID="0")
        output, _ = child.communicate(timeout=60)
    assert f"the port of 127.0.0.1:{port} is in use on this host: set JAXSCALE_COORDINATOR" in output


def test_compilation_cache(tmp_path) -> None:
    script = (
        "import jax, sys, pathlib\n"
        "from jaxscale.cluster import distributed\n"
        "from jaxscale.config.schema import ClusterConfig\n"
        "distributed.start(ClusterConfig(simulate=1, compilation_cache=pathlib.Path(sys.argv[1])))\n"
        "print(jax.jit(lambda x: x * 3)(2.0))\n"
    )
    folder = tmp_path / "new" / "cache"
    output, _ = start(script, str(folder)).communicate(timeout=60)
    assert output.strip() == "6.0"
    assert any(folder.iterdir())
    (tmp_path / "file").write_text("")
    output, _ = start(script, str(tmp_path / "file" / "cache")).communicate(timeout=60)
    assert "cluster.compilation_cache is off" in output
    assert "6.0" in output
