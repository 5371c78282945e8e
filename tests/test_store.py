"""Token datasets: exact round trips over shards, rows against a slow reference, and damage that is named."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxscale.config.errors import Refused
from jaxscale.data.packing import PADDING_ROW, DocumentSpan, EndToEnd
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer, Tokenizer
from jaxscale.data.writer import DatasetWriter
from tests.sparse import sparse_dataset


class Vocabulary(Tokenizer):
    """A built-in tokenizer of any size, for the ids that a test needs."""

    def __init__(self, size: int) -> None:
        super().__init__(size, end_id=1, begin_id=None, mask_id=None, fingerprint=f"ids {size}", definition=None)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        raise NotImplementedError

    def token_id(self, token: str) -> int | None:
        raise NotImplementedError


def write(folder: Path, documents: list[np.ndarray], shard_tokens: int, vocabulary: int = 259) -> TokenDataset:
    tokenizer = ByteTokenizer() if vocabulary == 259 else Vocabulary(vocabulary)
    with DatasetWriter(folder, tokenizer, {"settings": {}, "skipped": {}}, shard_tokens) as writer:
        for ids in documents:
            writer.add(np.asarray(ids, np.uint32), text_bytes=len(ids))
    return TokenDataset.open(folder)


def random_documents(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 259, length) for length in lengths]


LENGTHS = [5, 1, 16, 3, 40, 1, 1, 7, 16, 16, 100, 2, 9]


@pytest.mark.parametrize("shard_tokens", [1, 16, 24, 60, 10_000])
@pytest.mark.parametrize("sequence_length", [1, 4, 16, 37, 217, 1000])
def test_rows_are_the_documents_laid_end_to_end(tmp_path: Path, shard_tokens: int, sequence_length: int) -> None:
    documents = random_documents(LENGTHS)
    dataset = write(tmp_path / "d", documents, shard_tokens)
    flat = np.concatenate(documents)
    begins = np.zeros(len(flat), bool)
    begins[np.cumsum([0, *LENGTHS[:-1]])] = True
    rows = -(-len(flat) // sequence_length)
    view = EndToEnd(dataset, sequence_length)
    assert view.rows == rows and dataset.tokens == len(flat) == dataset.text_bytes
    order = np.random.default_rng(1).permutation([*range(rows), *range(rows), PADDING_ROW])
    found = view.gather(order)
    assert (found.tokens.dtype, found.starts.dtype, found.lengths.dtype) == (np.uint16, np.bool_, np.int32)
    for row, tokens, starts, length in zip(order, *found, strict=True):
        part = slice(row * sequence_length, (row + 1) * sequence_length) if row != PADDING_ROW else slice(0)
        padding = [0] * (sequence_length - len(flat[part]))
        assert length == len(flat[part])
        assert tokens.tolist() == [*flat[part], *padding]
        assert starts.tolist() == [*begins[part], *padding]


def test_a_document_never_spans_shards_and_the_cut_into_shards_does_not_show(tmp_path: Path) -> None:
    documents = random_documents(LENGTHS)
    one, many = write(tmp_path / "one", documents, 10**6), write(tmp_path / "many", documents, 30)
    assert len(one.shards) == 1 and len(many.shards) > 4
    for shard in many.shards:
        ends = np.load(many.folder / shard.documents_file)
        assert ends.dtype == np.uint64 and ends[-1] == len(np.load(many.folder / shard.tokens_file))
        assert shard.tokens <= 30 or shard.documents == 1
    rows = np.arange(EndToEnd(one, 8).rows)
    for a, b in zip(EndToEnd(one, 8).gather(rows), EndToEnd(many, 8).gather(rows), strict=True):
        assert np.array_equal(a, b)
    many.verify()


def test_documents_in_row(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", random_documents([5, 1, 16, 3]), 10)
    view = EndToEnd(dataset, 8)
    assert view.documents_in_row(0) == [
        DocumentSpan(0, 0, 4, 5),
        DocumentSpan(1, 0, 0, 1),
        DocumentSpan(2, 0, 1, 16),
    ]
    assert view.documents_in_row(1) == [DocumentSpan(2, 2, 9, 16)]
    assert view.documents_in_row(3) == [DocumentSpan(3, 2, 2, 3)]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (200_000, "uint32")])
def test_ids_beyond_sixteen_bits_and_long_documents(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    ids = np.array([0, 65_535, vocabulary - 1, min(128_000, vocabulary - 1), 1])
    long = np.arange(70_000) % vocabulary
    dataset = write(tmp_path / "d", [ids, long], 2**28, vocabulary)
    assert dataset.dtype == dtype == np.load(tmp_path / "d" / "tokens-00000.npy").dtype.name
    assert EndToEnd(dataset, 5).gather(np.array([0])).tokens[0].tolist() == ids.tolist()
    assert np.load(tmp_path / "d" / "documents-00000.npy").tolist() == [5, 70_005]
    view = EndToEnd(dataset, 7)
    assert view.gather(np.arange(view.rows)).tokens.ravel()[5:70_005].tolist() == long.tolist()
    with pytest.raises(Refused, match=f"ids from 1 to {vocabulary}; the vocabulary has ids from 0 to {vocabulary - 1}"):
        write(tmp_path / "bad", [np.array([1, vocabulary])], 10, vocabulary)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_rows_that_do_not_exist(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", random_documents([10]), 10)
    for row in (-2, 2):
        with pytest.raises(IndexError, match="there are 2"):
            EndToEnd(dataset, 8).gather(np.array([row]))
    assert EndToEnd(dataset, 8).gather(np.array([], np.int64)).tokens.shape == (0, 8)


def change(path: Path, content: bytes) -> None:
    path.write_bytes(content)


DAMAGE = {
    "missing tokens": (lambda d: (d / "tokens-00001.npy").unlink(), r"tokens-00001\.npy: missing"),
    "missing documents": (lambda d: (d / "documents-00001.npy").unlink(), r"documents-00001\.npy: missing"),
    "cut short": (
        lambda d: change(d / "tokens-00001.npy", (d / "tokens-00001.npy").read_bytes()[:-2]),
        r"tokens-00001\.npy: [0-9]+ bytes, but",
    ),
    "swapped shards": (
        lambda d: change(d / "tokens-00001.npy", (d / "tokens-00000.npy").read_bytes()),
        r"tokens-00001\.npy: [0-9]+ bytes, but",
    ),
    "another dtype": (
        lambda d: np.save(d / "tokens-00001.npy", np.load(d / "tokens-00001.npy").astype(np.int16)),
        r"tokens-00001\.npy: holds \(37,\) int16",
    ),
    "no array": (
        lambda d: change(d / "tokens-00001.npy", bytes((d / "tokens-00001.npy").stat().st_size)),
        r"tokens-00001\.npy: not an \.npy file",
    ),
    "no manifest": (lambda d: (d / "dataset.json").unlink(), "not a token dataset"),
    "half a manifest": (lambda d: change(d / "dataset.json", b'{"format": "jax'), r"dataset\.json: damaged"),
    "a list": (lambda d: change(d / "dataset.json", b"[]"), r"dataset\.json: damaged"),
    "later version": (
        lambda d: change(
            d / "dataset.json", (d / "dataset.json").read_bytes().replace(b'"version": 1', b'"version": 2')
        ),
        "version 2; this jaxscale reads",
    ),
    "wrong sum": (
        lambda d: change(
            d / "dataset.json", (d / "dataset.json").read_bytes().replace(b'"tokens": 57', b'"tokens": 58')
        ),
        "do not add up to 58 tokens",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_at_opening_and_named(tmp_path: Path, damage: str) -> None:
    dataset = write(tmp_path / "d", random_documents([20, 37]), 30)
    act, message = DAMAGE[damage]
    act(dataset.folder)
    with pytest.raises(Refused, match=message):
        TokenDataset.open(dataset.folder)


@pytest.mark.parametrize("file", ["tokens-00001.npy", "documents-00000.npy"])
def test_verify_finds_a_flipped_bit(tmp_path: Path, file: str) -> None:
    dataset = write(tmp_path / "d", random_documents([20, 37]), 30)
    dataset.verify()
    content = bytearray((dataset.folder / file).read_bytes())
    content[-3] ^= 1
    (dataset.folder / file).write_bytes(content)
    opened = TokenDataset.open(dataset.folder)
    with pytest.raises(Refused, match=file.replace(".", r"\.") + r".*sha256 differs"):
        opened.verify()


def test_verify_finds_ids_beyond_the_vocabulary_even_with_a_right_checksum(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", random_documents([20]), 30)
    path = dataset.folder / "tokens-00000.npy"
    np.save(path, np.full(20, 300, np.uint16))
    manifest = json.loads((dataset.folder / "dataset.json").read_text())
    manifest["shards"][0]["tokens_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (dataset.folder / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match="beyond the vocabulary of 259"):
        TokenDataset.open(dataset.folder).verify()


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    one = write(tmp_path / "one", random_documents(LENGTHS), 30)
    assert write(tmp_path / "two", random_documents(LENGTHS), 30).fingerprint == one.fingerprint
    assert write(tmp_path / "three", random_documents(LENGTHS, seed=1), 30).fingerprint != one.fingerprint
    assert write(tmp_path / "four", random_documents(LENGTHS), 30, vocabulary=300).fingerprint != one.fingerprint


def test_a_failed_build_leaves_nothing_and_an_existing_dataset_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with pytest.raises(KeyboardInterrupt), DatasetWriter(folder, ByteTokenizer(), {}) as writer:
        writer.add(np.array([1, 2, 257], np.uint32), 2)
        raise KeyboardInterrupt
    with pytest.raises(Refused, match="no documents"), DatasetWriter(folder, ByteTokenizer(), {}):
        pass
    assert not list(tmp_path.iterdir())
    first = write(folder, random_documents([10]), 30)
    assert write(folder, random_documents([10]), 30).fingerprint == first.fingerprint  # the slower of two builders
    with pytest.raises(Refused, match="another dataset is there"):
        write(folder, random_documents([11]), 30)
    assert TokenDataset.open(folder).fingerprint == first.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_indices_beyond_two_to_the_forty(tmp_path: Path) -> None:
    """A sparse file of 2 TiB: the last row is found at once."""
    count = 2**40 + 100
    dataset = sparse_dataset(tmp_path / "d", count, shard_tokens=count, document_tokens=2**31 + 5)
    with open(dataset.folder / "tokens-00000.npy", "r+b") as file:
        file.seek(-6, 2)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    view = EndToEnd(dataset, 64)
    assert view.rows == 2**34 + 2
    found = view.gather(np.array([view.rows - 1, (2**31 + 5) // 64]))
    assert found.lengths.tolist() == [36, 64]
    assert found.tokens[0, 32:37].tolist() == [0, 7, 8, 9, 0]
    assert np.flatnonzero(found.starts[0]).tolist() == [] and np.flatnonzero(found.starts[1]).tolist() == [5]
    assert view.documents_in_row((2**31 + 5) // 64)[1] == DocumentSpan(1, 0, 58, 2**31 + 5)


FIRST_BATCH = """
import sys, time, resource
from pathlib import Path
from jaxscale.config.phases import Phase
from jaxscale.data.order import Order, Source
from jaxscale.data.packing import EndToEnd
from jaxscale.data.store import TokenDataset

begun = time.perf_counter()
dataset = TokenDataset.open(Path(sys.argv[1]))
view = EndToEnd(dataset, 2048)
source = Source(dataset.fingerprint, {2048: view.rows})
rows = Order(0, (source,), (Phase(0, 64, 2048),)).batch(int(sys.argv[2])).rows
assert view.gather(rows).lengths.tolist() == [2048] * 64
print(time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_the_first_batch_at_example_ten_to_the_nine_of_ten_to_the_twelve_tokens(tmp_path: Path) -> None:
    """Opening a dataset of 932 shards and gathering 64 rows takes less than a second and no more memory than at 0."""
    dataset = sparse_dataset(tmp_path / "d", 10**12, shard_tokens=2**30)
    seconds, memory = {}, {}
    for cursor in (0, 10**9, 10**9):
        command = [sys.executable, "-c", FIRST_BATCH, str(dataset.folder), str(cursor)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seconds[cursor], memory[cursor] = map(float, done.stdout.split())
    assert seconds[10**9] < 1 and memory[10**9] < memory[0] + 2**22
