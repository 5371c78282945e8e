"""The timeline of a step: the trace by its format's documented fields, the page and the picture by reading them."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from jaxscale.config.errors import Refused
from jaxscale.report.timeline import Span, write_timeline

SPANS = (
    Span("compute", "gemm.1", "matmul", 0.0, 0.010),
    Span("compute", "fusion <2>", "memory", 0.010, 0.012),
    Span("links", "all-gather.3", "all-gather fsdp", 0.001, 0.009),
    Span("network", "all-reduce.4", "all-reduce replica", 0.002, 0.015),
)


def test_trace_has_the_fields_of_the_format(tmp_path: Path) -> None:
    """Complete events ("X") with microseconds, and a name ("M") for each thread that they are on."""
    write_timeline(tmp_path / "step.json", SPANS)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    complete = [event for event in events if event["ph"] == "X"]
    assert set(threads.values()) == {"compute", "links", "network"} and len(events) == len(threads) + len(complete)
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    found = [
        (threads[event["tid"]], event["name"], event["cat"], event["ts"], event["ts"] + event["dur"])
        for event in complete
    ]
    for one, span in zip(found, SPANS, strict=True):
        assert one[:3] == (span.lane, span.name, span.kind)
        assert one[3:] == pytest.approx((span.begin * 1e6, span.end * 1e6))


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    """The picture is inside, the operations are listed longest first, and names are no markup."""
    write_timeline(tmp_path / "step.html", SPANS)
    text = (tmp_path / "step.html").read_text()
    assert not re.search(r'(?:src|href)=(?!"data:)', text)
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', text)
    assert picture and imread(io.BytesIO(base64.b64decode(picture.group(1)))).shape[0] > 100
    assert text.index("all-reduce.4") < text.index("gemm.1") < text.index("all-gather.3") < text.index("fusion &lt;2")


def test_picture_shows_each_lane_when_it_is_taken(tmp_path: Path) -> None:
    """A lane that is taken for the whole step is coloured all along, one that is taken for half of it only half."""
    write_timeline(tmp_path / "step.png", [Span("a", "x", "k", 0.0, 1.0), Span("b", "y", "l", 0.0, 0.5)])
    pixels = imread(tmp_path / "step.png")[..., :3]
    coloured = pixels.max(2) - pixels.min(2) > 0.3
    widths = sorted((int(row.sum()) for row in coloured), reverse=True)
    full, half = widths[0], [width for width in widths if 0.4 * widths[0] < width < 0.6 * widths[0]]
    assert full > 0.7 * pixels.shape[1] and len(half) > 20


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"\.png, \.html or \.json"):
        write_timeline(tmp_path / "step.svg", SPANS)
    with pytest.raises(Refused, match="no times to draw"):
        write_timeline(tmp_path / "step.png", [])


def test_needs_no_jax() -> None:
    code = "import sys, jaxscale.report.timeline; sys.exit('jax' in sys.modules or 'jaxscale.plan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
