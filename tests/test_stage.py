"""Staging: whole, verified copies, made once for all; whatever breaks off goes on; none in use is ever removed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from jaxscale.cli import main
from jaxscale.config.errors import Fault, Refused
from jaxscale.data import stage as staging
from jaxscale.data.packing import EndToEnd, open_view
from jaxscale.data.stage import stage
from jaxscale.data.store import TokenDataset
from tests.disks import small_disk
from tests.processes import environment, start
from tests.test_store import random_documents, write

SHARDS = 4


def dataset_of(folder: Path, seed: int = 0) -> TokenDataset:
    """A dataset of four shards of 2 kB of tokens."""
    return write(folder, random_documents([500] * 2 * SHARDS, seed), 1000)


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def never(what: str, done: int, total: int) -> NoReturn:
    raise AssertionError("something was copied")


class Told:
    """Progress that keeps what it is told, and does something once so many files are copied (one stream)."""

    def __init__(self, after: int = 0, act: Callable[[], object] = lambda: None) -> None:
        self.calls, self.after, self.act = 0, after, act

    def __call__(self, what: str, done: int, total: int) -> None:
        self.calls, self.done, self.total = self.calls + 1, done, total
        if self.calls == self.after:
            self.act()


STAGE = """
import os, signal, sys
from pathlib import Path
from jaxscale.data.stage import stage
copied = 0
def progress(what, done, total):
    global copied
    copied = done
    if sys.argv[3] == "killed" and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
limit = int(sys.argv[4]) if len(sys.argv) > 4 else None
folder = stage(Path(sys.argv[1]), Path(sys.argv[2]), limit_bytes=limit, streams=2, progress=progress)
print(folder, copied, flush=True)
if sys.argv[3] == "use":
    sys.stdin.read()
"""


def staged(source: Path, root: Path, then: str = "end", *limit: str) -> tuple[Path, int]:
    """Stage in another process, which then ends; the copy's folder, and the bytes that were copied."""
    process = start(STAGE, str(source), str(root), then, *limit)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    folder, copied = output.split()
    return Path(folder), int(copied)


