"""Advice on a plan: the rules of a published scaling study with this plan's numbers.

The study (arXiv 2509.05258) trained encoders on 1 to 128 hosts of two GPUs each. What it recommends: plain data
parallelism as long as the model fits one GPU, as large a batch as memory allows, a loader that never keeps a GPU
waiting, and data on disks of the hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from jaxscale.hardware import Cluster

MUCH_LEFT = 0.6
"""Share of a device's memory below which a larger microbatch is suggested."""
MUCH_EXPOSED = 0.1
"""Share of a step that waits for one axis, from which on that is said."""
STORED_BYTES = 2
"""Of a token in a dataset with a vocabulary of up to 65,536; with a larger one it is twice that."""


@dataclass(frozen=True)
class Change:
    """Something that could be done to a step that does not fit."""

    description: str
    """What to do, as a command line says it, such as `train.remat=full`."""
    memory: float
    """Bytes of a device at its peak, with the change."""
    step_seconds: float
    """With the change."""


def what_makes_it_fit(memory: float, capacity: float, changes: Sequence[Change], most: int = 3) -> str:
    """That a step does not fit, by how much, and the changes that make it fit and cost the least time.

    Args:
        memory: bytes of a device at its peak; above `capacity`.
        capacity: bytes that a device has.
        changes: all that were tried.
        most: changes that are told.
    """
    lacking = f"does not fit by {decimal(round(memory - capacity))}"
    fitting = sorted((one for one in changes if one.memory <= capacity), key=lambda one: (one.step_seconds, one.memory))
    if fitting:
        return f"{lacking}: " + ", or ".join(
            f"{one.description} ({decimal(round(one.memory))}, {one.step_seconds:.3g} s a step)"
            for one in fitting[:most]
        )
    if not changes:
        return lacking
    nearest = min(changes, key=lambda one: one.memory)
    return (
        f"{lacking}, and by none of the {len(changes)} changes that were tried; nearest: {nearest.description}, which "
        f"lacks {decimal(round(nearest.memory - capacity))}"
    )


def advice(facts: Mapping[str, Any], cluster: Cluster) -> list[str]:
    """Sentences, the most important first, from the facts of `plan.plan`."""
    return [*_fit(facts), *_parallelism(facts, cluster), *_batch(facts), *_waiting(facts), *_loading(facts, cluster)]


def too_large(facts: Mapping[str, Any]) -> int:
    """Bytes by which a device's memory is too small; 0 where the step fits."""
    memory = facts["memory"]
    return 0 if memory["capacity"] is None else max(0, memory["peak"] - memory["capacity"])


def _fit(facts: Mapping[str, Any]) -> list[str]:
    lacking = too_large(facts)
    if not lacking:
        return []
    memory = facts["memory"]
    return [f"it does not fit: {decimal(memory['peak'])} are needed, {decimal(memory['capacity'])} are there"]


def _parallelism(facts: Mapping[str, Any], cluster: Cluster) -> list[str]:
    mesh, found = facts["mesh"], []
    shards = mesh["fsdp"] * mesh["tensor"]
    # Plain copies hold parameters, two moments and the gradient whole, all of the parameters' size.
    memory = facts["memory"]
    alone = (2 * memory["parameters"] + memory["optimizer"]) * shards
    rest = memory["peak"] - 2 * memory["parameters"] - memory["optimizer"]
    if shards > 1 and memory["capacity"] and alone + max(0, rest) < memory["capacity"]:
        found.append(
            f"the model fits one GPU ({decimal(alone + max(0, rest))} of {decimal(memory['capacity'])}): plain data "
            f"parallelism (mesh.replica={facts['devices']} mesh.fsdp=1) sends gradients only, and no parameters"
        )
    if mesh["tensor"] > cluster.link_domain:
        exposed = sum(seconds for axes, seconds in facts["time"]["parts"].items() if axes == "exposed tensor")
        found.append(
            f"mesh.tensor={mesh['tensor']} crosses the network, as fast links join {cluster.link_domain} GPUs only: "
            f"{exposed:.3g} s of a step of {facts['time']['step_seconds']:.3g} s wait for it"
        )
    return found


def _batch(facts: Mapping[str, Any]) -> list[str]:
    memory = facts["memory"]
    share = memory["peak"] / memory["capacity"]
    if share > MUCH_LEFT or facts["microsteps"] == 1:
        return []
    return [
        f"{share:.0%} of a GPU's memory is used: a larger batch.microbatch needs fewer of the {facts['microsteps']} "
        "microsteps, and keeps the GPUs busier"
    ]


def _waiting(facts: Mapping[str, Any]) -> list[str]:
    time = facts["time"]
    return [
        f"{seconds / time['step_seconds']:.0%} of a step waits for the axis {name.removeprefix('exposed ')}: fewer "
        "devices along it, a larger batch.microbatch, or a faster network would help most"
        for name, seconds in time["parts"].items()
        if name.startswith("exposed ") and seconds > MUCH_EXPOSED * time["step_seconds"]
    ]


def _loading(facts: Mapping[str, Any], cluster: Cluster) -> list[str]:
    rate = facts["time"]["tokens_per_second"]
    host = rate / cluster.hosts
    return [
        f"each host reads {host:,.0f} tokens/s ({decimal(int(host * STORED_BYTES))}/s): hold that against "
        "`jaxscale data bench`",
        f"all hosts together read {decimal(int(rate * STORED_BYTES))}/s; from a shared file system that is slower, set "
        "data.stage_to to a disk of each host",
    ]
