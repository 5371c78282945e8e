"""The loader: errors surface, threads end, memory stays flat, and starting late costs nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxscale.config.errors import Refused
from jaxscale.data.describe import inspect, inspect_text, show_rows, show_text
from jaxscale.data.loader import batch_at, batch_digest, batches, row_digests
from jaxscale.data.order import Order, Phase
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.data.writer import DatasetWriter

SEQUENCE, BATCH = 16, 4
DOCUMENTS = ["The first document.", "The second.", "Third", "The fourth document is the longest of all."]


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    tokenizer = ByteTokenizer()
    with DatasetWriter(tmp_path / "dataset", tokenizer, {"settings": {"corpus": "test"}}) as writer:
        for text, ids in zip(DOCUMENTS, tokenizer.encode_batch(DOCUMENTS), strict=True):
            writer.add(np.append(ids, tokenizer.end_id), len(text))
    return TokenDataset.open(tmp_path / "dataset")


def order_of(dataset: TokenDataset, shuffle: bool = True) -> Order:
    return Order(dataset.fingerprint, 0, {SEQUENCE: dataset.rows(SEQUENCE)}, shuffle, (Phase(0, BATCH, SEQUENCE),))


def test_batches_are_those_of_batch_at_and_end(dataset: TokenDataset) -> None:
    order, rows = order_of(dataset), np.array([3, 1])
    found = list(batches(dataset, order, 5, 9, rows, read_threads=2, read_ahead=4))
    assert [batch.step for batch in found] == [5, 6, 7, 8]
    for batch in found:
        for one, other in zip(batch, batch_at(dataset, order, batch.step, rows), strict=True):
            assert np.array_equal(one, other)
    assert not list(batches(dataset, order, 9, 9, rows, read_threads=2, read_ahead=4))


def test_an_error_while_reading_is_raised_where_the_batch_is_needed(dataset: TokenDataset) -> None:
    class Broken(Order):
        def rows_of(self, cursors: np.ndarray) -> np.ndarray:
            if cursors.min() >= 3 * BATCH:
                raise OSError("the disk is gone")
            return super().rows_of(cursors)

    order = order_of(dataset)
    broken = Broken(order.fingerprint, order.seed, order.rows, order.shuffle, order.phases)
    feed = batches(dataset, broken, 0, 10, np.arange(BATCH), read_threads=2, read_ahead=8)
    assert [next(feed).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(feed)


def test_threads_end_with_the_iterator(dataset: TokenDataset) -> None:
    before = threading.active_count()
    for _ in range(5):
        feed = batches(dataset, order_of(dataset), 0, 10**6, np.arange(BATCH), read_threads=3, read_ahead=6)
        next(feed)
        del feed
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_process_ends_although_a_feed_is_left_open(dataset: TokenDataset) -> None:
    script = f"""
import numpy as np
from pathlib import Path
from jaxscale.data.loader import batches
from jaxscale.data.order import Order, Phase, Spread
from jaxscale.data.store import TokenDataset
dataset = TokenDataset.open(Path({str(dataset.folder)!r}))
order = Order("f", 0, {{16: dataset.rows(16)}}, True, (Phase(0, 4, 16),))
feed = batches(dataset, order, 0, 10**6, np.arange(4), read_threads=4, read_ahead=8)
print(next(feed).step)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_memory_stays_flat(dataset: TokenDataset) -> None:
    process, sizes = psutil.Process(), []
    rows = np.arange(BATCH)
    for batch in batches(dataset, order_of(dataset), 0, 12_000, rows, read_threads=2, read_ahead=8):
        if batch.step % 3000 == 2999:
            sizes.append(process.memory_info().rss)
    assert sizes[-1] < sizes[0] * 1.02 + 2**21


def test_starting_at_a_late_step_costs_nothing(dataset: TokenDataset) -> None:
    order, rows = order_of(dataset), np.arange(BATCH)
    next(batches(dataset, order, 0, 1, rows, 1, 4))
    begun = time.perf_counter()
    assert next(batches(dataset, order, 10**12, 10**12 + 5, rows, 1, 4)).cursor == BATCH * 10**12
    assert time.perf_counter() - begun < 1.0


def test_digests_cover_real_tokens_alone() -> None:
    tokens = np.array([[1, 2, 70_000, 0], [5, 6, 7, 8]], np.int32)
    digests = row_digests(tokens, np.array([3, 4], np.int32))
    first = hashlib.sha256(b"\x01\0\0\0\x02\0\0\0\x70\x11\x01\0").digest()
    second = hashlib.sha256(b"\x05\0\0\0\x06\0\0\0\x07\0\0\0\x08\0\0\0").digest()
    assert digests.tobytes() == first + second and digests.shape == (2, 32)
    assert batch_digest(digests) == hashlib.sha256(first + second).hexdigest()
    assert batch_digest(digests[::-1]) == hashlib.sha256(second + first).hexdigest()
    longer = np.pad(tokens, ((0, 0), (0, 4)), constant_values=9)
    assert np.array_equal(row_digests(longer, np.array([3, 4])), digests)


def test_show_gives_the_text_of_exactly_that_row(dataset: TokenDataset) -> None:
    order = order_of(dataset, shuffle=False)
    stream = "".join(text + "<|end|>" for text in DOCUMENTS)
    facts = show_rows(dataset, order, step=1)
    texts = ["".join(part["text"] for part in row["documents"]) for row in facts["rows"]]
    assert stream.startswith("".join(texts)) and [row["tokens"] for row in facts["rows"]] == [SEQUENCE] * BATCH
    assert facts["rows"][1]["documents"] == [
        {"document": 0, "first": 16, "last": 19, "tokens": 20, "text": "nt.<|end|>"},
        {"document": 1, "first": 0, "last": 11, "tokens": 12, "text": "The second.<|end|>"},
    ]
    shuffled = order_of(dataset)
    (batch,) = batches(dataset, shuffled, 2, 3, np.arange(BATCH), 1, 4)
    facts = show_rows(dataset, shuffled, step=3, row=1)
    (row,) = facts["rows"]
    assert facts["batch_digest"] == batch_digest(row_digests(batch.tokens, batch.lengths))
    assert "".join(part["text"] for part in row["documents"]) == dataset.tokenizer().decode(
        batch.tokens[1, : batch.lengths[1]]
    )
    assert "row 1 of the batch" in show_text(facts) and row["documents"][0]["text"] in show_text(facts)


def test_show_of_what_does_not_exist(dataset: TokenDataset) -> None:
    order = order_of(dataset, shuffle=False)
    with pytest.raises(Refused, match="--step 0: the first update is 1"):
        show_rows(dataset, order, 0)
    with pytest.raises(Refused, match="--row 4: the batch has rows 0 to 3"):
        show_rows(dataset, order, 1, 4)


def test_inspect(dataset: TokenDataset) -> None:
    facts = inspect(dataset.folder)
    assert facts["documents"] == 4 and facts["text_bytes"] == sum(map(len, DOCUMENTS))
    assert facts["tokens"] == facts["text_bytes"] + 4
    text = inspect_text(facts)
    assert "uint16" in text and dataset.fingerprint in text and "built.settings.corpus" in text


def test_data_modules_load_neither_jax_nor_grain() -> None:
    script = (
        "import sys, jaxscale.data.prepare, jaxscale.data.loader, jaxscale.data.describe; "
        "print([name for name in ('jax', 'grain', 'flax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