@contextmanager
def used_by_another_process(source: Path, root: Path) -> Iterator[Path]:
    """A copy that another process has staged and uses."""
    process = subprocess.Popen(
        [sys.executable, "-c", STAGE, str(source), str(root), "use"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Path(process.stdout.readline().split()[0])
    finally:
        process.communicate()


def test_a_copy_is_the_dataset_with_its_plans_and_made_once(tmp_path: Path) -> None:
    source, told = dataset_of(tmp_path / "source"), Told()
    open_view(source, 64, "best_fit")
    (source.folder / "documents-00000.parquet").write_bytes(b"origins")
    folder = stage(source.folder, tmp_path / "local" / "disk", streams=3, progress=told)
    expected = {name: data for name, data in content(source.folder).items() if not name.startswith(".")}
    assert content(folder) == expected and len(expected) == 2 * SHARDS + 1 + 3 + 1
    assert told.done == told.total == sum(map(len, expected.values())) - len(expected["dataset.json"])
    copy = TokenDataset.open(folder)
    copy.verify()
    assert copy.fingerprint == source.fingerprint and folder.name == f"dataset-{source.fingerprint[:24]}"
    assert stage(source.folder, tmp_path / "local" / "disk", progress=never) == folder
    shutil.copytree(source.folder, tmp_path / "elsewhere")
    assert stage(tmp_path / "elsewhere", tmp_path / "local" / "disk", progress=never) == folder, "by its fingerprint"
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_token_files_of_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read in place becomes a dataset that needs no other file."""
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    ids = np.where(np.arange(3000) % 100 == 99, 257, np.arange(3000) % 250).astype(np.uint16)
    (tmp_path / "files").mkdir()
    ids.tofile(tmp_path / "files" / "train.bin")
    folder = stage(tmp_path / "files" / "train.bin", tmp_path / "local", tokenizer="bytes")
    expected = TokenDataset.open(tmp_path / "files" / "train.bin", "bytes")
    shutil.rmtree(tmp_path / "files")
    shutil.rmtree(tmp_path / "cache")
    copy = TokenDataset.open(folder)
    copy.verify()
    assert copy.fingerprint == expected.fingerprint and copy.documents == 30
    assert np.array_equal(EndToEnd(copy, 3000).gather(np.array([0])).tokens[0], ids)


def test_corrupted_source(tmp_path: Path) -> None:
    """The file is named, the others are kept, and nothing but it is copied when it is right again."""
    source = dataset_of(tmp_path / "source")
    bad = source.folder / "tokens-00002.npy"
    right = bad.read_bytes()
    bad.write_bytes(right[:-3] + bytes([right[-3] ^ 1]) + right[-2:])
    with pytest.raises(Refused, match=rf"source/{bad.name}: its content is not what dataset\.json says"):
        stage(source.folder, tmp_path / "local", streams=1)
    (part,) = (tmp_path / "local").glob(".*.part")
    kept = len(list(part.glob("*.npy")))
    assert (part / "tokens-00001.npy").is_file() and not (part / bad.name).exists()
    bad.write_bytes(right)
    told = Told()
    TokenDataset.open(stage(source.folder, tmp_path / "local", streams=1, progress=told)).verify()
    assert told.calls == 2 * SHARDS - kept <= 4, "shards 0 and 1 were kept"
    assert not part.exists()


@pytest.mark.parametrize("damage", ["truncated", "vanished"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_truncated_or_vanished_source(tmp_path: Path, damage: str, when: str) -> None:
    source = dataset_of(tmp_path / "source")
    bad = source.folder / "tokens-00002.npy"
    right = bad.read_bytes()

    def act() -> None:
        bad.unlink()
        if damage == "truncated":
            bad.write_bytes(right[:1000])

    expected: type[Exception] = Fault if (damage, when) == ("vanished", "meanwhile") else Refused
    if when == "before":
        act()
    with pytest.raises(expected, match=bad.name):
        stage(source.folder, tmp_path / "local", streams=1, progress=Told(3, act))
    kept = len(list(tmp_path.glob("local/.*/*.npy")))
    assert not list(tmp_path.glob("local/dataset-*")) and (kept == 0 if when == "before" else 4 <= kept < 2 * SHARDS)
    bad.write_bytes(right)
    told = Told()
    assert content(stage(source.folder, tmp_path / "local", progress=told)) == content(source.folder)
    assert told.calls == 2 * SHARDS - kept


def test_killed_while_copying(tmp_path: Path) -> None:
    source = dataset_of(tmp_path / "source")
    killed = start(STAGE, str(source.folder), str(tmp_path / "local"), "killed")
    assert killed.communicate(timeout=60)[0] == "" and killed.returncode == -9
    assert not list(tmp_path.glob("local/dataset-*"))
    whole = sum(path.stat().st_size for path in source.folder.glob("*.npy"))
    folder, copied = staged(source.folder, tmp_path / "local")
    assert 0 < copied < whole * 0.8, "finished files were kept"
    assert content(folder) == content(source.folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_processes_at_once_share_one_copy(tmp_path: Path) -> None:
    source = dataset_of(tmp_path / "source")
    processes = [start(STAGE, str(source.folder), str(tmp_path / "local"), "end") for _ in range(4)]
    printed = [process.communicate(timeout=60)[0].split() for process in processes]
    whole = sum(path.stat().st_size for path in source.folder.glob("*.npy"))
    assert sorted(int(copied) for _, copied in printed) == [0, 0, 0, whole]
    assert len({folder for folder, _ in printed}) == 1


def test_a_full_disk_is_refused_before_the_copy(tmp_path: Path) -> None:
    source = write(tmp_path / "source", random_documents([100_000]), 10**6)
    with small_disk(tmp_path / "small", "200k") as disk:
        with pytest.raises(Refused, match=r"no room for dataset-.*it needs .* kB, and 20\d.\d kB can be had"):
            stage(source.folder, disk, progress=never)
        assert not list(disk.rglob("*.npy"))


def test_a_disk_that_fills_meanwhile_is_a_fault_and_the_copy_goes_on(tmp_path: Path) -> None:
    source = write(tmp_path / "source", random_documents([50_000] * 3), 60_000)
    with small_disk(tmp_path / "small", "600k") as disk:
        fill = Told(1, lambda: (disk / "filler").write_bytes(bytes(350_000)))
        with pytest.raises(Fault, match=r"tokens-0000[12].npy cannot be copied .* No space left .* goes on with it"):
            stage(source.folder, disk, streams=1, progress=fill)
        (disk / "filler").unlink()
        told = Told()
        assert content(stage(source.folder, disk, progress=told)) == content(source.folder)
        assert 0 < told.total < 3 * 100_000


def test_a_damaged_copy_is_made_whole_again(tmp_path: Path) -> None:
    """As where a host's cleaner has removed old files; only what is missing is copied."""
    source = dataset_of(tmp_path / "source")
    folder, _ = staged(source.folder, tmp_path / "local")
    (folder / "tokens-00001.npy").unlink()
    (folder / "tokens-00003.npy").write_bytes(b"")
    size = (source.folder / "tokens-00001.npy").stat().st_size
    assert staged(source.folder, tmp_path / "local") == (folder, 2 * size)
    assert content(folder) == content(source.folder)
    other = dataset_of(tmp_path / "other", seed=1)
    shutil.copy(other.folder / "dataset.json", folder)
    assert staged(source.folder, tmp_path / "local") == (folder, 0), "its files are, but its manifest is another"
    assert content(folder) == content(source.folder)


def test_a_damaged_copy_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dataset_of(tmp_path / "source")
    monkeypatch.setattr(staging, "PATIENCE", 2)
    with used_by_another_process(source.folder, tmp_path / "local") as folder:
        (folder / "tokens-00001.npy").unlink()
        with pytest.raises(Fault, match="files of it are missing, but other processes still use it"):
            stage(source.folder, tmp_path / "local", progress=never)
    assert content(stage(source.folder, tmp_path / "local")) == content(source.folder)


def test_the_limit_removes_what_was_not_asked_for_longest(tmp_path: Path) -> None:
    sources = [dataset_of(tmp_path / name, seed) for seed, name in enumerate("abcd")]
    a, b, c, d = (source.folder for source in sources)
    root, size = tmp_path / "local", sum(len(data) for data in content(a).values())
    (root / "dataset-of somebody").mkdir(parents=True)
    first, second = staged(a, root)[0], staged(b, root)[0]
    assert staged(a, root) == (first, 0)  # now b is the older one
    third = staged(c, root, "end", str(2 * size + 100))[0]
    assert [folder.exists() for folder in (first, second, third)] == [True, False, True]
    with pytest.raises(Refused, match=r"no room for dataset-.*the limit is [\d.]+ k?B"):
        stage(d, root, limit_bytes=5000, progress=never)
    assert first.exists() and third.exists(), "nothing is removed where that would not help"
    with used_by_another_process(a, root), pytest.raises(Refused, match="and the limit is"):
        stage(d, root, limit_bytes=size + 100, progress=never)
    with used_by_another_process(a, root):
        assert staged(d, root, "end", str(2 * size + 100))[0].exists()
        assert first.exists() and not third.exists(), "the older one, but in use"
    assert (root / "dataset-of somebody").exists()


def test_without_a_limit_nothing_is_removed(tmp_path: Path) -> None:
    sources = [write(tmp_path / name, random_documents([50_000], seed), 10**6) for seed, name in enumerate("ab")]
    with small_disk(tmp_path / "small", "180k") as disk:
        folder, _ = staged(sources[0].folder, disk)
        with pytest.raises(Refused, match="no room"):
            stage(sources[1].folder, disk)
        assert folder.exists()
        assert staged(sources[1].folder, disk, "end", str(10**6))[0].exists()
        assert not folder.exists(), "with a limit, also for space on the disk"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, root = dataset_of(tmp_path / "source"), tmp_path / "local"
    assert main(["data", "stage", str(source.folder), str(root), "--limit-gb", "1", "--json"]) == 0
    folder = json.loads(capsys.readouterr().out)["folder"]
    assert main(["data", "stage", str(source.folder), str(root), "--streams", "2"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["data", "stage", str(tmp_path / "nothing"), str(root)]) == 2
    (tmp_path / "file").write_text("")
    assert main(["data", "stage", str(source.folder), str(tmp_path / "file")]) == 2
    assert "file: nothing can be staged there" in capsys.readouterr().err
    assert main(["data", "stage", str(source.folder), str(tmp_path / "other"), "--limit-gb", "0.000001"]) == 2
