"""Builds at scale: cut into tasks, killed and resumed, in any number of processes always the same bytes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from jaxscale.config.data import BuildConfig, FillInMiddleConfig
from jaxscale.config.errors import Fault, Refused
from jaxscale.data.build import execute
from jaxscale.data.build.corpus import corpus_files, documents, tasks
from jaxscale.data.build.prepare import build, prepare_tokenizer
from jaxscale.data.build.tally import Tally
from jaxscale.data.origin import document_origin
from jaxscale.data.store import TokenDataset
from tests.test_prepare import config, contents, jsonl, stored

WORDS = np.array(["".join(map(chr, np.random.default_rng(i).integers(97, 123, 2 + i % 7))) for i in range(400)])


def texts(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(1, 120))) for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of about 400 kB together, one of them with a duplicate of every tenth text, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        jsonl(folder / f"{number}.jsonl", texts(300, seed=number))
    jsonl(folder / "3.jsonl", texts(300, seed=0)[::10] + texts(200, seed=4))
    prepare_tokenizer(BuildConfig(files=(f"{folder}/*.jsonl",), tokenizer=f"{folder}/t.json", train_vocabulary=600))
    return folder


def settings(corpus: Path, **others: Any) -> dict[str, Any]:
    return {
        "files": (f"{corpus}/*.jsonl",),
        "tokenizer": f"{corpus}/t.json",
        "validation_share": 0.2,
        "task_bytes": 8_000,
        "remove_duplicates": True,
        **others,
    }


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets that one process makes of it without a break."""
    folder = tmp_path_factory.mktemp("undisturbed")
    build(config(folder, **settings(corpus, workers=1)))
    return folder


def same(one: Path, other: Path) -> bool:
    return all(contents(one / name) == contents(other / name) for name in ("train", "held"))


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_every_line_is_in_one_task_and_in_order(tmp_path: Path, size: int) -> None:
    wanted = [text for seed in range(3) for text in texts(12, seed)]
    for seed in range(3):
        jsonl(tmp_path / f"{seed}.jsonl", texts(12, seed))
    wanted.append("last, without an end of line")
    (tmp_path / "4.jsonl").write_text('\n{"text": "last, without an end of line"}')
    chosen = BuildConfig(files=(f"{tmp_path}/*.jsonl",), task_bytes=size)
    tally = Tally()
    parts = tasks(corpus_files(chosen), chosen)
    found = [document for task in parts for document in documents(task, chosen, tally)]
    assert [document.text for document in found] == wanted
    assert tally.bytes_read == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sum(part.end - part.start for task in parts for part in task) == tally.bytes_read
    for document in found:
        with open(tmp_path / document.source, "rb") as file:
            file.seek(document.position)
            assert json.loads(file.readline())["text"] == document.text
        lines = Path(document.place.address).read_text().splitlines()
        place, _, line = document.place.resolved().rpartition(":")
        assert place == document.place.address and json.loads(lines[int(line) - 1])["text"] == document.text


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(corpus: Path, undisturbed: Path, tmp_path: Path, workers: int) -> None:
    report = build(config(tmp_path, **settings(corpus, workers=workers)))
    assert same(tmp_path, undisturbed)
    assert report.skipped["duplicate"] == 30 and len(TokenDataset.open(tmp_path / "train").shards) > 10
    places = [place.rpartition(":")[2] for place in report.places["duplicate"]]
    assert places == [str(line) for line in range(1, 21)]  # the first twenty, in the order of the corpus
    assert not list(tmp_path.glob(".*.building")) and not list(tmp_path.glob(".*.assembling"))


