"""One step as lanes: what computes and what communicates when, as a picture, a page, or a trace for Perfetto."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxscale.config.errors import Refused


class Span(NamedTuple):
    """Something that takes a lane for a time."""

    lane: str
    name: str
    kind: str
    """What it is coloured by."""
    begin: float
    """Seconds."""
    end: float


def write_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Write a timeline in the form that the name of the file asks for.

    Raises:
        Refused: there is nothing to draw, or the name asks for no known form.
    """
    if not spans:
        raise Refused(f"--timeline {path}: there are no times to draw; a timeline needs --cluster and the GPU compiler")
    match path.suffix:
        case ".png":
            path.write_bytes(timeline_png(spans))
        case ".html":
            path.write_text(timeline_html(spans))
        case ".json":
            path.write_text(json.dumps(trace(spans)))
        case _:
            raise Refused(f"--timeline {path}: the name must end with .png, .html or .json")


def trace(spans: Sequence[Span]) -> dict[str, object]:
    """The spans in Chrome's trace event format, which https://ui.perfetto.dev opens; times are in microseconds."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(lanes)
    ]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": 0,
            "tid": lanes.index(span.lane),
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
        }
        for span in spans
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def timeline_png(spans: Sequence[Span]) -> bytes:
    """A picture: a row for each lane, a colour for each kind."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lanes = list(dict.fromkeys(span.lane for span in spans))
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.kind] = totals.get(span.kind, 0.0) + span.end - span.begin
    colours = {kind: f"C{number % 10}" for number, kind in enumerate(sorted(totals, key=lambda kind: -totals[kind]))}
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.7 * len(lanes)), layout="constrained")
    for number, lane in enumerate(lanes):
        own = [span for span in spans if span.lane == lane]
        axes.broken_barh(
            [(span.begin * 1e3, (span.end - span.begin) * 1e3) for span in own],
            (len(lanes) - number - 0.9, 0.8),
            facecolors=[colours[span.kind] for span in own],
        )
    axes.set_yticks([len(lanes) - number - 0.5 for number in range(len(lanes))], lanes)
    axes.set_xlabel("milliseconds")
    axes.set_xlim(0, max(span.end for span in spans) * 1e3)
    patches = [Patch(color=colour, label=f"{kind}: {totals[kind] * 1e3:,.1f} ms") for kind, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=min(5, len(patches)), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    return buffer.getvalue()


def timeline_html(spans: Sequence[Span]) -> str:
    """A page that needs nothing else: the picture, and what takes longest."""
    picture = base64.b64encode(timeline_png(spans)).decode()
    totals: dict[tuple[str, str, str], float] = {}
    for span in spans:
        key = span.lane, span.kind, span.name
        totals[key] = totals.get(key, 0.0) + span.end - span.begin
    longest = sorted(totals.items(), key=lambda item: -item[1])[:40]
    rows = "\n".join(
        f"<tr><td>{html.escape(lane)}<td>{html.escape(kind)}<td>{html.escape(name)}<td>{seconds * 1e3:,.2f}"
        for (lane, kind, name), seconds in longest
    )
    return (
        "<!doctype html><meta charset=utf-8><title>One step</title>"
        "<style>body{font-family:sans-serif;margin:2em} td,th{text-align:left;padding:.1em 1em} img{max-width:100%}"
        "</style>"
        f'<h1>One step</h1><img alt="lanes" src="data:image/png;base64,{picture}">'
        f"<table><tr><th>lane<th>kind<th>operation<th>ms\n{rows}</table>\n"
    )
