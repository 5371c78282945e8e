"""Ending in good order: signals that ask for a checkpoint, and a watchdog for processes that are stuck."""

from __future__ import annotations

import faulthandler
import itertools
import signal
import time
from types import FrameType
from typing import Any, Self

import jax

from jaxscale.cluster import distributed

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STEPS_AHEAD = 2

_made = itertools.count()


class StopSignal:
    """Turns SIGTERM, SIGUSR1 and SIGINT into one agreed stop of all processes, though only one got the signal.

    `agreed()` is to be asked by every process before each dispatch of a step that all of them run together. It counts
    its calls; all processes stop at the same call n:

    - A process that got a signal proposes n = (number of this call) + 2 before its dispatch. The first proposal stands.
    - Every process looks for a proposal in each call, and stops at call n.

    Why all of them see it in time: a process may have two steps in flight, so before it asks for call n it has read the
    result of the step of call n - 2. That step sums over all processes, so the proposer had dispatched its part, and it
    proposes before it dispatches. A process therefore never passes call n without having seen the proposal, whichever
    process is slow. With a single process the stop is immediate.

    A second SIGTERM or SIGUSR1 changes nothing, so the checkpoint gets written; a second SIGINT ends the process.

    Used as a context manager, in the main thread: it puts the former handlers back at the end.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first signal that this process itself received."""
        self._key = f"stop/{next(_made)}"
        self._alone = jax.process_count() == 1
        self._call = 0
        self._stop_at: int | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether to stop now, instead of dispatching the next step; True also in every later call."""
        self._call += 1
        if self._alone:
            return self.signal is not None
        if self._stop_at is None:
            if self.signal is not None:
                self._stop_at = int(distributed.propose(self._key, str(self._call + _STEPS_AHEAD)))
            elif proposal := distributed.peek(self._key):
                self._stop_at = int(proposal)
        return self._stop_at is not None and self._call >= self._stop_at

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler: remember the first signal, and leave a second SIGINT to the system."""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.signal is None:
            self.signal = signal.Signals(number)


class Watchdog:
    """Ends the process (exit code 1), with the stacks of all threads on stderr, if `alive` is not called for `seconds`.

    The clock runs in C (`faulthandler`), so it also catches a main thread that hangs in a collective. It starts with
    the first call of `alive`, so that compiling is not taken for hanging.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._armed_at: float | None = None

    def alive(self) -> None:
        """Say that a step was completed. Costs next to nothing: the clock is set anew once in a tenth of `seconds`."""
        now = time.monotonic()
        if self._armed_at is None or now - self._armed_at > self._seconds / 10:
            faulthandler.dump_traceback_later(self._seconds, exit=True)
            self._armed_at = now

    def close(self) -> None:
        """Stop watching."""
        faulthandler.cancel_dump_traceback_later()