def test_datatroves_own_executor_runs_the_same_tasks(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor

    from jaxscale.data.build.cluster import BuildStep
    from jaxscale.data.build.work import Plan, Work

    chosen = BuildConfig(**settings(corpus))
    tokenizer = prepare_tokenizer(chosen)
    work = Work.begin(tmp_path / ".train.building", Plan.make(chosen, 2, tokenizer.faster()), tokenizer)
    for stage, count in work.plan.stages.items():
        step = BuildStep(work.folder, stage, range(count))
        LocalPipelineExecutor([step], tasks=count, workers=2, logging_dir=str(tmp_path / "logs" / stage)).run()
        assert work.missing(stage) == []
    read: list[int] = []
    build(config(tmp_path, **settings(corpus)), lambda what, done, total: read.append(done))
    assert same(tmp_path, undisturbed) and read == []  # there was nothing left to do but to assemble them


SCRIPT = """
import sys
from pathlib import Path
from jaxscale.config.data import BuildConfig, DataConfig
from jaxscale.data.build.prepare import build
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    build(DataConfig(train=folder / "train", validation={"held": folder / "held"},
                     build=BuildConfig.model_validate_json(sys.argv[2])))
"""


def start(folder: Path, chosen: dict[str, Any]) -> subprocess.Popen[str]:
    script = folder / "build.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    arguments = [sys.executable, str(script), str(folder), BuildConfig(**chosen).model_dump_json()]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)


def family(pid: int) -> list[psutil.Process]:
    """The process, and everything that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["command", "worker"])
def test_a_build_killed_at_random_points_resumes_to_the_same_bytes(
    corpus: Path, undisturbed: Path, tmp_path: Path, victim: str
) -> None:
    generator = random.Random(victim)
    work = tmp_path / ".train.building"
    done = 0
    for _ in range(3):
        process = start(tmp_path, settings(corpus, workers=2))
        started: list[psutil.Process] = []
        wanted = done + generator.randrange(1, 20)
        while process.poll() is None:
            done, started = len(list(work.glob("*/*/[0-9]*"))), family(process.pid)
            with contextlib.suppress(psutil.NoSuchProcess):  # workers of a stage that has just ended
                workers = [one for one in started[1:] if one.ppid() != process.pid]  # the fork server started them
                if done >= wanted and workers:
                    (started[0] if victim == "command" else generator.choice(workers)).kill()
                    break
        _, errors = process.communicate(timeout=60)
        if victim == "worker" and process.returncode:
            assert "a worker of the build was killed" in errors, errors
        psutil.wait_procs(started, timeout=10)
        assert not [one for one in started if one.is_running()], "processes left behind"
    finished = {path: path.stat().st_ino for path in work.glob("*/encoded/[0-9]*/report.json")}
    process = start(tmp_path, settings(corpus, workers=2))
    while process.poll() is None:
        for path, inode in finished.items():
            with contextlib.suppress(FileNotFoundError):  # all is done, and the work is being cleared away
                assert path.stat().st_ino == inode, "a finished task was done again"
        time.sleep(0.02)
    assert process.returncode == 0 and same(tmp_path, undisturbed)


def test_workers_that_never_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for the lock of a killed one would wait for ever; one that ends by itself is waited for."""
    monkeypatch.setattr(execute, "ENDING", 6.0)
    context = multiprocessing.get_context("spawn")
    stuck, fine = (context.Process(target=time.sleep, args=(seconds,)) for seconds in (600, 0.1))
    for process in (stuck, fine):
        process.start()
    execute._wait_for([stuck, fine])
    for process, code in ((stuck, -signal.SIGKILL), (fine, 0)):
        process.join(10)
        assert process.exitcode == code


def test_what_is_wrong_in_one_task_stops_all_and_is_told(corpus: Path, tmp_path: Path) -> None:
    lines = ["fine"] * 4000
    path = Path(jsonl(tmp_path / "d.jsonl", lines))
    content = path.read_bytes().splitlines(keepends=True)
    content[3456] = b'{"text": "not \xff"}\n'
    path.write_bytes(b"".join(content))
    chosen = {"files": (str(path),), "task_bytes": 4000, "workers": 2}
    with pytest.raises(Refused, match=r"d\.jsonl:3457: not UTF-8 text .*on_error = \"skip\""):
        build(config(tmp_path, **chosen))
    report = build(config(tmp_path, **chosen, on_error="skip"))
    assert report.skipped == {"malformed": 1} and report.splits[0].documents == 3999
    assert (tmp_path / "train" / "malformed.txt").read_text().startswith(f"{path}:3457: not UTF-8 text")


def test_a_full_disk_is_a_fault(corpus: Path, tmp_path: Path) -> None:
    chosen = settings(corpus, workers=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails like one to a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, before[1]))
    try:
        with pytest.raises(Fault, match=r"building .* failed: .*File too large"):
            build(config(tmp_path, **chosen))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "train").exists()


def test_a_changed_corpus_or_other_settings_begin_anew(corpus: Path, tmp_path: Path) -> None:
    from jaxscale.data.build.work import Plan, Work

    path = Path(jsonl(tmp_path / "d.jsonl", ["a", "b"]))
    chosen = BuildConfig(files=(str(path),))
    tokenizer = prepare_tokenizer(chosen)
    work = Work.begin(tmp_path / ".train.building", Plan.make(chosen, 1, tokenizer), tokenizer)
    (work.folder / "encoded").mkdir()
    path.write_text(path.read_text() + '{"text": "c"}\n')
    build(config(tmp_path, files=(str(path),)))
    assert stored(tmp_path / "train") == [[*text, 257] for text in (b"a", b"b", b"c")]
    assert not list(tmp_path.glob(".train.building"))


