"""Telling a person how far a long piece of work on data is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from datetime import timedelta

SECONDS_A_LINE = 20
"""Seconds between two lines in a log file."""

Progress = Callable[[str, int, int], None]
"""Told again and again what is done, how much of it is done, and how much there is to do."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Counter:
    """Bytes that several threads have done together, passed on to a progress."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._total = progress, what, total
        self._done, self._lock, self._ended = 0, threading.Lock(), threading.Event()

    def advance(self, count: int) -> None:
        """So many more; raises CancelledError once the work has ended, so that who still works on it ends too."""
        if self._ended.is_set():
            raise CancelledError
        with self._lock:
            self._done += count
            self._progress(self._what, self._done, self._total)

    def end(self) -> None:
        """The work has ended, well or not."""
        self._ended.set()


@contextmanager
def shown_on_stderr(unit: str = "B") -> Iterator[Progress]:
    """Progress as a bar for each piece of work, gone when the block ends; in a log file a line now and then.

    `unit`: what is counted.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True, markup=False)
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TaskProgressColumn(), rate)
    bars = Bars(*columns, TimeRemainingColumn(), console=console, transient=True)
    tasks, begun, told = dict[str, TaskID](), dict[str, tuple[float, int]](), dict[str, float]()

    def progress(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what not in tasks:
            tasks[what], begun[what], told[what] = bars.add_task(what, total=total, rate=""), (now, done), now
            if console.is_terminal:
                bars.start()
            else:
                console.print(what)
        since, first = begun[what]
        speed = (done - first) / max(now - since, 1e-9)
        bars.update(tasks[what], completed=done, rate=f"{speed / 1e6:,.1f} M{unit}/s" if done > first else "")
        if not console.is_terminal and now - told[what] >= SECONDS_A_LINE and speed > 0:
            left = timedelta(seconds=round((total - done) / speed))
            console.print(
                f"{what}: {done / total:.0%} of {total / 1e6:,.1f} M{unit}, {speed / 1e6:,.1f} M{unit}/s, {left} left"
            )
            told[what] = now

    try:
        yield progress
    finally:
        if console.is_terminal:
            bars.stop()
