"""Reading a corpus: every kind of file and compression, and everything that can be wrong with one."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from jaxscale.config.data import BuildConfig
from jaxscale.config.errors import Refused
from jaxscale.data.build.corpus import Document, corpus_files, documents, tasks
from jaxscale.data.build.tally import MALFORMED, Tally, resolve

TEXTS = ["one", "zwei \U0001f642", "three\nlines\n"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def read(pattern: Path | str, **settings: Any) -> tuple[list[Document], Tally]:
    chosen = BuildConfig(files=(str(pattern),), **settings)
    tally = Tally()
    return [d for task in tasks(corpus_files(chosen), chosen) for d in documents(task, chosen, tally)], tally


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def rows(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", LINES),
        ("d.jsonl.gz", gzip.compress(LINES)),
        ("d.jsonl.gz", gzip.compress(LINES[:20]) + gzip.compress(LINES[20:])),
        ("d.jsonl.zst", zstd(LINES)),
        ("d.jsonl.zst", zstd(LINES[:20]) + zstd(LINES[20:])),
        ("d.json.gz", gzip.compress(LINES)),
    ],
)
def test_documents_of_jsonl(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found, tally = read(tmp_path / name, format=None if ".jsonl" in name else "jsonl")
    assert [document.text for document in found] == TEXTS
    assert [document.position for document in found] == [0, 16, 16 + len(json.dumps(TEXTS[1])) + 11]
    assert [document.id for document in found] == [f"{name}:{document.position}" for document in found]
    assert tally.bytes_read == len(content) and not tally.skipped


def test_documents_of_parquet(tmp_path: Path) -> None:
    path = rows(tmp_path / "d.parquet", text=[*TEXTS, ""], lang=["en", "de", "en", "en"], other=[1, 2, 3, 4])
    found, tally = read(path, keep='lang == "en"')
    assert [(document.text, document.id, document.position) for document in found] == [
        ("one", "d.parquet:0", 0),
        ("three\nlines\n", "d.parquet:2", 2),
    ]
    assert found[0].fields == {"text": "one", "lang": "en"}  # columns that nobody asks for are not read
    assert tally.skipped == {"keep is not fulfilled": 1, "empty document": 1}
    assert tally.bytes_read == path.stat().st_size


@pytest.mark.parametrize("name", ["d.txt", "d.py", "d.txt.gz", "d.txt.zst"])
def test_documents_of_text(tmp_path: Path, name: str) -> None:
    content = "\ufeffone\ndocument \u00e9\r\n".encode()
    stored = gzip.compress(content) if name.endswith("gz") else zstd(content) if name.endswith("zst") else content
    (tmp_path / name).write_bytes(stored)
    (document,), tally = read(tmp_path / name)
    assert (document.text, document.id, document.position) == ("one\ndocument \u00e9\r\n", name, 0)
    assert tally.bytes_read == len(stored)


def test_any_address_of_fsspec(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a/one.jsonl", LINES * 50)
    memory.pipe("/corpus/b/two.jsonl.gz", gzip.compress(LINES))
    rows(tmp_path / "three.parquet", text=TEXTS)
    memory.pipe("/corpus/b/three.parquet", (tmp_path / "three.parquet").read_bytes())
    found, tally = read("memory://corpus/**/*", task_bytes=1000)
    assert [document.text for document in found] == TEXTS * 52
    assert {document.source for document in found} == {"a/one.jsonl", "b/three.parquet", "b/two.jsonl.gz"}
    assert tally.bytes_read == sum(memory.size(path) for path in memory.find("/corpus"))
    with pytest.raises(Refused, match="matches no file"):
        read("memory://corpus/*.txt")
    with pytest.raises(Refused, match=r"'nowhere://x/\*' cannot be listed"):
        read("nowhere://x/*")


def test_an_address_is_read_in_every_worker(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(LINES * 100)
    config = f"""
        [data]
        train = "{tmp_path}/train"
        [data.build]
        files = ["file://{tmp_path}/*.jsonl"]
        task_bytes = 1000
        workers = 2
    """
    (tmp_path / "c.toml").write_text(config)
    command = [sys.executable, "-m", "jaxscale", "data", "build", str(tmp_path / "c.toml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["splits"][0]["documents"] == 300


def damaged(folder: Path) -> dict[str, tuple[Path, int, str]]:
    """Files that are wrong in some way: name of the fault -> file, documents before the fault, what is said."""
    gz, zst = gzip.compress(LINES), zstd(LINES)
    whole = rows(folder / "whole.parquet", text=TEXTS).read_bytes()
    contents = {
        "truncated gzip": ("a.jsonl.gz", gz[:-9], 0, r":1: .*damaged.*[Tt]runcated"),
        "truncated zstd": ("a.jsonl.zst", zst[:-2], 0, r":1: .*damaged.*[Tt]runcated"),
        "no gzip": ("b.jsonl.gz", LINES, 0, ":1: .*damaged"),
        "truncated text": ("a.txt.gz", gz[:-9], 0, ":1: .*damaged.*[Tt]runcated"),
        "empty": ("empty.jsonl", b"", 0, ":1: the file is empty"),
        "empty text": ("empty.txt", b"", 0, ":1: the file is empty"),
        "empty inside": ("empty.jsonl.gz", gzip.compress(b""), 0, ":1: the file is empty"),
        "empty parquet": ("empty.parquet", b"", 0, ":1: the file is empty"),
        "damaged parquet": ("a.parquet", whole[:-20], 0, ":1: .*damaged"),
        "bad utf-8": ("c.jsonl", LINES + b'{"text": "\xff"}\n', 3, ":4: not UTF-8"),
    }
    for _, (name, content, _, _) in contents.items():
        (folder / name).write_bytes(content)
    null = rows(folder / "null.parquet", text=["one", None])
    numbers = rows(folder / "numbers.parquet", text=[1, 2])
    without = rows(folder / "without.parquet", txt=["one"])
    binary = pyarrow.array([b"one", b"\xff"]).cast(pyarrow.binary())
    broken = pyarrow.StringArray.from_buffers(2, *binary.buffers()[1:], binary.buffers()[0])
    parquet.write_table(pyarrow.table({"text": broken}), folder / "utf8.parquet")
    return {fault: (folder / name, before, said) for fault, (name, _, before, said) in contents.items()} | {
        "null in parquet": (null, 1, ":2: 'text' is null, not a string"),
        "numbers in parquet": (numbers, 0, ":1: 'text' is 1, not a string"),
        "no column": (without, 0, ":1: no column 'text' .* it has txt"),
        "bad utf-8 in parquet": (folder / "utf8.parquet", 1, ":2: not UTF-8"),
    }


FAULTS = (
    "truncated gzip",
    "truncated zstd",
    "no gzip",
    "truncated text",
    "empty",
    "empty text",
    "empty inside",
    "empty parquet",
    "damaged parquet",
    "bad utf-8",
    "null in parquet",
    "numbers in parquet",
    "no column",
    "bad utf-8 in parquet",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_cannot_be_read_stops_or_is_listed(tmp_path: Path, fault: str) -> None:
    path, before, said = damaged(tmp_path)[fault]
    with pytest.raises(Refused, match=rf"{path.name}{said}.*on_error = \"skip\""):
        read(path)
    found, tally = read(path, on_error="skip")
    assert len(found) == before
    assert tally.skipped[MALFORMED] >= 1
    assert len(resolve(tally.places[MALFORMED])) == tally.skipped[MALFORMED]


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_what_comes_before_the_damage_is_kept(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("d.jsonl.gz" if compress is gzip.compress else "d.jsonl.zst")
    text = json.dumps({"text": os.urandom(40).hex()})  # hardly compressible
    content = b"".join(json.dumps({"text": os.urandom(40).hex()}).encode() + b"\n" for _ in range(5000))
    path.write_bytes(compress(content)[: -len(text) * 200])
    found, tally = read(path, on_error="skip")
    lines = [json.loads(line)["text"] for line in content.splitlines()]
    assert 3000 < len(found) < 5000 and [document.text for document in found] == lines[: len(found)]
    assert [place.split(": ")[0] for place in resolve(tally.places[MALFORMED])] == [f"{path}:{len(found) + 1}"]


def test_a_line_that_no_json_reader_takes_in_a_part_of_a_file(tmp_path: Path) -> None:
    lines = [LINES.splitlines(keepends=True)[0]] * 300
    for number in (100, 200, 299):
        lines[number] = b"[" * 60 + b"\n"
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"".join(lines))
    found, tally = read(path, on_error="skip", task_bytes=333)
    assert len(found) == 297
    places = resolve(tally.places[MALFORMED])
    assert [place.split(": ")[0] for place in places] == [f"{path}:{number}" for number in (101, 201, 300)]


def test_a_file_that_vanished(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(LINES)
    chosen = BuildConfig(files=(str(path),))
    (task,) = tasks(corpus_files(chosen), chosen)
    (part,) = task
    path.unlink()
    with pytest.raises(FileNotFoundError):  # a fault of the disk is never skipped
        list(documents(task, chosen.model_copy(update={"on_error": "skip"}), Tally()))
    address = part._replace(file=part.file._replace(address="memory://nothing.jsonl"))
    with pytest.raises(OSError, match=r"nothing\.jsonl"):
        list(documents([address], chosen, Tally()))
