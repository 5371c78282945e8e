"""The loader: errors surface, threads end, memory stays flat, and starting late costs nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from jaxscale.config.errors import Fault, Refused
from jaxscale.config.phases import Phase
from jaxscale.data.describe import inspect, inspect_text, show_rows, show_text
from jaxscale.data.feed import to_devices
from jaxscale.data.loader import HostBatch, Reading, batch_at, batch_digest, batches, row_digests
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Examples, Order, Source
from jaxscale.data.packing import EndToEnd
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.data.writer import DatasetWriter

SEQUENCE, BATCH = 16, 4
DOCUMENTS = ["The first document.", "The second.", "Third", "The fourth document is the longest of all."]


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    tokenizer = ByteTokenizer()
    with DatasetWriter(tmp_path / "dataset", tokenizer, {"settings": {"corpus": "test"}}) as writer:
        for text, ids in zip(DOCUMENTS, tokenizer.encode_batch(DOCUMENTS), strict=True):
            writer.add(np.append(ids, tokenizer.end_id), len(text))
    return Mixture({"train": TokenDataset.open(tmp_path / "dataset")}, "end_to_end")


def order_of(mixture: Mixture, shuffle: bool = True) -> Order:
    dataset = mixture.first
    source = Source(dataset.fingerprint, {SEQUENCE: EndToEnd(dataset, SEQUENCE).rows})
    return Order(0, (source,), (Phase(0, BATCH, SEQUENCE),), shuffle=shuffle)


def test_batches_are_those_of_batch_at_and_end(mixture: Mixture) -> None:
    order, rows = order_of(mixture), np.array([3, 1])
    found = list(batches(mixture, order, 5, 9, lambda step: rows, Reading(threads=2, ahead=4)))
    assert [batch.step for batch in found] == [5, 6, 7, 8]
    for batch in found:
        for one, other in zip(batch, batch_at(mixture, order, batch.step, rows), strict=True):
            assert np.array_equal(one, other)
    assert not list(batches(mixture, order, 9, 9, lambda step: rows, Reading(threads=2, ahead=4)))


def test_ids_reach_the_device_in_the_width_that_the_step_declares() -> None:
    """Ids stored as uint32 fit uint16 where the vocabulary does, and the other way round nothing is lost."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ids = np.array([[0, 7, 65_535], [3, 2, 1]])
    starts, lengths = np.ones(ids.shape, bool), np.array([3, 3], np.int32)
    for stored, declared in product((np.uint16, np.uint32), (np.uint16, np.int32)):
        batch = HostBatch(0, 0, np.arange(2), ids.astype(stored), starts, lengths)
        shape = jax.ShapeDtypeStruct((1, *ids.shape), declared, sharding=sharding)
        sent = to_devices(batch, {"tokens": shape})["tokens"]
        assert sent.dtype == declared and sent[0].tolist() == ids.tolist()


