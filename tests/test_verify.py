"""`data inspect` and `data verify`, of datasets and of token files of other programs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxscale.cli import main
from jaxscale.config.errors import Refused
from jaxscale.data import scan
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.data.writer import DatasetWriter
from tests.foreign import overwrite, write_flat, write_megatron


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "jaxscale", *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Says which format it is and that bytes are unknown; needs to be told the tokenizer."""
    write_megatron(tmp_path / "x", [[[5], [6, 257]], [[7, 257]]])
    code, _, error = run("data", "inspect", str(tmp_path / "x"))
    assert code == 2 and "Megatron-LM" in error and "--tokenizer" in error and "Traceback" not in error
    assert main(["data", "inspect", str(tmp_path / "x"), "--tokenizer", "bytes"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["format"] == "Megatron-LM (.bin, .idx)" and lines["documents"] == "2" and lines["tokens"] == "5"
    assert lines["text_bytes"] == lines["bytes_per_token"] == "unknown" and lines["built.largest_id"] == "257"
    assert main(["data", "inspect", str(tmp_path / "x"), "--tokenizer", "bytes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text_bytes"] is None


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Datasets by themselves or all of a config; every bad file is named, and the good ones are still told."""
    write_flat(tmp_path / "x.bin", [[5, 257]])
    with DatasetWriter(tmp_path / "own", ByteTokenizer(), {}, shard_tokens=4) as writer:
        for _ in range(6):
            writer.add(np.array([5, 6, 257], np.uint32), 2)
    (tmp_path / "c.toml").write_text(
        "[data]\ntokenizer = 'bytes'\n"
        f"[data.train.a]\npath = '{tmp_path}/x.bin'\n[data.train.b]\npath = '{tmp_path}/own'\n"
    )
    assert main(["data", "verify", str(tmp_path / "c.toml")]) == 0
    foreign, own = capsys.readouterr().out.splitlines()
    assert foreign.startswith(f"{tmp_path}/x.bin: 1 documents, 2 tokens") and "for the first time" in foreign
    assert own.startswith(f"{tmp_path}/own: 6 documents, 18 tokens") and "GB/s: as recorded" in own
    paths = [str(tmp_path / "own"), str(tmp_path / "x.bin")]
    assert main(["data", "verify", *paths, "--tokenizer", "bytes", "--json"]) == 0
    own, foreign = json.loads(capsys.readouterr().out)
    assert (own["tokens"], foreign["first_reading"]) == (18, False)
    size = sum(path.stat().st_size for path in (tmp_path / "own").glob("*.npy"))
    assert own["bytes_read"] == size and own["seconds"] > 0

    overwrite(tmp_path / "own" / "tokens-00001.npy", 130, b"\x09")
    overwrite(tmp_path / "own" / "documents-00004.npy", 130, b"\x09")
    code, out, error = run("data", "verify", *paths, "--tokenizer", "bytes")
    assert code == 2 and out.startswith(f"{tmp_path}/x.bin") and "Traceback" not in error
    assert [Path(line.split(": ")[1]).name for line in error.splitlines() if "sha256" in line] == [
        "tokens-00001.npy",
        "documents-00004.npy",
    ]


def test_long_reading_ends_soon_at_the_first_mistake() -> None:
    """Where the work on one file fails, that on the others ends at their next block, however long they are."""
    begun = time.monotonic()

    def work(item: int, advance: Callable[[int], None]) -> None:
        if item == 0:
            raise Refused("bad")
        while time.monotonic() < begun + 20:
            advance(1)

    with pytest.raises(Refused, match="bad"):
        scan.in_parallel(work, [0, 1, 2], "reading", 3)
    assert time.monotonic() < begun + 10
