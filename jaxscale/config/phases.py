"""Phases: stretches of a run with one batch, one sequence length and one mixture; and what follows from them.

An *update* consumes one global batch of examples (rows). The *cursor* counts the examples that the run has consumed,
so a cursor, an update and a number of tokens are the same place in three units, in closed form over the phases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxscale.config.errors import WrongValue
from jaxscale.config.length import Length, parse_length, train_length
from jaxscale.config.schema import Config


@dataclass(frozen=True)
class Phase:
    """A stretch of the run; it lasts until the next one begins."""

    first_cursor: int
    """Examples consumed before it."""
    global_batch: int
    """Examples of an update."""
    sequence_length: int
    """Tokens in a row."""
    weights: tuple[float, ...] = (1.0,)
    """Share of each source, over their sum."""
    microbatch: int | None = None
    """Examples of a data shard and microstep; None: one microstep."""


def phases_of(config: Config, past: Sequence[Phase] = (), cursor: int = 0) -> tuple[Phase, ...]:
    """The phases that a config describes: what `[batch]` and `[data]` say, then each of `phases`.

    Where a run has a `past` up to a `cursor`, they follow it; changes whose start is behind the cursor hold from it.

    Raises:
        WrongValue: a phase does not begin a whole number of updates after the one before, or names an unknown source.
    """
    sources = config.data.sources
    phase = Phase(
        first_cursor=cursor,
        global_batch=config.batch.global_size,
        sequence_length=config.data.sequence_length,
        weights=tuple(source.weight for source in sources.values()),
        microbatch=config.batch.microbatch,
    )
    phases = [*past, phase]
    for number, change in enumerate(config.phases):
        key = f"phases.{number}.start"
        start = _length(change.start, key)
        behind = bool(past) and _is_behind(phases, start, cursor)
        phase = Phase(
            first_cursor=cursor if behind else _start(phases, start, change.start, key),
            global_batch=change.global_size or phase.global_batch,
            sequence_length=change.sequence_length or phase.sequence_length,
            weights=phase.weights if change.weights is None else _weights(change.weights, sources, number),
            microbatch=change.microbatch or phase.microbatch,
        )
        phases = [*(phases[:-1] if behind else phases), phase]
    return tuple(phases)


def _weights(weights: Mapping[str, float], sources: Collection[str], number: int) -> tuple[float, ...]:
    """Weights by name in the order of the sources; one that is not named has 0."""
    for name in weights:
        if name not in sources:
            known = ", ".join(sources)
            raise WrongValue(f"phases.{number}.weights.{name}", None, f"is no source of data.train; it has: {known}")
    return tuple(weights.get(name, 0.0) for name in sources)


def _is_behind(phases: Sequence[Phase], start: Length, cursor: int) -> bool:
    """Whether a run that is at a cursor has come to a start."""
    step = step_at_cursor(phases, cursor)
    return start.value <= (step if start.unit == "steps" else tokens_at_step(phases, step))


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run in updates; None for one in epochs of a dataset that is not known."""

    steps: int | None
    """Of the run."""
    warmup: int | None
    """At its beginning."""
    decay: int | None
    """At its end."""


def lengths_of(config: Config, phases: Sequence[Phase], rows: int | None) -> Lengths:
    """The lengths of a config over its phases; `rows` of the dataset at the sequence length of the only one."""

    def updates(length: Length) -> int | None:
        match length.unit:
            case "steps":
                return int(length.value)
            case "tokens":
                return step_at_tokens(phases, int(length.value))
            case "epochs":
                return None if rows is None else math.ceil(length.value * rows / phases[0].global_batch)

    steps, warmup = updates(train_length(config)), updates(parse_length(config.schedule.warmup))
    decay = parse_length(config.schedule.decay or 0)
    if steps is not None and decay.unit == "tokens":
        return Lengths(steps, warmup, _last_updates(phases, steps, int(decay.value)))
    return Lengths(steps, warmup, updates(decay))


def _last_updates(phases: Sequence[Phase], steps: int, tokens: int) -> int:
    """The fewest last updates of a run that consume so many tokens; more than `steps` where the run has not so many."""
    before = tokens_at_step(phases, steps) - tokens
    if before < 0:
        return steps + math.ceil(-before / (phases[0].global_batch * phases[0].sequence_length))
    return steps + 1 - step_at_tokens(phases, before + 1)


def _length(text: int | str, key: str) -> Length:
    """The start of a phase, in updates or tokens."""
    allowed = 'must be in updates or tokens, such as 1000 or "10B tokens"'
    try:
        length = parse_length(text)
    except ValueError:
        raise WrongValue(key, text, allowed) from None
    if length.unit == "epochs":
        raise WrongValue(key, text, allowed)
    return length


def _start(phases: Sequence[Phase], length: Length, text: int | str, key: str) -> int:
    """The cursor at which a phase after these begins."""
    last = phases[-1]
    first_step = step_at_cursor(phases, last.first_cursor)
    if length.unit == "steps":
        step = int(length.value)
        if step <= first_step:
            raise WrongValue(key, text, f"must be after the start of the phase before; at least {first_step + 1}")
        return cursor_at_step(phases, step)
    tokens = int(length.value)
    before = tokens_at_step(phases, first_step)
    an_update = last.global_batch * last.sequence_length
    updates, rest = divmod(tokens - before, an_update)
    if rest or updates < 1:
        nearest = before + max(1, round((tokens - before) / an_update)) * an_update
        raise WrongValue(
            key,
            text,
            f"must be a whole number of updates of {an_update} tokens after {before}; nearest: {nearest} tokens",
        )
    return last.first_cursor + updates * last.global_batch


def phase_at(phases: Sequence[Phase], cursor: int) -> Phase:
    """The phase that holds at a cursor."""
    return [phase for phase in phases if phase.first_cursor <= cursor][-1]


def cursor_at_step(phases: Sequence[Phase], step: int) -> int:
    """Examples consumed before update number `step` (from 0)."""
    return sum(updates * phase.global_batch for phase, updates in updates_of_phases(phases, step))


def tokens_at_step(phases: Sequence[Phase], step: int) -> int:
    """Tokens (rows x sequence length) consumed before update number `step` (from 0)."""
    return sum(
        updates * phase.global_batch * phase.sequence_length for phase, updates in updates_of_phases(phases, step)
    )


def step_at_cursor(phases: Sequence[Phase], cursor: int) -> int:
    """Whole updates done when `cursor` examples have been consumed."""
    step = 0
    for phase, following in _with_next(phases):
        end = cursor if following is None else min(cursor, following.first_cursor)
        step += max(0, end - phase.first_cursor) // phase.global_batch
    return step


def step_at_tokens(phases: Sequence[Phase], tokens: int) -> int:
    """Updates that it takes to consume at least so many tokens."""
    step = 0
    for phase, following in _with_next(phases):
        an_update = phase.global_batch * phase.sequence_length
        updates = -(-tokens // an_update)
        if following is not None:
            updates = min(updates, (following.first_cursor - phase.first_cursor) // phase.global_batch)
        step += updates
        tokens -= updates * an_update
        if tokens <= 0:
            break
    return step


def updates_of_phases(phases: Sequence[Phase], step: int) -> Iterator[tuple[Phase, int]]:
    """How many of the first `step` updates each phase has."""
    for phase, following in _with_next(phases):
        updates = step
        if following is not None:
            updates = min(updates, (following.first_cursor - phase.first_cursor) // phase.global_batch)
        yield phase, updates
        step -= updates


def _with_next(phases: Sequence[Phase]) -> Iterator[tuple[Phase, Phase | None]]:
    yield from pairwise([*phases, None])
