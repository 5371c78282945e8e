"""A compiled step replayed in program order: when each kernel and each collective would run, and what waits for what.

The program is scheduled, so the order of its instructions is the order of execution. Kernels follow each other on the
compute lane. A collective begins when it is issued and its lane (the links inside a host, or the network) is free, and
whoever needs its result waits: that wait is its exposed part. A loop is replayed twice, first to find out how it begins
and then how it goes on, and lasts the first plus so many times the second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxscale.hardware import Cluster
from jaxscale.plan.collectives import KINDS, Collective, collective
from jaxscale.plan.cost import Group, collective_seconds
from jaxscale.plan.groups import groups_of
from jaxscale.plan.kernels import kernel
from jaxscale.plan.program import Computation, Instruction, Program
from jaxscale.report.timeline import Span

LINKS, NETWORK, COMPUTE = "links", "network", "compute"
"""Lanes."""
MOST_EVENTS = 20_000
"""Events that are kept for the picture; later iterations of loops beyond them are not drawn."""


@dataclass
class Replay:
    """What a replay adds up."""

    seconds: float = 0.0
    """Of the whole step."""
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the compute lane by kind, and `exposed AXES` by the axes of the collective that is waited for."""
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the collectives by axes, hidden or not."""
    flops: float = 0.0
    """Of matrix products and attention, those of recomputation too."""
    kernels: int = 0
    events: list[Span] = field(default_factory=list)
    """What takes a lane when; named as the program does, of the kinds of `parts` or a collective's kind and axes."""


@dataclass
class _Lanes:
    """The clock of the compute lane, when each other lane is free, and what is on the way."""

    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    pending: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Of a collective that was issued: when it ends, and its axes."""


def replay(program: Program, cluster: Cluster, axes: Mapping[str, int], in_optimizer: Callable[[str], bool]) -> Replay:
    """The step on a cluster.

    Args:
        program: scheduled for one device of the mesh.
        cluster: its devices are those of the mesh, host by host.
        axes: the mesh, outermost axis first.
        in_optimizer: whether an operation of the traced step (see `Instruction.origin`) belongs to the optimizer.
    """
    lanes, total = _Lanes(), Replay()

    def run(computation: Computation, record: Replay) -> None:
        for instruction in computation.instructions:
            step(instruction, computation, record)

    def step(instruction: Instruction, computation: Computation, record: Replay) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            loop(program.computations[instruction.called("body")], instruction.iterations or 1, record)
        elif opcode in ("call", "async-start") and not instruction.target:
            run(program.computations[instruction.called("to_apply" if opcode == "call" else "calls")], record)
        elif opcode == "conditional":
            branches = [name for how, name in instruction.calls if how.endswith("computations")]
            run(program.computations[branches[-1]], record)
        elif opcode.removesuffix("-start") in KINDS:
            issue(instruction, record)
            if not opcode.endswith("-start"):
                wait(instruction.name, record)
        elif opcode.removesuffix("-done") in KINDS:
            wait(instruction.operands[0], record)
        else:
            launch(instruction, computation, record)

    def loop(body: Computation, iterations: int, record: Replay) -> None:
        run(body, record)
        if iterations == 1:
            return
        begin, again = lanes.now, Replay()
        run(body, again)
        length = lanes.now - begin
        _add(record, again, iterations - 1, begin, length)
        shift = length * (iterations - 2)
        lanes.now += shift
        lanes.free = {lane: free + shift for lane, free in lanes.free.items()}

    def launch(instruction: Instruction, computation: Computation, record: Replay) -> None:
        launched = kernel(instruction, computation, program, cluster.gpu)
        if launched is None:
            return
        kind = "optimizer" if launched.kind == "memory" and in_optimizer(instruction.origin) else launched.kind
        event = Span(COMPUTE, instruction.name, kind, lanes.now, lanes.now + launched.seconds)
        lanes.now = event.end
        record.parts[kind] += launched.seconds
        record.flops += launched.flops
        record.kernels += 1
        record.events.append(event)

    def issue(instruction: Instruction, record: Replay) -> None:
        found = collective(instruction, axes)
        over = " x ".join(found.axes) or "no axis"
        lane, seconds = _collective(found, instruction, cluster)
        begin = max(lanes.now, lanes.free.get(lane, 0.0))
        lanes.free[lane] = begin + seconds
        lanes.pending[instruction.name] = begin + seconds, over
        record.communication[over] += seconds
        record.events.append(Span(lane, instruction.name, f"{found.kind} {over}", begin, begin + seconds))

    def wait(name: str, record: Replay) -> None:
        end, over = lanes.pending.pop(name, (0.0, ""))
        if end > lanes.now:
            record.parts[f"exposed {over}"] += end - lanes.now
            lanes.now = end

    run(program.entry, total)
    total.seconds = lanes.now
    return total


def _collective(found: Collective, instruction: Instruction, cluster: Cluster) -> tuple[str, float]:
    """The lane of a collective, and its seconds once it runs."""
    widest = max(
        (
            Counter(device // cluster.link_domain for device in group)
            for group in groups_of(instruction.attributes, cluster.gpus)
        ),
        key=lambda domains: (domains.total(), len(domains)),
    )
    group = Group(widest.total(), max(widest.values()))
    lane = LINKS if group.in_domain == group.size else NETWORK
    return lane, collective_seconds(cluster, found.kind, found.payload_bytes, group)


def _add(record: Replay, one: Replay, times: int, begin: float, length: float) -> None:
    """Add so many repetitions of what was recorded from `begin` on, each of that length."""
    for name, seconds in one.parts.items():
        record.parts[name] += times * seconds
    for name, seconds in one.communication.items():
        record.communication[name] += times * seconds
    record.flops += times * one.flops
    record.kernels += times * one.kernels
    for turn in range(times):
        if len(record.events) + len(one.events) > MOST_EVENTS:
            break
        shift = turn * length
        record.events += [event._replace(begin=event.begin + shift, end=event.end + shift) for event in one.events]
