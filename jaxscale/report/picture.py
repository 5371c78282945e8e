"""Curves of a run as pictures, drawn from metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

BLUE, ORANGE, GREY, TEXT = "#1f6fb4", "#d9541e", "#8a8f98", "#30343b"
VALIDATION_COLOURS = (ORANGE, "#2a8c5a", "#8e5bb5", "#b38a00")
DETAILS = (
    ("learning_rate", "learning rate"),
    ("grad_norm", "gradient norm before clipping"),
    ("tokens_per_second", "tokens a second"),
    ("data_wait_seconds", "seconds a step waited for data"),
)
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "#c3c7cd",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8eaed",
    "grid.linewidth": 0.8,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def loss_png(metrics: Iterable[dict[str, Any]], title: str, baselines: Mapping[str, float]) -> bytes:
    """Training and validation loss against tokens as PNG, from the lines of metrics.jsonl.

    `baselines` (name -> nats a token) become level lines, such as the loss of a unigram model.
    """
    training, validation = _split(metrics)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        axes.set_title(title, pad=12)
        tokens, losses = _series(training, "loss")
        for baseline, loss in baselines.items():
            axes.axhline(loss, color=GREY, linewidth=1.2, linestyle=(0, (5, 3)))
            axes.annotate(
                f"{baseline} {loss:.3f}", (1, loss), (-4, 4), color=GREY, ha="right",
                xycoords=("axes fraction", "data"), textcoords="offset points",
            )  # fmt: skip
        _curve(axes, tokens, losses, _label("training", losses))
        for colour, split in zip(_colours(len(validation)), sorted(validation), strict=True):
            split_tokens, split_losses = _series(validation[split], "loss")
            axes.plot(
                split_tokens, split_losses, color=colour, linewidth=1.6, marker="o", markersize=4.5,
                markeredgecolor="white", markeredgewidth=0.8, label=_label(split, split_losses),
            )  # fmt: skip
        _finish(axes)
        axes.set_ylabel("loss (nats a token)")
        axes.legend(frameon=False, loc="best")
        return _png(figure)


def details_png(metrics: Iterable[dict[str, Any]]) -> bytes:
    """Small pictures of learning rate, gradient norm, throughput and waiting for data, as one PNG."""
    training, _ = _split(metrics)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(8, 4.6), layout="constrained", sharex=True)
        for axes, (key, title) in zip(grid.flat, DETAILS, strict=True):
            tokens, values = _series(training, key)
            axes.set_title(title, fontsize=10, fontweight="normal")
            _curve(axes, tokens, values)
            axes.yaxis.set_major_formatter(_short)
            _finish(axes)
            axes.set_ylim(bottom=0)
        for axes in grid[0]:
            axes.set_xlabel("")
        return _png(figure)


def smooth(values: Sequence[float], share: float = 0.02) -> list[float]:
    """Running mean over the last `share` of the values (at least one, fewer at the start); same length."""
    window = max(1, round(len(values) * share))
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


def _split(metrics: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The training lines, and the validation lines by split."""
    training: list[dict[str, Any]] = []
    validation: dict[str, list[dict[str, Any]]] = {}
    for line in metrics:
        (validation.setdefault(line["split"], []) if "split" in line else training).append(line)
    return training, validation


def _series(lines: Iterable[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Tokens and values of the lines where the value is known."""
    known = [line for line in lines if line.get(key) is not None]
    return [line["tokens"] for line in known], [line[key] for line in known]


def _colours(count: int) -> list[str]:
    """A colour for each validation split, again from the start when there are many."""
    return [VALIDATION_COLOURS[index % len(VALIDATION_COLOURS)] for index in range(count)]


def _label(name: str, values: Sequence[float]) -> str:
    """A legend entry with the last value."""
    return f"{name} {values[-1]:.3f}" if values else name


def _curve(axes: Axes, tokens: Sequence[int], values: Sequence[float], label: str | None = None) -> None:
    """The values, pale, and their running mean."""
    axes.plot(tokens, values, color=BLUE, alpha=0.25, linewidth=0.9)
    axes.plot(tokens, smooth(values), color=BLUE, linewidth=1.9, label=label)


def _short(value: float, position: int) -> str:
    """Text of a tick: 0.0003, 1.5, 40k."""
    return EngFormatter(sep="")(value) if value >= 1000 else f"{value:.3g}"


def _finish(axes: Axes) -> None:
    """What all axes share: tokens along x, from zero."""
    axes.set_xlabel("tokens")
    axes.set_xlim(left=0)
    axes.margins(x=0.01)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _png(figure: Figure) -> bytes:
    """The figure as PNG, sharp on screens of high density."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=180)
    plt.close(figure)
    return buffer.getvalue()
