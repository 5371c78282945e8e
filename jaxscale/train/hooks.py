"""What happens around the updates: metrics, checkpoints, evaluation, the profiler, and a guard against non-finite runs.

Each is a `Hook` of `loop.py`, and none knows another. What they have to say goes to sinks, as the lines of
metrics.jsonl: the file is one sink, the progress bar another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxscale.cluster.distributed import exchange
from jaxscale.config.errors import StoppedByGuard
from jaxscale.data.feed import FedBatch
from jaxscale.data.loader import batch_digest
from jaxscale.runtime.checkpoint import Checkpoints
from jaxscale.runtime.guard import Watchdog
from jaxscale.train.loop import Update
from jaxscale.train.state import to_int


class Sink(Protocol):
    """Takes lines of metrics.jsonl."""

    def write(self, line: Mapping[str, Any]) -> None:
        """One line; validation lines carry `split`."""
        ...

    def close(self) -> None:
        """No line will follow; may be called again."""
        ...


def every(steps: int | None, last: int) -> Callable[[int], bool]:
    """Whether a step is a multiple of `steps`, or the last."""
    return lambda step: step == last or (steps is not None and step % steps == 0)


class BaseHook:
    """Does nothing; a hook overrides what it needs."""

    name = "hooks"

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def read(self, update: Update) -> None:
        """Nothing."""

    def at(self, step: int, state: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


WAIT_WARM_UP, WAIT_WINDOW = 5, 100
"""Updates whose waiting does not count, and updates that are judged together."""
MOST_WAIT = 0.01
"""Share of its time that a run may wait for data without a word."""


class MetricsHook(BaseHook):
    """A line for every n-th update and the last."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        wanted: Callable[[int], bool],
        place: Callable[[int], dict[str, int]],
        flops_per_token: Callable[[int], float],
        peak_flops: float | None,
    ) -> None:
        """`wanted(step)`: whether to write a line; `place(step)`: where an update stands; `flops_per_token(length)`: at
        a sequence length; `peak_flops`: FLOP/s of all devices together, None if not known."""
        self._sinks = sinks
        self._wanted = wanted
        self._place = place
        self._flops_per_token, self._peak = flops_per_token, peak_flops

    def read(self, update: Update) -> None:
        """Writes the line, if it is this update's turn."""
        if not self._wanted(update.step):
            return
        digest = {} if update.batch.digests is None else {"batch_digest": global_digest(update.batch)}
        metrics = dict(update.metrics)
        valid_tokens, skipped = to_int(metrics.pop("valid_tokens")), int(metrics.pop("skipped"))
        place = self._place(update.step)
        before = self._place(update.step - 1)
        tokens, examples = place["tokens"] - before["tokens"], place["examples"] - before["examples"]
        rate, flops = tokens / update.step_seconds, self._flops_per_token(tokens // examples)
        line = {
            **place,
            "valid_tokens": valid_tokens,
            **{name: float(value) for name, value in metrics.items()},
            "skipped": skipped,
            "step_seconds": update.step_seconds,
            "data_wait_seconds": update.data_wait_seconds,
            "tokens_per_second": rate,
            "mfu": None if self._peak is None else rate * flops / self._peak,
            "time": time.time(),
            **digest,
        }
        for sink in self._sinks:
            sink.write(line)


class DataWaitHook(BaseHook):
    """Says so where the run waits for data."""

    def __init__(self, say: Callable[[str], None], advice: str) -> None:
        """`say(text)`: tells a person; `advice`: what to change."""
        self._say, self._advice = say, advice
        self._updates, self._waited, self._seconds, self._said = 0, 0.0, 0.0, False

    def read(self, update: Update) -> None:
        """Judges every hundred updates, and says so the first time; the first few, which fill the buffers, not."""
        self._updates += 1
        if self._updates <= WAIT_WARM_UP:
            return
        self._waited += update.data_wait_seconds
        self._seconds += update.step_seconds
        if (self._updates - WAIT_WARM_UP) % WAIT_WINDOW == 0:
            share = self._waited / self._seconds
            if share > MOST_WAIT and not self._said:
                self._said = True
                window = f"the last {WAIT_WINDOW} updates up to {update.step:,}"
                self._say(f"waiting for data: {share:.1%} of {window}; {self._advice}")
            self._waited = self._seconds = 0.0


class CheckpointHook(BaseHook):
    """Saves the state every n updates and at the end."""

    name = "checkpoint"

    def __init__(self, checkpoints: Checkpoints, metadata: Mapping[str, Any], due: Callable[[int], bool]) -> None:
        self._checkpoints = checkpoints
        self._metadata = metadata
        self._due = due
        self._finite = True

    def due(self, step: int) -> bool:
        """Where a save is asked for."""
        return self._due(step)

    def read(self, update: Update) -> None:
        """Raises what a save in the background ran into."""
        self._finite = is_finite(update)
        self._checkpoints.check()

    def at(self, step: int, state: Any) -> None:
        """Starts the save; the checkpoint counts for what is kept only if the update was sound."""
        self._checkpoints.save(step, state, self._metadata)
        if self._finite:
            self._checkpoints.confirm(step)


class EvaluationHook(BaseHook):
    """Evaluates every n updates and at the end."""

    name = "evaluate"

    def __init__(
        self,
        evaluate: Callable[[Any], Mapping[str, Mapping[str, Any]]],
        sinks: Sequence[Sink],
        place: Callable[[int], dict[str, int]],
        due: Callable[[int], bool],
    ) -> None:
        """`evaluate(state)` gives the results of each split; `place(step)`: where an update stands."""
        self._evaluate = evaluate
        self._sinks = sinks
        self._place = place
        self._due = due

    def due(self, step: int) -> bool:
        """Where an evaluation is asked for."""
        return self._due(step)

    def at(self, step: int, state: Any) -> None:
        """A line for each split."""
        for split, results in self._evaluate(state).items():
            for sink in self._sinks:
                sink.write({**self._place(step), "split": split, **results, "time": time.time()})


class ProfileHook(BaseHook):
    """The JAX profiler around a window of updates, counted from the first one that this process does."""

    def __init__(self, folder: Path, before_first: int, first_step: int, steps: int) -> None:
        """`before_first`: the update that the process continues from."""
        self._folder = folder
        self._start = before_first + first_step - 1
        self._stop = self._start + steps
        self._running = False
        if first_step == 1:
            self._begin()

    def due(self, step: int) -> bool:
        """At the update before the window, and at its last."""
        return step in (self._start, self._stop)

    def at(self, step: int, state: Any) -> None:
        """Opens or closes the window."""
        if step == self._start:
            self._begin()
        elif self._running:
            self.close()

    def close(self) -> None:
        """Closes the window also where the run ends inside it."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False

    def _begin(self) -> None:
        jax.profiler.start_trace(self._folder)
        self._running = True


class FiniteGuard(BaseHook):
    """Ends a run in which several updates in a row were not finite."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def read(self, update: Update) -> None:
        """Raises StoppedByGuard at the limit; the skipped updates have changed no parameter."""
        self._in_a_row = 0 if is_finite(update) else self._in_a_row + 1
        if self._in_a_row >= self._limit:
            raise StoppedByGuard(
                f"loss or gradient was not finite in {self._limit} updates in a row, the last of them {update.step} "
                f"(loss {float(update.metrics['loss'])}, gradient norm {float(update.metrics['grad_norm'])}); they "
                "have changed no parameter. Lower optimizer.learning_rate, raise schedule.warmup, or look at the data: "
                f"`jaxscale data show CONFIG --step {update.step}`"
            )


class WatchdogHook(BaseHook):
    """Tells a watchdog of each update that ends."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def read(self, update: Update) -> None:
        """The process is alive."""
        self._watchdog.alive()

    def close(self) -> None:
        """No update will follow."""
        self._watchdog.close()


def is_finite(update: Update) -> bool:
    """Whether the update was applied."""
    return bool(np.isfinite(update.metrics["loss"]) and np.isfinite(update.metrics["grad_norm"]))


def global_digest(batch: FedBatch) -> str:
    """The batch_digest of the global batch; processes exchange 32 bytes a row (and its number)."""
    assert batch.digests is not None
    parts = exchange(batch.rows.astype("<i8").tobytes() + batch.digests.tobytes())
    digests: dict[int, bytes] = {}
    for part in parts:
        count = len(part) // 40
        rows = np.frombuffer(part[: 8 * count], "<i8")
        digests |= {int(row): part[8 * count + 32 * i :][:32] for i, row in enumerate(rows)}
    return batch_digest(np.frombuffer(b"".join(digests[row] for row in sorted(digests)), np.uint8).reshape(-1, 32))
