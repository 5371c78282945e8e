"""From text to datasets: markers, bad input, splits, reproducible builds, and builders that race."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxscale.config.data import BuildConfig, DataConfig
from jaxscale.config.errors import Refused
from jaxscale.data.build.corpus import corpus_files, documents, tasks
from jaxscale.data.build.prepare import build, prepare_tokenizer
from jaxscale.data.build.tally import Tally
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.data.writer import DatasetWriter
from tests.test_tokenizer import byte_level, saved

BOM = b"\xef\xbb\xbf"


def config(folder: Path, **settings: Any) -> DataConfig:
    validation = {"held": folder / "held"} if settings.get("validation_share") else {}
    return DataConfig(train=folder / "train", validation=validation, build=BuildConfig(**settings))


def jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def stored(folder: Path) -> list[list[int]]:
    """Ids of each document of a dataset, read with NumPy alone."""
    found = []
    for tokens in sorted(folder.glob("tokens-*.npy")):
        ends = np.load(folder / tokens.name.replace("tokens", "documents")).astype(int)
        found += [part.tolist() for part in np.split(np.load(tokens), ends)[:-1]]
    return found


@pytest.mark.parametrize("begin_marker", [False, True])
def test_each_document_has_each_marker_once(tmp_path: Path, begin_marker: bool) -> None:
    files = jsonl(tmp_path / "d.jsonl", ["a", "b", "", "<|end|><|begin|>"])
    report = build(config(tmp_path, files=(files,), begin_marker=begin_marker))
    begin = [256] if begin_marker else []
    texts = ["a", "b", "<|end|><|begin|>"]
    assert stored(tmp_path / "train") == [[*begin, *text.encode(), 257] for text in texts]
    assert report.skipped == {"empty document": 1} and report.built
    (split,) = report.splits
    assert (split.documents, split.tokens, split.text_bytes) == (3, 18 + 3 * (1 + begin_marker), 18)
    dataset = TokenDataset.open(tmp_path / "train")
    assert dataset.text_bytes == 18 and dataset.built["skipped"] == {"empty document": 1}


def test_markers_of_a_tokenizer_with_a_post_processor_of_its_own(tmp_path: Path) -> None:
    from tokenizers import processors

    library = byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    library.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|end_of_text|>",
        special_tokens=[("<|begin_of_text|>", 256), ("<|end_of_text|>", 257)],
    )
    files = jsonl(tmp_path / "d.jsonl", ["a", "<|end_of_text|>"])
    settings = {"files": (files,), "tokenizer": saved(library, tmp_path), "begin_marker": True}
    build(config(tmp_path, **settings))
    for ids in stored(tmp_path / "train"):
        assert ids[0] == 256 and ids[-1] == 257 and not {256, 257} & set(ids[1:-1])
    dataset = TokenDataset.open(tmp_path / "train")
    (tmp_path / "tokenizer.json").unlink()  # the dataset has its own copy
    assert dataset.tokenizer().decode(stored(tmp_path / "train")[1]) == (
        "<|begin_of_text|><|end_of_text|><|end_of_text|>"
    )


def test_begin_marker_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    files = jsonl(tmp_path / "d.jsonl", ["a"])
    tokenizer = saved(byte_level(["</s>"]), tmp_path)
    with pytest.raises(Refused, match="has no begin marker"):
        build(config(tmp_path, files=(files,), tokenizer=tokenizer, begin_marker=True))


GOOD = b'{"text": "good"}\n'
MALFORMED = {
    b'{"text": null}\n': "'text' is null, not a string",
    b'{"text": 3}\n': "'text' is 3, not a string",
    b'{"txt": "x"}\n': "no key 'text' .* it has 'txt'",
    b"[1]\n": "a JSON list, not an object",
    b'{"text": "bad \xff byte"}\n': "not UTF-8",
    b'{"text": "half a pair \\ud800"}\n': "surrogates",
    b'{"text": "never closed': "not JSON",
    b"[" * 100_000 + b"\n": "",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_malformed_lines_are_named_or_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD + b"\n" + line)
    with pytest.raises(Refused, match=rf"d\.jsonl:3: .*{MALFORMED[line]}.*on_error = \"skip\""):
        build(config(tmp_path, files=(str(path),)))
    assert not (tmp_path / "train").exists()
    report = build(config(tmp_path, files=(str(path),), on_error="skip"))
    assert report.skipped == {"blank line": 1, "malformed": 1}
    assert [place for place in report.places["malformed"] if "d.jsonl:3: " in place] == [*report.places["malformed"]]
    assert (tmp_path / "train" / "malformed.txt").read_text() == report.places["malformed"][0] + "\n"
    assert stored(tmp_path / "train") == [[*b"good", 257]]


def test_blanks_marks_and_line_ends(tmp_path: Path) -> None:
    lines = BOM + b'{"text": ""}\r\n{"text": " \\n\\t"}\r\n{"text": "a\\r\\nb"}\r\n\r\n   \n{"text": "last"}'
    (tmp_path / "d.jsonl").write_bytes(lines)
    (tmp_path / "one.txt").write_bytes(BOM + b"plain\r\ntext")
    (tmp_path / "two.txt").write_bytes(b" \n")
    tally = Tally()
    settings = BuildConfig(files=(str(tmp_path / "*.jsonl"), str(tmp_path / "*.txt"), str(tmp_path / "d*")))
    files = corpus_files(settings)
    found = [document for task in tasks(files, settings) for document in documents(task, settings, tally)]
    assert [document.text for document in found] == ["a\r\nb", "last", "plain\r\ntext"]
    assert [document.id for document in found] == ["d.jsonl:36", "d.jsonl:62", "one.txt"]
    assert tally.skipped == {"empty document": 3, "blank line": 2}
    assert tally.bytes_read == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_text_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(Refused, match=r"a\.txt:2: not UTF-8"):
        build(config(tmp_path, files=(str(tmp_path / "*.txt"),)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": ("nowhere/*.txt",)}, r"nowhere/\*\.txt' matches no file"),
        ({"corpus": "python-stdlib", "tokenizer": "nowhere.json"}, "no such file"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        build(config(tmp_path, **settings))
    assert not (tmp_path / "train").exists()


def test_nothing_to_build_and_empty_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nothing to build"):
        build(DataConfig(train=tmp_path / "train"))
    empty = jsonl(tmp_path / "empty.jsonl", ["", " "])
    with pytest.raises(Refused, match=r"holds no text \(skipped: 2 x empty document\)"):
        build(config(tmp_path, files=(empty,)))
    few = jsonl(tmp_path / "few.jsonl", ["a", "b"])
    with pytest.raises(Refused, match=r"held: none of the corpus's 2 documents.*validation_share = 1e-06"):
        build(config(tmp_path, files=(few,), validation_share=1e-6))
    assert not (tmp_path / "train").exists() and not (tmp_path / "held").exists()


def test_the_split_is_by_document_and_additions_move_nothing(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(400)]
    path = tmp_path / "d.jsonl"
    build(config(tmp_path / "one", files=(jsonl(path, texts),), validation_share=0.25))
    train, held = ({bytes(ids[:-1]).decode() for ids in stored(tmp_path / "one" / name)} for name in ("train", "held"))
    assert train | held == set(texts) and not train & held
    assert 70 < len(held) < 130  # 100 expected, standard deviation 8.7
    build(config(tmp_path / "two", files=(jsonl(path, [*texts, "one more"]),), validation_share=0.25))
    held_later = {bytes(ids[:-1]).decode() for ids in stored(tmp_path / "two" / "held")}
    assert held_later - {"one more"} == held


def test_a_huge_document_between_two_small_ones(tmp_path: Path) -> None:
    huge = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 2_000_000)))  # not one blank
    files = jsonl(tmp_path / "d.jsonl", ["before " * 50, huge, "after"])
    settings = {"files": (files,), "tokenizer": str(tmp_path / "t.json"), "train_vocabulary": 300, "shard_tokens": 1000}
    build(config(tmp_path, **settings))
    dataset = TokenDataset.open(tmp_path / "train")
    tokenizer = dataset.tokenizer()
    first, middle, last = stored(tmp_path / "train")
    assert tokenizer.decode(first[:-1]) == "before " * 50 and tokenizer.decode(last[:-1]) == "after"
    assert tokenizer.decode(middle[:-1]) == huge and len(dataset.shards) == 3


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def in_processes(folders: list[Path], corpus: str, count: int = 1) -> list[subprocess.Popen[str]]:
    """Start `count` processes for each folder, which all build there."""
    script = """
