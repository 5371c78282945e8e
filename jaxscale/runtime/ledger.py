"""Where the wall time went: exactly one phase is current at each moment, from the birth of the process to its end.

Each start of a run (an *attempt*) has one line in ledger.jsonl with its seconds by phase. A thread overwrites the line
in place every few seconds, so that a killed attempt loses no more than these.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITE_SECONDS = 3.0


class Ledger:
    """The phases of this process's main thread; process 0 keeps them in a file."""

    def __init__(self, first_phase: str = "start") -> None:
        """The time from the birth of the process to now belongs to `first_phase`."""
        self._lock = threading.Lock()
        age = _age_of_process()
        self._started = time.time() - age
        self._since = time.monotonic() - age
        self._phase = first_phase
        self._seconds: dict[str, float] = {}
        self._closed = threading.Event()
        self._writer: threading.Thread | None = None

    def keep(self, path: Path) -> None:
        """From now on keep a line of this attempt in `path`, all phases since the birth of the process included."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._writer = threading.Thread(target=self._keep_writing, args=(file,), name="ledger", daemon=True)
        self._writer.start()

    def switch(self, phase: str) -> str:
        """The time from now on belongs to `phase`; returns the phase that ends. Costs less than a microsecond."""
        with self._lock:
            now = time.monotonic()
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
            ended, self._phase, self._since = self._phase, phase, now
        return ended

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """`phase` inside the block; then again the one that was current before."""
        outer = self.switch(phase)
        try:
            yield
        finally:
            self.switch(outer)

    def totals(self) -> dict[str, float]:
        """Seconds of each phase of this attempt until now."""
        with self._lock:
            current = self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since
            return {**self._seconds, self._phase: current}

    def close(self) -> None:
        """Write the line for the last time; may be called again. What the process does after that is in no phase."""
        self._closed.set()
        if self._writer is not None:
            self._writer.join()

    def _keep_writing(self, file: int) -> None:
        """Write the line now, every few seconds, and when the ledger is closed: each time in one system call, in place.

        Blanks keep the line from getting shorter than it was.
        """
        offset, length, closed = _end_of_lines(file), 0, False
        while not closed:
            closed = self._closed.wait(WRITE_SECONDS if length else 0)
            seconds = {phase: round(seconds, 4) for phase, seconds in self.totals().items()}
            line = json.dumps({"started": round(self._started, 3), "process": os.getpid(), "seconds": seconds})
            length = max(length, len(line))
            os.pwrite(file, line.ljust(length).encode() + b"\n", offset)
        os.close(file)


def read_attempts(path: Path) -> list[dict[str, float]]:
    """Seconds by phase of each attempt in ledger.jsonl, oldest first; empty if there is no file."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    attempts = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # what a broken disk or a bad edit left
            attempts.append(json.loads(line)["seconds"])
    return attempts


def read_totals(path: Path) -> dict[str, float]:
    """Seconds by phase over all attempts in ledger.jsonl."""
    totals: dict[str, float] = {}
    for attempt in read_attempts(path):
        for phase, seconds in attempt.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    return totals


def _end_of_lines(file: int) -> int:
    """The offset behind the last whole line: what a lost machine may have torn is written over."""
    content = os.pread(file, os.fstat(file).st_size, 0)
    return content.rfind(b"\n") + 1


def _age_of_process() -> float:
    """Seconds since this process was started, imports and all, to 0.01 s: proc(5), field 22 of stat."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
