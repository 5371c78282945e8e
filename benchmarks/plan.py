"""Holds planned step times against published training runs.

    python -m benchmarks.plan [--core N] [--only TEXT] [--picture FILE.png] [--json]

Each published run whose layout jaxscale builds today is compiled for its cluster and replayed, as `jaxscale plan` does
(the extra `plan` is needed; about ten minutes on two cores). The runs come from other programs with other kernels, so
two questions are kept apart:

* *shape*: one efficiency number for each pair of framework and GPU with at least 4 runs, fitted to these runs; what is
  then left is what the plan gets wrong about sizes, meshes and batches. Within a sweep, Kendall's tau says whether it
  puts the layouts in the right order.
* *level*: nothing fitted, for the runs of XLA programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import kendalltau

from benchmarks.published_runs import Row, cluster_of, config_of, runs, why_not_compiled
from jaxscale.config.errors import Stop
from jaxscale.hardware import RESERVED_BYTES
from jaxscale.plan.compile import compile_for, has_gpu_compiler
from jaxscale.plan.program import read_program
from jaxscale.plan.replay import replay

ENOUGH = 4
"""Runs of a framework on a GPU from which on an efficiency is fitted."""
REMATS = ("none", "dots", "full")
"""Values of `model.remat`, those that need most memory first."""
XLA = ("MaxText", "PAX")
"""Frameworks whose runs are programs of XLA, too."""


@dataclass(frozen=True)
class Prediction:
    """A run, and the time of its update as planned."""

    row: Row
    seconds: float
    parts: Mapping[str, float]
    remat: str
    """What is computed again."""

    @property
    def ratio(self) -> float:
        """Planned over published."""
        assert self.row.step_seconds is not None
        return self.seconds / self.row.step_seconds

    @property
    def group(self) -> tuple[str, str]:
        """What shares an efficiency."""
        return self.row.framework, self.row["gpu"]


def predict(row: Row) -> Prediction | str:
    """The plan of a run, or why there is none.

    The run fitted its GPUs. Where ours does not, more is computed again, as far as it takes.
    """
    cluster, config = cluster_of(row), config_of(row)
    try:
        for remat in REMATS[REMATS.index(config.model.remat) :]:
            model = config.model.model_copy(update={"remat": remat})
            compiled = compile_for(config.model_copy(update={"model": model}), cluster)
            if compiled.peak <= cluster.gpu.memory_bytes - RESERVED_BYTES:
                break
    except Stop as error:
        return str(error)
    found = replay(read_program(compiled.program), cluster, compiled.axes, lambda origin: False)
    return Prediction(row, found.seconds, found.parts, remat)


def efficiencies(found: Sequence[Prediction]) -> dict[tuple[str, str], float]:
    """Planned over published time of each framework and GPU with enough runs: the geometric mean."""
    ratios = defaultdict(list)
    for one in found:
        ratios[one.group].append(one.ratio)
    return {group: statistics.geometric_mean(each) for group, each in ratios.items() if len(each) >= ENOUGH}


def errors(found: Iterable[Prediction], fitted: Mapping[tuple[str, str], float] | None) -> list[float]:
    """Relative errors of step times, with the group's efficiency taken out, or (None) as they are."""
    return [abs(one.ratio / (1.0 if fitted is None else fitted[one.group]) - 1) for one in found]


def sweeps(found: Sequence[Prediction]) -> dict[str, float]:
    """Kendall's tau of each series with at least 3 runs: planned and published tokens/s of a GPU."""
    series = defaultdict(list)
    for one in found:
        series[one.row["series"]].append(one)
    taus = {}
    for name, ones in series.items():
        if len(ones) >= 3:
            tokens = [float(one.row["global_batch_tokens"]) / one.row.number("n_gpus") for one in ones]
            planned = [count / one.seconds for count, one in zip(tokens, ones, strict=True)]
            published = [count / (one.row.step_seconds or 1) for count, one in zip(tokens, ones, strict=True)]
            taus[name] = float(kendalltau(planned, published).statistic)
    return taus


