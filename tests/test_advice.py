"""Advice: what would make a step fit, and the rules of the study, each with numbers on both sides of it."""

from __future__ import annotations

from typing import Any

import pytest

from jaxscale.hardware import known
from jaxscale.plan.advice import Change, advice, too_large, what_makes_it_fit

GB = 10**9


def facts(**changes: Any) -> dict[str, Any]:
    """Facts of a plan for 16 GPUs of 80 GB on which nothing is to be said but how much is read."""
    base: dict[str, Any] = {
        "mesh": {"replica": 16, "fsdp": 1, "tensor": 1},
        "devices": 16,
        "microsteps": 1,
        "memory": {"parameters": 2 * GB, "optimizer": 4 * GB, "peak": 70 * GB, "capacity": 80 * GB},
        "time": {"step_seconds": 1.0, "tokens_per_second": 2_000_000, "parts": {"matmul": 0.95, "exposed fsdp": 0.05}},
    }
    return base | changes


def told(given: dict[str, Any], cluster: str = "h100-sxm:2x8") -> str:
    return "\n".join(advice(given, known().cluster(cluster)))


def test_the_changes_that_cost_least_time() -> None:
    """Of those that fit the three fastest, fastest first; one that is fast but too large is not told."""
    changes = [
        Change("remat=full", 60e9, 1.4),
        Change("too large", 80.1e9, 1.0),
        Change("fsdp=16", 79e9, 1.2),
        Change("just so", 80e9, 1.3),
        Change("slow", 10e9, 9.0),
    ]
    assert what_makes_it_fit(92.3e9, 80e9, changes) == (
        "does not fit by 12.3 GB: fsdp=16 (79.0 GB, 1.2 s a step), or just so (80.0 GB, 1.3 s a step), "
        "or remat=full (60.0 GB, 1.4 s a step)"
    )
    assert what_makes_it_fit(92.3e9, 80e9, changes[:1], most=1).endswith(": remat=full (60.0 GB, 1.4 s a step)")


def test_when_nothing_makes_it_fit() -> None:
    changes = [Change("fsdp=16", 95e9, 1.2), Change("remat=full", 82.5e9, 1.4)]
    assert what_makes_it_fit(100e9, 80e9, changes) == (
        "does not fit by 20.0 GB, and by none of the 2 changes that were tried; nearest: remat=full, which lacks 2.5 GB"
    )
    assert what_makes_it_fit(100e9, 80e9, []) == "does not fit by 20.0 GB"


def test_reading_is_always_told() -> None:
    """2 million tokens/s of two bytes on two hosts: 1 million, 2 MB/s each and 4 MB/s together."""
    said = told(facts())
    assert "1,000,000 tokens/s (2.0 MB/s)" in said and "read 4.0 MB/s" in said and len(said.splitlines()) == 2


def test_too_large() -> None:
    memory = {"parameters": 2 * GB, "optimizer": 4 * GB, "peak": 90 * GB, "capacity": 80 * GB}
    assert too_large(facts(memory=memory)) == 10 * GB and too_large(facts()) == 0
    assert "does not fit" in told(facts(memory=memory)) and "does not fit" not in told(facts())


@pytest.mark.parametrize(("parameters", "fits"), [(1, True), (3, False)])
def test_plain_data_parallelism_where_the_model_fits(parameters: int, fits: bool) -> None:
    """Sixteen shards of 1 GB and moments of 2 GB are 64 GB with gradients, of 3 GB and 6 GB they are 192 GB."""
    memory = {"parameters": parameters * GB, "optimizer": 2 * parameters * GB, "peak": 14 * GB, "capacity": 80 * GB}
    given = facts(memory=memory, mesh={"replica": 1, "fsdp": 16, "tensor": 1})
    assert ("plain data parallelism (mesh.replica=16" in told(given)) == fits


def test_memory_that_is_left() -> None:
    memory = {"parameters": 2 * GB, "optimizer": 4 * GB, "peak": 20 * GB, "capacity": 80 * GB}
    assert "25% of a GPU's memory" in told(facts(memory=memory, microsteps=4))
    assert "larger batch" not in told(facts(microsteps=4)), "70 of 80 GB are used"


def test_what_waits() -> None:
    slow = {"step_seconds": 1.0, "tokens_per_second": 1e6, "parts": {"exposed fsdp": 0.3, "matmul": 0.7}}
    assert "30% of a step waits for the axis fsdp" in told(facts(time=slow))
    assert "waits" not in told(facts())


def test_tensor_over_the_network() -> None:
    given = facts(mesh={"replica": 1, "fsdp": 4, "tensor": 4})
    assert "crosses the network" in told(given, "tx-gain:8") and "crosses" not in told(given)