def test_an_error_while_reading_is_raised_where_the_batch_is_needed(mixture: Mixture) -> None:
    class Broken(Order):
        def examples(self, cursors: np.ndarray) -> Examples:
            if cursors.max() >= 3 * BATCH:
                raise OSError("the disk is gone")
            return super().examples(cursors)

    order = order_of(mixture)
    broken = Broken(order.seed, order.sources, order.phases)
    feed = batches(mixture, broken, 0, 10, lambda step: np.arange(BATCH), Reading(threads=2, ahead=8))
    assert [next(feed).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(feed)


def test_an_id_beyond_the_vocabulary_stops_the_run_and_is_named(mixture: Mixture) -> None:
    """A damaged shard of the right size: found when the row is read, not trained on."""
    tokens = np.load(mixture.first.folder / "tokens-00000.npy", mmap_mode="r+")
    tokens[20] = 65535
    tokens.flush()
    order = order_of(mixture, shuffle=False)
    with pytest.raises(Fault, match="dataset: row 1 holds id 65535, beyond the vocabulary of 259"):
        batch_at(mixture, order, 0, np.arange(BATCH))
    assert batch_at(mixture, order, 0, np.array([0, 2])).lengths.tolist() == [SEQUENCE, SEQUENCE]


def test_threads_end_with_the_iterator(mixture: Mixture) -> None:
    before = threading.active_count()
    for _ in range(5):
        reading = Reading(threads=3, ahead=6)
        feed = batches(mixture, order_of(mixture), 0, 10**6, lambda step: np.arange(BATCH), reading)
        next(feed)
        del feed
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_process_ends_although_a_feed_is_left_open(mixture: Mixture) -> None:
    script = f"""
import numpy as np
from pathlib import Path
from jaxscale.data.loader import Reading, batches
from jaxscale.config.phases import Phase
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Order, Source
from jaxscale.data.packing import EndToEnd
from jaxscale.data.store import TokenDataset
dataset = TokenDataset.open(Path({str(mixture.first.folder)!r}))
order = Order(0, (Source("f", {{16: EndToEnd(dataset, 16).rows}}),), (Phase(0, 4, 16),))
mixture = Mixture({{"train": dataset}}, "end_to_end")
feed = batches(mixture, order, 0, 10**6, lambda step: np.arange(4), Reading(threads=4, ahead=8))
print(next(feed).step)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_memory_stays_flat(mixture: Mixture) -> None:
    process, sizes = psutil.Process(), []
    rows = np.arange(BATCH)
    for batch in batches(mixture, order_of(mixture), 0, 100_000, lambda step: rows, Reading(threads=2, ahead=8)):
        if batch.step % 25_000 == 24_999:
            sizes.append(process.memory_info().rss)
    assert sizes[-1] < sizes[0] * 1.02 + 2**21


def test_starting_at_a_late_step_costs_nothing(mixture: Mixture) -> None:
    order, rows = order_of(mixture), np.arange(BATCH)
    next(batches(mixture, order, 0, 1, lambda step: rows, Reading()))
    begun = time.perf_counter()
    assert next(batches(mixture, order, 10**12, 10**12 + 5, lambda step: rows, Reading())).cursor == BATCH * 10**12
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


def test_show_gives_the_text_of_exactly_that_row(mixture: Mixture) -> None:
    order = order_of(mixture, shuffle=False)
    stream = "".join(text + "<|end|>" for text in DOCUMENTS)
    facts = show_rows(mixture, order, step=1)
    texts = ["".join(part["text"] for part in row["documents"]) for row in facts["rows"]]
    assert stream.startswith("".join(texts)) and [row["tokens"] for row in facts["rows"]] == [SEQUENCE] * BATCH
    assert facts["rows"][1]["documents"] == [
        {"document": 0, "first": 16, "last": 19, "tokens": 20, "origin": None, "text": "nt.<|end|>"},
        {"document": 1, "first": 0, "last": 11, "tokens": 12, "origin": None, "text": "The second.<|end|>"},
    ]
    shuffled = order_of(mixture)
    (batch,) = batches(mixture, shuffled, 2, 3, lambda step: np.arange(BATCH), Reading())
    facts = show_rows(mixture, shuffled, step=3, row=1)
    (row,) = facts["rows"]
    assert facts["batch_digest"] == batch_digest(row_digests(batch.tokens, batch.lengths))
    assert "".join(part["text"] for part in row["documents"]) == mixture.first.tokenizer().decode(
        batch.tokens[1, : batch.lengths[1]]
    )
    assert "row 1 of the batch" in show_text(facts) and row["documents"][0]["text"] in show_text(facts)


def test_show_of_what_does_not_exist(mixture: Mixture) -> None:
    order = order_of(mixture, shuffle=False)
    with pytest.raises(Refused, match="--step 0: the first update is 1"):
        show_rows(mixture, order, 0)
    with pytest.raises(Refused, match="--row 4: the batch has rows 0 to 3"):
        show_rows(mixture, order, 1, 4)


def test_inspect(mixture: Mixture) -> None:
    facts = inspect(mixture.first.folder)
    assert facts["documents"] == 4 and facts["text_bytes"] == sum(map(len, DOCUMENTS))
    assert facts["tokens"] == facts["text_bytes"] + 4
    text = inspect_text(facts)
    assert "uint16" in text and mixture.first.fingerprint in text and "built.settings.corpus" in text


def test_data_modules_load_neither_jax_nor_grain() -> None:
    script = (
        "import sys, jaxscale.data.build.prepare, jaxscale.data.loader, jaxscale.data.describe; "
        "print([name for name in ('jax', 'grain', 'flax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