def report(found: Sequence[Prediction]) -> dict[str, Any]:
    """All figures."""
    fitted = efficiencies(found)
    shape = [one for one in found if one.group in fitted]
    level = [one for one in found if one.row.framework.startswith(XLA)]
    by_group = {}
    for group in dict.fromkeys(one.group for one in found):
        ones = [one for one in found if one.group == group]
        by_group[" on ".join(group)] = {
            "runs": len(ones),
            "efficiency": fitted.get(group),
            "mean_error": statistics.mean(errors(ones, fitted)) if group in fitted else None,
            "worst_error": max(errors(ones, fitted)) if group in fitted else None,
            "mean_error_unfitted": statistics.mean(errors(ones, None)),
        }
    series = {}
    for name in dict.fromkeys(one.row["series"] for one in shape):
        series[name] = statistics.mean(errors((one for one in shape if one.row["series"] == name), fitted))
    return {
        "runs": len(found),
        "shape": {
            "runs": len(shape),
            "mean_error": statistics.mean(errors(shape, fitted)) if shape else None,
            "median_error": statistics.median(errors(shape, fitted)) if shape else None,
            "series": series,
            "tau": sweeps(shape),
        },
        "level": {
            "runs": len(level),
            "mean_error": statistics.mean(errors(level, None)) if level else None,
        },
        "groups": by_group,
        "rows": [
            {
                "id": one.row["id"],
                "published_seconds": one.row.step_seconds,
                "planned_seconds": one.seconds,
                "ratio": one.ratio,
                "remat": one.remat,
                "error": abs(one.ratio / fitted[one.group] - 1) if one.group in fitted else None,
                "parts": {name: seconds / one.seconds for name, seconds in one.parts.items()},
            }
            for one in found
        ],
    }


def print_report(facts: Mapping[str, Any]) -> None:
    """The figures for people."""
    print(f"{'run':<42}{'published':>10}{'planned':>10}{'ratio':>7}{'error':>7}")
    for row in facts["rows"]:
        error = "" if row["error"] is None else f"{row['error']:.0%}"
        print(
            f"{row['id']:<42}{row['published_seconds']:>10.3f}{row['planned_seconds']:>10.3f}{row['ratio']:>7.2f}{error:>7}"
        )
    print(f"\n{'framework on GPU':<52}{'runs':>5}{'efficiency':>11}{'mean':>6}{'worst':>7}")
    for name, group in facts["groups"].items():
        fit = "" if group["efficiency"] is None else f"{group['efficiency']:.2f}"
        mean = group["mean_error_unfitted"] if group["mean_error"] is None else group["mean_error"]
        worst = "" if group["worst_error"] is None else f"{group['worst_error']:.0%}"
        print(f"{name:<52}{group['runs']:>5}{fit:>11}{mean:>6.0%}{worst:>7}")
    shape, level = facts["shape"], facts["level"]
    if shape["runs"]:
        print(
            f"\nshape: {shape['runs']} runs, mean error {shape['mean_error']:.1%}, median {shape['median_error']:.1%}"
        )
        for name, error in sorted(shape["series"].items(), key=lambda item: -item[1]):
            tau = shape["tau"].get(name)
            print(f"  {name:<40}{error:>7.0%}{'' if tau is None else f'   tau {tau:.2f}'}")
    if level["runs"]:
        print(f"level, nothing fitted: {level['runs']} runs of XLA programs, mean error {level['mean_error']:.1%}")


def picture(found: Sequence[Prediction], path: Path) -> None:
    """Planned against published times, with nothing fitted."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 7), layout="constrained")
    for group in dict.fromkeys(one.group for one in found):
        ones = [one for one in found if one.group == group]
        published = [one.row.step_seconds for one in ones]
        axes.scatter(published, [one.seconds for one in ones], s=18, label=" on ".join(group))
    limits = axes.get_xlim()
    axes.plot([0.1, 1000], [0.1, 1000], color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="published, seconds an update", ylabel="planned")
    axes.set_xlim(left=max(limits[0], 0.1))
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=1, help="least trustworthiness of runs (see published/README.md)")
    parser.add_argument("--only", default="", help="runs whose id contains this")
    parser.add_argument("--picture", type=Path, help="write planned against published times to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not has_gpu_compiler():
        parser.error("the GPU compiler is missing: pip install -e '.[plan]'")
    chosen = [row for row in runs() if row.number("core", 0) >= options.core and options.only in row["id"]]
    left_out = {row["id"]: reason for row in chosen if (reason := why_not_compiled(row))}
    wanted = [row for row in chosen if row["id"] not in left_out and row.step_seconds]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = dict(zip((row["id"] for row in wanted), pool.map(predict, wanted), strict=True))
    found = [one for one in results.values() if isinstance(one, Prediction)]
    left_out |= {name: one for name, one in results.items() if isinstance(one, str)}
    if not found:
        raise SystemExit("no run is left")
    facts = {**report(found), "left_out": left_out}
    if options.picture:
        picture(found, options.picture)
    if options.json:
        print(json.dumps(facts))
    else:
        print_report(facts)
        reasons = defaultdict(int)
        for reason in left_out.values():
            reasons[reason.splitlines()[0][:60]] += 1
        print("left out: " + ", ".join(f"{count} ({reason})" for reason, count in reasons.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
