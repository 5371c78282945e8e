"""The loop: feed -> step -> lagged metrics -> hooks.

Update n + 1 is dispatched before the metrics of update n are read, so the devices never wait for Python and Python
waits for the devices at one place only. No process can be more than one update ahead of that reading, which is what
lets processes agree on where to stop (runtime/guard.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jaxscale.data.feed import FedBatch, Feed


@dataclass(frozen=True)
class Update:
    """What is known of one update once its metrics have been read."""

    step: int
    """1 after the first update."""
    metrics: dict[str, np.ndarray]
    """What train_step returned, on the host."""
    batch: FedBatch
    step_seconds: float
    """From the reading of the update before to that of this one, less the time that hooks took."""
    data_wait_seconds: float
    """How long the loop waited for the batch."""


class Hook(Protocol):
    """What happens around the updates. Hooks do not know each other; they run in the order in which they are given."""

    name: str
    """What the time of `at` is accounted to."""

    def due(self, step: int) -> bool:
        """Whether `at` is to be called after update `step`; the loop then reads that update's metrics first."""
        ...

    def read(self, update: Update) -> None:
        """The metrics of an update have been read."""
        ...

    def at(self, step: int, state: Any) -> None:
        """Update `step` is done and `state` is its result, which the next update will consume."""
        ...

    def close(self) -> None:
        """The loop has ended, well or not."""
        ...


def run_loop(
    state: Any,
    train_step: Callable[[Any, Any], tuple[Any, Any]],
    feed: Feed,
    first: int,
    last: int,
    hooks: Sequence[Hook],
    stop: Callable[[], bool],
    phase: Callable[[str], AbstractContextManager[None]],
) -> tuple[Any, int]:
    """Does updates `first` + 1 to `last`, or until `stop` says so before one of them.

    `phase(name)` accounts for the time that is not the updates' own: waiting for data, and each hook.

    Returns:
        The state and the number of the last update done, whose metrics have been read.
    """
    reader = _Reader(hooks)
    step = first
    while step < last and not stop():
        step += 1
        with phase("data"):
            batch, waited = feed.next()
        state, metrics = train_step(state, batch.arrays)
        reader.read()
        reader.pending = (step, metrics, batch, waited)
        due = [hook for hook in hooks if hook.due(step)]
        if due:
            reader.read()
            with reader.paused():
                for hook in due:
                    with phase(hook.name):
                        hook.at(step, state)
    reader.read()
    return state, step


class _Reader:
    """Reads metrics one update late, and keeps the time between readings."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.pending: tuple[int, Any, FedBatch, float] | None = None
        self._hooks = hooks
        self._last = time.perf_counter()

    def read(self) -> None:
        """Reads the pending update, if there is one, and tells the hooks."""
        if self.pending is None:
            return
        step, metrics, batch, waited = self.pending
        self.pending = None
        values = jax.device_get(metrics)
        now = time.perf_counter()
        update = Update(step, values, batch, now - self._last, waited)
        self._last = now
        with self.paused():
            for hook in self._hooks:
                hook.read(update)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count as an update's."""
        begin = time.perf_counter()
        yield
        self._last += time.perf_counter() - begin
