"""report.html: one self-contained page about a run, from the files of its directory alone."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from jaxscale.report.picture import details_png, loss_png
from jaxscale.runtime.ledger import read_attempts, read_totals
from jaxscale.runtime.metrics import read

PHASE_COLOURS = ("#1f6fb4", "#d9541e", "#2a8c5a", "#b38a00", "#8e5bb5", "#c2477f", "#5b8f99", "#8a8f98")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #30343b; background: #fff; max-width: 52rem; margin: 3rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.4rem 0 .6rem; }
.subtitle { color: #8a8f98; margin: .2rem 0 1.6rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.number { background: #f5f6f8; border-radius: .5rem; padding: .7rem .9rem; }
.number b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.number span { color: #6b717b; font-size: .82rem; }
img { width: 100%; }
.bar { display: flex; height: 1.4rem; border-radius: .35rem; overflow: hidden; margin-bottom: .8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td { padding: .25rem .4rem; border-bottom: 1px solid #eceef1; } td + td { text-align: right; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: .2rem; margin-right: .6rem; }
pre { background: #f5f6f8; border-radius: .5rem; padding: 1rem; overflow-x: auto; font-size: .82rem; }
"""


def write_report(run_dir: Path, baselines: Mapping[str, float] | None = None) -> Path:
    """Write RUN/report.html and RUN/loss.png from config.toml, metrics.jsonl and ledger.jsonl; returns the page's path.

    Files that are missing leave their part out. `baselines` (name -> nats a token) are drawn as level lines beside the
    curves and listed among the numbers.
    """
    baselines = baselines or {}
    metrics = read(run_dir / "metrics.jsonl")
    parts = [f"<h1>{escape(run_dir.name)}</h1>"]
    if metrics:
        picture = loss_png(metrics, run_dir.name, baselines)
        (run_dir / "loss.png").write_bytes(picture)
        parts += [
            f'<p class="subtitle">{_subtitle(metrics)}</p>',
            _numbers(_headline(metrics, baselines)),
            _image(picture, "training and validation loss against tokens"),
            _image(details_png(metrics), "learning rate, gradient norm, tokens a second, waiting for data"),
        ]
    if totals := read_totals(run_dir / "ledger.jsonl"):
        parts.append(_time(totals, len(read_attempts(run_dir / "ledger.jsonl"))))
    config = run_dir / "config.toml"
    if config.exists():
        parts.append(f"<h2>Configuration</h2><pre>{escape(config.read_text(encoding='utf-8'))}</pre>")
    path = run_dir / "report.html"
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(run_dir.name)}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n",
        encoding="utf-8",
    )
    return path


def count(number: float) -> str:
    """A number for people: 950, 12.3K, 4.56M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Seconds for people: 0.42 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _subtitle(metrics: list[dict[str, Any]]) -> str:
    """How far the run has come."""
    last = [line for line in metrics if "split" not in line][-1:] or metrics[-1:]
    return f"after step {last[0]['step']:,}, {count(last[0]['tokens'])} tokens"


def _headline(metrics: list[dict[str, Any]], baselines: Mapping[str, float]) -> list[tuple[str, str]]:
    """The numbers at the top: (value, what it is)."""
    training = [line for line in metrics if "split" not in line]
    splits = {line["split"]: line for line in metrics if "split" in line}
    numbers = [(_loss(line), f"{split} loss") for split, line in splits.items()]
    if training:
        numbers.append((_loss(training[-1]), "training loss, last step"))
    numbers += [(f"{loss:.3f}", f"loss of {name}") for name, loss in baselines.items()]
    speeds = sorted(line["tokens_per_second"] for line in training if line.get("tokens_per_second") is not None)
    if speeds:
        numbers.append((count(speeds[len(speeds) // 2]), "tokens a second, median"))
    utilisations = sorted(line["mfu"] for line in training if line.get("mfu") is not None)
    if utilisations:
        numbers.append((f"{utilisations[len(utilisations) // 2]:.1%}", "model FLOPs utilisation, median"))
    return numbers


def _loss(line: dict[str, Any]) -> str:
    """The loss of a line; one that was not finite is stored as null."""
    return "not finite" if line["loss"] is None else f"{line['loss']:.3f}"


def _numbers(numbers: Iterable[tuple[str, str]]) -> str:
    """The headline numbers as tiles."""
    tiles = (f'<div class="number"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in numbers)
    return f'<div class="numbers">{"".join(tiles)}</div>'


def _image(png: bytes, description: str) -> str:
    """A picture inside the page."""
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _time(totals: dict[str, float], attempts: int) -> str:
    """Where the wall time went: one bar and a table, longest phase first."""
    whole = sum(totals.values())
    bar, rows = [], []
    for index, (phase, seconds) in enumerate(sorted(totals.items(), key=lambda item: -item[1])):
        colour = PHASE_COLOURS[index % len(PHASE_COLOURS)]
        bar.append(f'<div style="width:{seconds / whole:.3%};background:{colour}" title="{escape(phase)}"></div>')
        rows.append(
            f'<tr><td><span class="key" style="background:{colour}"></span>{escape(phase)}</td>'
            f"<td>{duration(seconds)}</td><td>{seconds / whole:.1%}</td></tr>"
        )
    starts = "one start" if attempts == 1 else f"{attempts} starts"
    return (
        f"<h2>Where the time went</h2><p>{duration(whole)} of wall time in {starts}.</p>"
        f'<div class="bar">{"".join(bar)}</div><table>{"".join(rows)}</table>'
    )
