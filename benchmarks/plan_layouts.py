"""Holds the planner's formulas against published training runs, in every layout: pipelines, context, ZeRO 1, float8.

    python -m benchmarks.plan_layouts [--core N] [--only TEXT] [--picture FILE.png] [--json]

The same report as that of `benchmarks.plan`, by `plan/analytical.py` and without a compiler, in seconds; and whether
the formulas of memory agree with the runs of a study of layouts that fitted their GPUs or ran out of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.plan import Prediction, picture, print_report, report
from benchmarks.published_layouts import cluster_with_kernels, layout_of, memory_runs, model_of, why_not_estimated
from benchmarks.published_runs import GPUS, Row, runs
from jaxscale.config.errors import Stop
from jaxscale.hardware import known
from jaxscale.plan.analytical import estimate
from jaxscale.plan.footprint import fits, memory_of

OUTCOMES = {"ok": True, "OOM Error": False}
"""Whether a run fitted; other outcomes say nothing of it."""


def predict(row: Row) -> Prediction | str:
    """The estimate of a run, or why there is none."""
    reason = why_not_estimated(row)
    if reason or not row.step_seconds:
        return reason or "its time"
    try:
        found = estimate(model_of(row), row.number("seq_len"), layout_of(row), cluster_with_kernels(row))
    except Stop as error:
        return str(error)
    return Prediction(row, found.step_seconds, found.parts, row["recompute"])


def memory_report() -> dict[str, Any]:
    """How often the formulas say of a run whether it fitted, and where they do not."""
    decided = [row for row in memory_runs() if row["outcome"] in OUTCOMES]
    wrong = {}
    for row in decided:
        memory = memory_of(model_of(row), row.number("seq_len"), layout_of(row))
        if fits(memory, known().gpus[GPUS[row["gpu"], row["gpu_mem_gb"]]]) != OUTCOMES[row["outcome"]]:
            wrong[row["id"]] = {"outcome": row["outcome"], "estimated_gb": memory.total / 1e9}
    return {"runs": len(decided), "agree": 1 - len(wrong) / len(decided), "disagree": wrong}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=1, help="least trustworthiness of runs (see published/README.md)")
    parser.add_argument("--only", default="", help="runs whose id contains this")
    parser.add_argument("--picture", type=Path, help="write estimated against published times to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    chosen = [row for row in runs() if row.number("core", 0) >= options.core and options.only in row["id"]]
    results = {row["id"]: predict(row) for row in chosen}
    found = [one for one in results.values() if isinstance(one, Prediction)]
    left_out = {name: one for name, one in results.items() if isinstance(one, str)}
    if not found:
        raise SystemExit("no run is left")
    memory = memory_report()
    if options.picture:
        picture(found, options.picture)
    if options.json:
        print(json.dumps({**report(found), "memory": memory, "left_out": left_out}))
        return
    print_report(report(found))
    print(f"\nmemory: {memory['runs']} runs, {memory['agree']:.1%} agree; those that do not:")
    for name, one in memory["disagree"].items():
        print(f"  {name:<40}{one['outcome']:<12}{one['estimated_gb']:>7.1f} GB")
    reasons = Counter(reason[:60] for reason in left_out.values())
    print("left out: " + ", ".join(f"{count} ({reason})" for reason, count in reasons.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
