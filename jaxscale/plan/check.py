"""A finished run held against its plan."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.config.errors import Refused
from jaxscale.runtime.metrics import read

WARM_UP = 5
"""Updates that do not count: the first ones fill buffers and settle clocks."""


def check(run_dir: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The measured time of an update of a run beside the planned one.

    Updates of another size than the planned one (see `phases`) do not count, and what waits for data is left out.

    Args:
        run_dir: with its metrics.jsonl.
        facts: of `plan.plan`, for the run's config and the cluster that it ran on.

    Returns:
        `updates` that were compared, their median `measured_seconds`, `planned_seconds`, `ratio` of measured to
        planned, and `fastest_seconds` and `slowest_seconds`, the first and the last decile.

    Raises:
        Refused: there is nothing to compare.
    """
    if facts["time"] is None:
        raise Refused("--check: the plan has no times to compare with: it needs --cluster and the GPU compiler")
    lines = [line for line in read(run_dir / "metrics.jsonl") if "split" not in line]
    before = [0, *(line["tokens"] for line in lines)]
    steps = [0, *(line["step"] for line in lines)]
    seconds, planned_tokens = [], facts["tokens_an_update"]
    for number, line in enumerate(lines[WARM_UP:], WARM_UP):
        if line["tokens"] - before[number] == planned_tokens * (line["step"] - steps[number]):
            seconds.append(line["step_seconds"] - line["data_wait_seconds"])
    if len(seconds) < 2:
        raise Refused(
            f"--check {run_dir}: metrics.jsonl has {len(lines)} updates, and of those after the first {WARM_UP} "
            f"fewer than two have the {planned_tokens:,} tokens that were planned"
        )
    median, deciles = statistics.median(seconds), statistics.quantiles(seconds, n=10)
    planned = facts["time"]["step_seconds"]
    return {
        "updates": len(seconds),
        "measured_seconds": median,
        "planned_seconds": planned,
        "ratio": median / planned,
        "fastest_seconds": deciles[0],
        "slowest_seconds": deciles[-1],
    }
