"""What a run may change when it continues from a checkpoint, and what it may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxscale.config.diff import Change, compare, flatten
from jaxscale.config.errors import Refused
from jaxscale.config.phases import Phase, cursor_at_step, phases_of
from jaxscale.config.schema import Config
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Order, Skip
from jaxscale.runtime.checkpoint import latest_step, read_metadata

ORDER = ("seed", "data.shuffle", "data.packing", "data.when_exhausted")
"""Which rows follow, besides phases and the datasets themselves."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest complete checkpoint of a run directory."""

    step: int
    config: Mapping[str, Any]
    """Dotted keys and values of the run that saved it."""
    datasets: Mapping[str, str]
    """Fingerprint of each dataset it was trained on, by the name of the source."""
    tokenizer: str
    """Fingerprint of their tokenizer."""
    declared: tuple[Phase, ...]
    """The phases of its config."""
    phases: tuple[Phase, ...]
    """The phases that it has really gone through, with those that follow."""

    @property
    def cursor(self) -> int:
        """Examples consumed before it."""
        return cursor_at_step(self.phases, self.step)

    @property
    def skips(self) -> tuple[Skip, ...]:
        """The rows that it leaves out."""
        return tuple(Skip(**skip) for skip in self.config["data.skip"])


def newest(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint that process 0 sees, None if there is none; all processes must ask."""
    folder = run_dir / "checkpoints"
    step = latest_step(folder)
    if step is None:
        return None
    stored = read_metadata(folder, step)
    declared, phases = (
        tuple(Phase(**{**phase, "weights": tuple(phase["weights"])}) for phase in stored[kind])
        for kind in ("declared", "phases")
    )
    return Checkpoint(step, stored["config"], stored["datasets"], stored["tokenizer"], declared, phases)


def metadata(config: Config, mixture: Mixture, phases: Sequence[Phase]) -> dict[str, Any]:
    """What a checkpoint stores beside the arrays."""
    return {
        "config": flatten(config),
        "datasets": mixture.fingerprints,
        "tokenizer": mixture.first.tokenizer_fingerprint,
        "declared": [asdict(phase) for phase in phases_of(config)],
        "phases": [asdict(phase) for phase in phases],
    }


def check_resume(saved: Checkpoint, config: Config, mixture: Mixture) -> Sequence[Change]:
    """What changed since the checkpoint and takes effect from here on.

    Raises:
        Refused: phases, datasets, seed or order changed without data.accept_change; or the tokenizer did.
    """
    if mixture.first.tokenizer_fingerprint != saved.tokenizer:
        raise Refused(
            f"{mixture.first.path} was built with another tokenizer than the data that the run was trained on up to "
            f"step {saved.step}: its ids mean something else; train under another name"
        )
    changes = [c for c in compare(saved.config, flatten(config)) if not c.key.startswith("cluster.")]
    different = [
        f"{change.key} = {change.new}, was {change.old}"
        for change in changes
        if change.key in ORDER or change.key.endswith(".max_epochs")
    ]
    if phases_of(config) != saved.declared:
        different += [
            f"{change.key} = {change.new}, was {change.old}"
            for change in changes
            if change.key in ("batch.global_size", "data.sequence_length", "phases") or change.key.endswith(".weight")
        ]
    datasets = mixture.fingerprints
    for name in sorted({*saved.datasets, *datasets}):
        was, now = saved.datasets.get(name, "none"), datasets.get(name, "none")
        if was != now:
            different.append(f"the dataset data.train.{name} has fingerprint {now[:12]}, was {was[:12]}")
    if different and not config.data.accept_change:
        raise Refused(
            f"{'; '.join(different)}: the run would go on with other batches than it began with (step {saved.step}). "
            "If that is meant, data.accept_change=true continues at the same cursor, with a new phase where the batch, "
            "the sequence length or the mixture is another"
        )
    return changes


def phases_from(saved: Checkpoint | None, config: Config) -> tuple[Phase, ...]:
    """The phases of a run that goes on from a checkpoint (None: begins).

    Those of the config, unless it declares others than the checkpoint's did: then what the run has gone through stays,
    and what the config says for the checkpoint's cursor and later follows as phases of their own.
    """
    declared = phases_of(config)
    if saved is None:
        return declared
    if list(config.data.sources) != list(saved.datasets):
        # Weights are in the order of the sources; those of a past with other sources have no meaning any more.
        past = tuple(replace(phase, weights=declared[0].weights) for phase in saved.phases)
    elif declared == saved.declared:
        return saved.phases
    else:
        past = saved.phases
    cursor = saved.cursor
    return phases_of(config, [phase for phase in past if phase.first_cursor < cursor], cursor)


def check_skips(saved: Checkpoint, order: Order) -> None:
    """Ranges of rows to skip may be added ahead of the run, but its past cannot change.

    Raises:
        Refused: a range is gone, or a new one begins before the place where the run is.
    """
    before, now = set(saved.skips), set(order.skips)
    if gone := sorted(before - now):
        raise Refused(f"data.skip: {gone[0]._asdict()} is missing, but the run was trained with it; put it back")
    for skip in sorted(now - before):
        place = replace(order, skips=saved.skips).place_in_view(skip.sequence_length, saved.cursor)
        if skip.first < place:
            raise Refused(
                f"data.skip: first = {skip.first}, but the run is at place {place} of the rows of "
                f"{skip.sequence_length} tokens; at least {place}"
            )