def test_duplicates_over_tasks_and_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ["one", "two  words", "three"])
    jsonl(tmp_path / "b.jsonl", [" two\nwords ", "One", "e\u0301", "four"])
    jsonl(tmp_path / "c.jsonl", ["\u00e9", "three", "three", "five"])
    chosen = {"files": (f"{tmp_path}/*.jsonl",), "task_bytes": 16, "remove_duplicates": True, "workers": 2}
    report = build(config(tmp_path, **chosen))
    kept = [bytes(ids[:-1]).decode() for ids in stored(tmp_path / "train")]
    assert kept == ["one", "two  words", "three", "One", "e\u0301", "four", "five"]
    assert report.skipped == {"duplicate": 4}
    places = [f"{tmp_path}/{place}" for place in ("b.jsonl:1", "c.jsonl:1", "c.jsonl:2", "c.jsonl:3")]
    assert list(report.places["duplicate"]) == places


def test_filters(tmp_path: Path) -> None:
    entries = [
        {"text": "short", "lang": "en", "meta": {"score": 0.9}},
        {"text": "long enough", "lang": "en", "meta": {"score": 0.9}},
        {"text": "too long" * 9, "lang": "en", "meta": {"score": 0.9}},
        {"text": "long enough", "lang": "de", "meta": {"score": 0.9}},
        {"text": "long enough", "lang": "en", "meta": {"score": 0.1}},
        {"text": "without score", "lang": "en"},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    limits = {"min_characters": 6, "max_characters": 20, "keep": 'lang == "en" and meta.score >= 0.5'}
    with pytest.raises(Refused, match=r"d\.jsonl:6: .* cannot be evaluated"):
        build(config(tmp_path, files=(str(path),), **limits))
    report = build(config(tmp_path, files=(str(path),), on_error="skip", **limits))
    assert stored(tmp_path / "train") == [[*b"long enough", 257]]
    assert report.skipped == {
        "keep is not fulfilled": 2,
        "longer than max_characters": 1,
        "malformed": 1,
        "shorter than min_characters": 1,
    }


def test_origins(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    (tmp_path / "b.txt").write_text("four")
    build(config(tmp_path, files=(f"{tmp_path}/*.jsonl", f"{tmp_path}/*.txt"), shard_tokens=8))
    dataset = TokenDataset.open(tmp_path / "train")
    assert len(dataset.shards) == 3
    assert [document_origin(dataset, i) for i in range(4)] == [
        {"id": "a.jsonl:0", "source": "a.jsonl", "position": 0},
        {"id": "a.jsonl:16", "source": "a.jsonl", "position": 16},
        {"id": "a.jsonl:32", "source": "a.jsonl", "position": 32},
        {"id": "b.txt", "source": "b.txt", "position": 0},
    ]
    with pytest.raises(IndexError):
        document_origin(dataset, 4)
    for path in (tmp_path / "train").glob("*.parquet"):
        path.unlink()
    assert document_origin(dataset, 0) is None


def test_fill_in_the_middle(corpus: Path, tmp_path: Path) -> None:
    chosen = settings(corpus, remove_duplicates=False, tokenizer=str(tmp_path / "t.json"), train_vocabulary=600)
    build(config(tmp_path / "filled", **chosen, fill_in_middle=FillInMiddleConfig(rate=0.5, suffix_first=0.25)))
    build(config(tmp_path / "plain", **chosen))
    dataset = TokenDataset.open(tmp_path / "filled" / "train")
    tokenizer = dataset.tokenizer()
    plain, filled = (map(tokenizer.decode, stored(tmp_path / name / "train")) for name in ("plain", "filled"))
    prefix, middle, suffix = "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"
    prefix_first = re.compile(
        re.escape(prefix) + "(.*)" + re.escape(suffix) + "(.*)" + re.escape(middle) + "(.*)", re.S
    )
    suffix_first = re.compile(re.escape(prefix + suffix) + "(.*)" + re.escape(middle) + "(.*)", re.S)
    counts = {"plain": 0, "prefix first": 0, "suffix first": 0}
    for before, after in zip(plain, filled, strict=True):
        before, after = before.removesuffix("<|end|>"), after.removesuffix("<|end|>")
        if found := suffix_first.fullmatch(after):
            counts["suffix first"] += 1
            assert found[2] + found[1] == before
        elif found := prefix_first.fullmatch(after):
            counts["prefix first"] += 1
            assert found[1] + found[3] + found[2] == before
        else:
            counts["plain"] += 1
            assert after == before
    total = sum(counts.values())
    # Binomial: five standard deviations.
    for kind, share in (("plain", 0.5), ("prefix first", 0.375), ("suffix first", 0.125)):
        assert abs(counts[kind] - share * total) < 5 * (total * share * (1 - share)) ** 0.5, counts
    assert (
        contents(tmp_path / "filled" / "held")["tokens-00000.npy"]
        == (contents(tmp_path / "plain" / "held")["tokens-00000.npy"])
    )
    with pytest.raises(Refused, match=r"fill_in_middle\.prefix = '<PRE>': the tokenizer .* has no such token"):
        build(config(tmp_path / "other", **chosen, fill_in_middle=FillInMiddleConfig(prefix="<PRE>")))


@pytest.mark.parametrize("blanks", [True, False])
def test_a_huge_document_takes_linear_time_and_bounded_memory(corpus: Path, tmp_path: Path, blanks: bool) -> None:
    letters = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 10**6)))
    million = " ".join(letters[i : i + 7] for i in range(0, len(letters), 8)) if blanks else letters
    seconds: dict[int, float] = {}
    for megabytes in (1, 10):
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        jsonl(folder / "d.jsonl", ["before", million * megabytes, "after"])
        begun = time.monotonic()
        build(config(folder, files=(f"{folder}/d.jsonl",), tokenizer=f"{corpus}/t.json", workers=1))
        seconds[megabytes] = time.monotonic() - begun
        dataset = TokenDataset.open(folder / "train")
        tokenizer = dataset.tokenizer()
        first, middle, last = stored(folder / "train")
        assert [tokenizer.decode(ids[:-1]) for ids in (first, last)] == ["before", "after"]
        assert tokenizer.decode(middle[:-1]) == million * megabytes
    assert seconds[10] < 10 * seconds[1] * 1.5 + 1


