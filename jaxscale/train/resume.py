"""What a run may change when it continues from a checkpoint, and what it may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxscale.config.diff import Change, compare, flatten
from jaxscale.config.errors import Refused
from jaxscale.config.schema import Config
from jaxscale.runtime.checkpoint import latest_step, read_metadata

FIXED = ("batch.global_size", "data.sequence_length")
"""The cursor counts in these: a run that changed them would see other batches than its metrics say."""
ORDER = ("seed", "data.shuffle")
"""Which rows follow, besides the dataset itself."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest complete checkpoint of a run directory."""

    step: int
    config: Mapping[str, Any]
    """Dotted keys and values of the run that saved it."""
    dataset: str
    """Fingerprint of the dataset it was trained on."""


def newest(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint that process 0 sees, None if there is none; all processes must ask."""
    folder = run_dir / "checkpoints"
    step = latest_step(folder)
    if step is None:
        return None
    stored = read_metadata(folder, step)
    return Checkpoint(step, stored["config"], stored["dataset"])


def metadata(config: Config, dataset_fingerprint: str) -> dict[str, Any]:
    """What a checkpoint stores beside the arrays."""
    return {"config": flatten(config), "dataset": dataset_fingerprint}


def check_resume(saved: Checkpoint, config: Config, dataset_fingerprint: str) -> Sequence[Change]:
    """What changed since the checkpoint and takes effect from here on.

    Raises:
        Refused: batch or sequence length changed; or dataset, seed or order changed without data.accept_change.
    """
    changes = [c for c in compare(saved.config, flatten(config)) if not c.key.startswith("cluster.")]
    for change in changes:
        if change.key in FIXED:
            raise Refused(
                f"{change.key} = {change.new}, but the run was trained with {change.old} up to step {saved.step}; "
                f"nearest: {change.key}={change.old}, or another name"
            )
    different = [f"{change.key} = {change.new}, was {change.old}" for change in changes if change.key in ORDER]
    if saved.dataset != dataset_fingerprint:
        different.insert(
            0, f"the dataset {config.data.train} has fingerprint {dataset_fingerprint[:12]}, was {saved.dataset[:12]}"
        )
    if different and not config.data.accept_change:
        raise Refused(
            f"{'; '.join(different)}: the run would go on with other rows than it began with (step {saved.step}). "
            "If that is meant, data.accept_change=true continues at the same cursor of the new order"
        )
    return changes
