"""The report: one page and one picture from the files of a run, whatever is missing in them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from matplotlib.image import imread

from jaxscale.report.page import count, duration, write_report
from jaxscale.report.picture import loss_png, smooth
from jaxscale.runtime.metrics import MetricsFile
from tests.processes import start


def make_run(folder: Path, steps: int = 60) -> Path:
    """A run directory as `train` leaves it."""
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        loss = 2.0 + 5.0 / step
        numbers = {"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "data_wait_seconds": 0.0}
        metrics.write({"step": step, "tokens": step * 4096, **numbers, "tokens_per_second": 8000.0, "mfu": None})
        if step % 20 == 0:
            metrics.write({"step": step, "tokens": step * 4096, "split": "held <out>", "loss": loss + 0.1})
    metrics.close()
    attempts = [{"started": 1.0, "process": 1, "seconds": {"start": 2.0, "train": 7.0}}] * 2
    (folder / "ledger.jsonl").write_text("".join(json.dumps(attempt) + "\n" for attempt in attempts))
    (folder / "config.toml").write_text('name = "a <b> run"\n')
    return folder


class Page(HTMLParser):
    """Checks that tags close in order, and collects text and pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.images = 0
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.images += tag == "img"
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path), {"a unigram model": 6.25})
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert page.images == 2
    for text in ("after step 60, 246K tokens", "2.183", "held <out> loss", "6.250", "8K", 'name = "a <b> run"'):
        assert text in page.text, text
    assert "18 s of wall time in 2 starts" in page.text
    assert re.search(r"train\s*14 s\s*77.8%", page.text)
    assert not re.search(r'(src|href)="(?!data:)', html), "the page needs nothing but itself"
    assert imread(tmp_path / "loss.png").shape[1] > 1000


def test_parts_that_are_missing_are_left_out(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.images == 0
    MetricsFile(tmp_path / "metrics.jsonl").write({"step": 1, "tokens": 10, "loss": float("nan")})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.images == 2
    assert "not finite" in page.text


def test_picture_of_validation_alone(tmp_path: Path) -> None:
    assert loss_png([{"step": 1, "tokens": 10, "split": "validation", "loss": 2.0}], "eval", {}).startswith(b"\x89PNG")


def test_needs_no_jax(tmp_path: Path) -> None:
    make_run(tmp_path)
    script = (
        "import sys\nfrom pathlib import Path\nfrom jaxscale.report.page import write_report\n"
        "write_report(Path(sys.argv[1]))\nassert 'jax' not in sys.modules and 'orbax' not in sys.modules\n"
    )
    child = start(script, str(tmp_path))
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output


def test_smooth_is_a_mean_of_what_came_before() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0], share=0.5) == [1.0, 1.5, 2.5, 3.5]
    assert smooth([5.0]) == [5.0]
    assert smooth([]) == []


def test_numbers_for_people() -> None:
    assert [count(n) for n in (0.5, 950, 12_345, 4_560_000, 7.1e12)] == ["0.5", "950", "12.3K", "4.56M", "7.1T"]
    assert [duration(s) for s in (0.42, 12, 59.7, 185, 7620)] == [
        "0.42 s",
        "12 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 07 min",
    ]
