"""A plan as a page of text, for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.filesize import decimal, pick_unit_and_suffix

WIDTH = 72

CPU = """\
Compiled for CPU devices: the compiler of GPUs fuses and schedules otherwise,
so take memory and collectives as approximate."""
NO_COMPILER = """\
The GPU compiler is not installed (pip install 'jaxscale[plan]'), or does not
know this GPU: times, and what follows from them, are by formulas that do not
see the program, and approximate, too."""
PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "batch": "batch",
    "other_state": "other state",
    "outputs": "results that are not in the state's place",
    "gradients": "gradients",
    "saved_activations": "activations saved for the backward pass",
    "gathered_parameters": "gathered parameters",
    "logits": "logits",
    "temporaries": "other temporaries",
}
"""Names of the parts of a device's memory."""
KINDS = {"matmul": "matrix products", "attention": "attention", "memory": "other kernels", "optimizer": "optimizer"}
"""Names of the kinds of kernels."""


def page(facts: Mapping[str, Any]) -> str:
    """The facts of `plan.plan` as text."""
    blocks = [_update(facts), _memory(facts["memory"]), _collectives(facts["collectives"])]
    if facts["time"] is not None:
        blocks += [
            _time(facts["time"]),
            *([_money(facts["money"])] if facts["money"] else []),
            _advice(facts["advice"]),
        ]
    if "check" in facts:
        blocks.append(_check(facts["check"]))
    if facts["platform"] == "cpu":
        blocks.append(CPU if facts["cluster"] is None else f"{CPU}\n{NO_COMPILER}")
    return "\n\n".join(block for block in blocks if block)


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
    lines = [_line(f"  {name}", decimal(memory[key])) for key, name in PARTS.items() if memory.get(key)]
    lines.append(_line("  together", decimal(memory["peak"])))
    if memory["capacity"] is not None:
        left = memory["capacity"] - memory["peak"]
        lines.append(_line("  of", decimal(memory["capacity"])))
        if left < 0:
            lines.append(f"  it does not fit, by {decimal(-left)}")
    return "\n".join(["Memory of a device", *lines])


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


def _time(time: Mapping[str, Any]) -> str:
    """How long an update takes, and what it spends that on."""
    lines = [
        _line("Time of an update", f"{time['step_seconds']:.3f} s"),
        _line("  tokens/s", f"{time['tokens_per_second']:,.0f}"),
        _line("  tokens/s a GPU", f"{time['tokens_per_second_a_gpu']:,.0f}"),
        _line("  MFU", f"{time['mfu']:.1%}"),
    ]
    for name, seconds in time["parts"].items():
        shown = KINDS.get(name) or f"waiting for {name.removeprefix('exposed ')}"
        lines.append(_line(f"  {shown}", f"{seconds:.3f} s  {seconds / time['step_seconds']:>6.1%}"))
    for axes, seconds in time["hidden"].items():
        lines.append(_line(f"  communication over {axes} behind computation", f"{seconds:.3f} s        "))
    return "\n".join(lines)


def _money(money: Mapping[str, Any] | None) -> str:
    """What the whole run costs; nothing where its length is not known."""
    if money is None:
        return ""
    between = f"one in {money['hours_between_failures']:,.1f} h"
    lines = [
        _line("The whole run", f"{money['days']:,.2f} days"),
        _line("  GPU-hours", f"{money['gpu_hours']:,.0f}"),
        _line("  energy", f"{money['kilowatt_hours']:,.0f} kWh"),
        _line("  failures to be expected", f"{money['failures']:,.1f}, {between}"),
        _line(
            "  best interval of checkpoints",
            f"{money['checkpoint_updates']:,} updates ({money['checkpoint_seconds'] / 60:,.0f} min)",
        ),
        _line("  with failures", f"{money['days_with_failures']:,.2f} days (ETTR {money['ettr']:.1%})"),
    ]
    if money["cost"] is not None:
        lines.append(_line("  cost", f"{money['cost']:,.0f}"))
    return "\n".join(lines)


def _advice(advice: Sequence[str]) -> str:
    """A paragraph for each piece of advice."""
    lines = [textwrap.fill(text, WIDTH, initial_indent="  - ", subsequent_indent="    ") for text in advice]
    return "\n".join(["Advice", *lines])


def _check(check: Mapping[str, Any]) -> str:
    """What was measured beside what was planned."""
    return "\n".join(
        [
            _line("Measured, an update", f"{check['measured_seconds']:.3f} s"),
            _line(
                "  of which eight in ten take", f"{check['fastest_seconds']:.3f} to {check['slowest_seconds']:.3f} s"
            ),
            _line("  updates", f"{check['updates']:,}"),
            _line("  over planned", f"{check['ratio']:.2f}"),
        ]
    )


def _line(name: str, value: str) -> str:
    """A fact: its name on the left, its value on the right."""
    return f"{name} {value:>{WIDTH - len(name) - 1}}"


def _row(name: str, *columns: str) -> str:
    """A row of a table: a name and three columns of figures."""
    figures = "".join(f"{column:>12}" for column in columns)
    return f"{name:<{WIDTH - len(figures)}}{figures}"