import sys
from pathlib import Path
from jaxscale.config.data import BuildConfig, DataConfig
from jaxscale.data.build.prepare import build
folder = Path(sys.argv[1])
settings = BuildConfig(files=(sys.argv[2],), tokenizer=f"{folder}/t.json", train_vocabulary=600, validation_share=0.2)
print(build(DataConfig(train=folder / "train", validation={"held": folder / "held"}, build=settings)).built)
"""
    arguments = [[sys.executable, "-c", script, str(folder), corpus] for folder in folders for _ in range(count)]
    return [subprocess.Popen(argument, stdout=subprocess.PIPE, text=True) for argument in arguments]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    generator = np.random.default_rng(0)
    words = ["".join(map(chr, generator.integers(97, 123, generator.integers(2, 9)))) for _ in range(500)]
    texts = [" ".join(generator.choice(words, 300)) for _ in range(200)]
    return jsonl(tmp_path / "corpus.jsonl", texts)


def test_builds_are_byte_identical_and_racing_builders_build_once(tmp_path: Path, corpus: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    racing = in_processes([one], corpus, count=3)
    assert sorted(process.communicate(timeout=120)[0] for process in racing) == ["False\n", "False\n", "True\n"]
    (alone,) = in_processes([two], corpus)
    assert alone.communicate(timeout=120)[0] == "True\n"
    assert (one / "t.json").read_bytes() == (two / "t.json").read_bytes()
    for name in ("train", "held"):
        assert contents(one / name) == contents(two / name)
        assert set(contents(one / name)) == {
            "dataset.json",
            "tokenizer.json",
            "tokens-00000.npy",
            "documents-00000.npy",
            "documents-00000.parquet",
        }
    assert {path.name for path in one.iterdir()} == {"t.json", "train", "held", ".train.lock", ".t.json.lock"}


def test_a_killed_build_leaves_no_half_dataset_and_the_next_one_cleans_up(tmp_path: Path, corpus: str) -> None:
    folder = tmp_path / "killed"
    for wait in ("t.json", ".train.building/*/encoded"):
        (process,) = in_processes([folder], corpus)
        deadline = time.monotonic() + 60
        while not list(folder.glob(wait)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        for name in ("train", "held"):
            if (folder / name).exists():
                TokenDataset.open(folder / name).verify()
    (process,) = in_processes([folder], corpus)
    process.communicate(timeout=120)
    for name in ("train", "held"):
        TokenDataset.open(folder / name).verify()
    assert not list(folder.glob("*building*"))


def test_a_file_system_without_locks_only_builds_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    other_builder = DatasetWriter(tmp_path / "train", ByteTokenizer(), {})
    with other_builder:
        other_builder.add(np.array([*b"a", 257]), 1)
        files = jsonl(tmp_path / "d.jsonl", ["a"])
        assert build(config(tmp_path, files=(files,))).built  # and what the other one has written is left alone
    assert stored(tmp_path / "train") == [[*b"a", 257]]


def test_what_is_there_is_kept_or_refused(tmp_path: Path) -> None:
    files = jsonl(tmp_path / "d.jsonl", ["a", "b"])
    first = build(config(tmp_path, files=(files,)))
    before = contents(tmp_path / "train")
    again = build(config(tmp_path, files=(files,)))
    assert (first.built, again.built) == (True, False) and again.splits == first.splits
    with pytest.raises(Refused, match=r"train was built with data\.build\.begin_marker = False, not True"):
        build(config(tmp_path, files=(files,), begin_marker=True))
    assert contents(tmp_path / "train") == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(Refused, match="other: not a token dataset"):
        build(DataConfig(train=tmp_path / "other", build=BuildConfig(files=(files,))))


def test_a_tokenizer_file_of_another_size_is_refused(tmp_path: Path, corpus: str) -> None:
    settings = BuildConfig(files=(corpus,), tokenizer=str(tmp_path / "t.json"), train_vocabulary=300)
    assert prepare_tokenizer(settings).vocabulary_size == 300
    with pytest.raises(Refused, match=r"train_vocabulary = 400, but .*t\.json is there already with 300 ids"):
        prepare_tokenizer(settings.model_copy(update={"train_vocabulary": 400}))


def test_progress_reaches_the_end(tmp_path: Path, corpus: str) -> None:
    seen: dict[str, tuple[int, int]] = {}
    settings = {"files": (corpus,), "tokenizer": str(tmp_path / "t.json"), "train_vocabulary": 300}
    build(config(tmp_path, **settings), lambda what, done, total: seen.update({what: (done, total)}))
    size = Path(corpus).stat().st_size
    assert seen == {"training the tokenizer": (size, size), "encoding": (size, size)}


def test_the_corpus_that_is_on_every_machine() -> None:
    settings = BuildConfig(corpus="python-stdlib")
    files = corpus_files(settings)
    names = [file.name for file in files]
    assert "json/decoder.py" in names and names == sorted(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(Path(name).parts)]
    tally = Tally()
    found = [document for task in tasks(files, settings) for document in documents(task, settings, tally)]
    assert set(tally.skipped) == {"empty document"} and sum(document.text_bytes for document in found) > 5_000_000
    assert len({document.id for document in found}) == len(found)


def test_changed_tokenizer_is_noticed_and_a_moved_one_is_not_held_against_it(tmp_path: Path, corpus: str) -> None:
    file = tmp_path / "t.json"
    data = config(tmp_path, files=(corpus,), tokenizer=str(file), train_vocabulary=300)
    build(data)
    moved = tmp_path / "elsewhere" / "t.json"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    assert not build(config(tmp_path, files=(corpus,), tokenizer=str(moved), train_vocabulary=300)).built
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(text))
    with pytest.raises(Refused, match="another tokenizer"):
        build(data)
