"""A plan as a page of text, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.filesize import decimal, pick_unit_and_suffix

WIDTH = 72

CPU = """\
Compiled for CPU devices: the compiler of GPUs fuses and schedules otherwise,
so take memory and collectives as approximate."""


def page(facts: Mapping[str, Any]) -> str:
    """The facts of `plan.plan` as text."""
    blocks = [_update(facts), _memory(facts["memory"]), _collectives(facts["collectives"])]
    if facts["device_kind"] == "cpu":
        blocks.append(CPU)
    return "\n\n".join(blocks)


def _update(facts: Mapping[str, Any]) -> str:
    """What one update is, and where it runs."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in facts["mesh"].items() if size > 1) or "1"
    unit, suffix = pick_unit_and_suffix(int(facts["flops_an_update"]), ["", "k", "M", "G", "T", "P", "E", "Z"], 1000)
    return "\n".join(
        [
            _line("devices", f"{facts['devices']:,} x {facts['device_kind']}"),
            _line("mesh", mesh),
            _line("parameters", f"{facts['parameters']:,}"),
            _line("tokens an update", f"{facts['tokens_an_update']:,}"),
            _line("microsteps an update", f"{facts['microsteps']:,}"),
            _line("work of an update", f"{facts['flops_an_update'] / unit:.1f} {suffix}FLOP"),
            _line("compiled in", f"{facts['compile_seconds']:.1f} s"),
        ]
    )


def _memory(memory: Mapping[str, int]) -> str:
    """What a device holds at once."""
    outputs = memory["outputs"] - memory["aliased"]
    return "\n".join(
        [
            "Memory of a device",
            _line("  state and batch", decimal(memory["arguments"])),
            _line("  results that are not in the state's place", decimal(outputs)),
            _line("  temporaries", decimal(memory["temporaries"])),
            _line("  together", decimal(memory["peak"])),
        ]
    )


def _collectives(collectives: list[Mapping[str, Any]]) -> str:
    """What a device exchanges, a part for each set of axes, those that send most first."""
    if not collectives:
        return "No collectives: a device computes alone"

    def axes(one: Mapping[str, Any]) -> str:
        return f"{' x '.join(one['axes']) or 'no axis'}: groups of {one['group_size']:,}"

    sent: dict[str, int] = {}
    for one in collectives:
        sent[axes(one)] = sent.get(axes(one), 0) + one["sent_bytes"]
    lines = [_row("Collectives of a device and update", "count", "payload", "sent")]
    for heading, ones in groupby(sorted(collectives, key=lambda one: (-sent[axes(one)], axes(one))), axes):
        lines.append(f"  {heading}")
        for one in ones:
            count = f"{'>= ' if one['at_least'] else ''}{one['count']:,}"
            sizes = decimal(one["payload_bytes"]), decimal(one["sent_bytes"])
            lines.append(_row(f"    {one['kind']} {one['dtype']}", count, *sizes))
    lines.append(_row("  together", "", "", decimal(sum(sent.values()))))
    if any(one["at_least"] for one in collectives):
        lines.append("  >=: inside a loop whose number of iterations is not known, counted as one")
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    """A fact: its name on the left, its value on the right."""
    return f"{name} {value:>{WIDTH - len(name) - 1}}"


def _row(name: str, *columns: str) -> str:
    """A row of a table: a name and three columns of figures."""
    figures = "".join(f"{column:>12}" for column in columns)
    return f"{name:<{WIDTH - len(figures)}}{figures}"