def test_interrupted_by_hand(corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path, settings(corpus, workers=2, task_bytes=5000))
    while not list(tmp_path.glob(".train.building/*/encoded/[0-9]*")) and process.poll() is None:
        time.sleep(0.01)
    started = family(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=30)
    assert process.returncode not in (0, None) and errors.count("Traceback") <= 1, errors
    psutil.wait_procs(started, timeout=10)
    assert len(started) > 2 and not [one for one in started if one.is_running()]


@pytest.mark.parametrize("moves", [0, 1, 7, 40])
def test_killed_while_the_datasets_are_assembled(
    corpus: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """Assembling only moves files; after any number of moves the next build goes on from there."""
    left, move = moves, shutil.move

    def killed(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        move(source, target)

    monkeypatch.setattr("shutil.move", killed)
    with pytest.raises(KeyboardInterrupt):
        build(config(tmp_path, **settings(corpus, workers=1)))
    monkeypatch.undo()
    build(config(tmp_path, **settings(corpus, workers=1)))
    assert same(tmp_path, undisturbed)


BUILD = """
import resource, sys
from jaxscale.cli import main
assert main(["data", "build", sys.argv[1]]) == 0
print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


@pytest.mark.parametrize(("tokenizer", "most"), [("bytes", 5.2), ("t.json", 3.5)])
def test_memory_for_a_long_line(corpus: Path, tmp_path: Path, tokenizer: str, most: float) -> None:
    """What a line of 41 million bytes needs more than one of a million, for each byte of it."""
    memory = {}
    for millions in (1, 41):
        folder = tmp_path / str(millions)
        folder.mkdir()
        sentence = " ".join(WORDS) + ". "
        jsonl(folder / "one.jsonl", [sentence * (millions * 10**6 // len(sentence))])
        name = tokenizer if tokenizer == "bytes" else f"{corpus}/{tokenizer}"
        (folder / "build.toml").write_text(
            f'[data]\ntrain = "{folder}/train"\n[data.build]\nfiles = ["{folder}/one.jsonl"]\n'
            f'tokenizer = "{name}"\nworkers = 1\n'
        )
        command = [sys.executable, "-c", BUILD, f"{folder}/build.toml"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        memory[millions] = int(done.stdout.split()[-1]) * 1024
    assert memory[41] - memory[1] < most * 40 * 10**6
    assert TokenDataset.open(tmp_path / "41" / "train").documents == 1
