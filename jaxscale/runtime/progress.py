"""What a person sees while a run is under way: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

PLAIN_SECONDS = 10.0
"""Least time between two lines of updates in a log file."""


class ProgressBar:
    """A sink of metrics lines. On a terminal one bar; elsewhere a line now and then, so that logs stay readable."""

    def __init__(self, console: Console, first: int, last: int) -> None:
        """`first`: updates done before; `last`: updates of the whole run."""
        self._console = console
        self._last = last
        self._validation = ""
        self._printed = 0.0
        self._pace: deque[float] = deque(maxlen=20)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[shown]}"),
                console=console,
            )
            self._task = self._bar.add_task("", total=last, completed=first, shown="")
            self._bar.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Show a line of metrics.jsonl."""
        step = int(line["step"])
        if "split" in line:
            self._validation = f"  {line['split']} loss {_number(line['loss'])}"
            if self._bar is None:
                self._console.print(f"step {step:,}{self._validation}", highlight=False)
            return
        self._pace.append(float(line["step_seconds"]))
        shown = f"loss {_number(line['loss'])}{self._validation}  {line['tokens_per_second']:,.0f} tokens/s"
        if line["mfu"] is not None:
            shown += f"  MFU {line['mfu']:.1%}"
        shown += f"  {self._left(step)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, shown=shown)
        elif time.monotonic() - self._printed > PLAIN_SECONDS or step == self._last:
            self._printed = time.monotonic()
            self._console.print(f"step {step:,}/{self._last:,}  {shown}", highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()

    def _left(self, step: int) -> str:
        """Time left at the pace of the latest updates, whose median the first, slow one does not move."""
        return f"{duration(median(self._pace) * (self._last - step))} left"


def duration(seconds: float) -> str:
    """Such as 45 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    seconds = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            rest = seconds % size // part
            return f"{seconds // size} {unit} {rest} {smaller}" if rest else f"{seconds // size} {unit}"
    return f"{seconds} s"


def _number(value: float | None) -> str:
    return "not finite" if value is None or value != value else f"{value:.3f}"
