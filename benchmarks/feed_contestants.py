"""Ways to feed batches of tokens, each as it is commonly written and with the settings that were fastest for it.

Every one is an endless iterator of ids, `[BATCH, SEQUENCE]` integers in an array of their own on the host. What another
program reads is made from the flat tokens when its way is first used, on uncompressed files. The libraries are imported
where they are needed, and this file runs in a Python that has no jaxscale.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.feed_data import BATCH, MIXTURE, SEQUENCE, describe, flat_rows, flat_tokens

WARM_UP = 3
"""Batches before the first that is timed; they are checked."""
DRAIN = 0.5
"""Part of a turn that comes before it untimed, in which batches are used up that were waiting already."""

Batches = Iterator[np.ndarray]


@dataclass(frozen=True)
class Contestant:
    """A way to feed."""

    open: Callable[[Path], Batches]
    """Takes the folder of the data."""
    shuffles: bool = False
    """Whether each epoch has every row once, in random order."""
    peer: bool = False
    """Whether it is another program, run by the Python that has these."""
    own_rows: bool = False
    """Whether it cuts rows otherwise than at multiples of SEQUENCE."""
    needs: tuple[str, ...] = ()
    """Distributions that have to be installed."""


def bare_gather(folder: Path, dtype: type) -> Batches:
    """Rows of one file at random, gathered at once: no epochs, no sources, no documents."""
    rows, random = flat_rows(folder), np.random.default_rng(0)
    while True:
        yield rows[random.integers(0, len(rows), BATCH)].astype(dtype, copy=False)


def jaxscale(folder: Path, packing: str) -> Batches:
    """The loader of `jaxscale train`: three sources shuffled and mixed, the starts of documents marked."""
    from jaxscale.config.phases import Phase
    from jaxscale.data.loader import Reading, batches
    from jaxscale.data.mixture import Mixture
    from jaxscale.data.order import Order, Source
    from jaxscale.data.store import TokenDataset

    datasets = {str(number): TokenDataset.open(folder / "sources" / str(number)) for number in range(len(MIXTURE))}
    mixture = Mixture(datasets, packing)
    sources = [
        Source(dataset.fingerprint, {SEQUENCE: mixture.view(number, SEQUENCE).rows})
        for number, dataset in enumerate(datasets.values())
    ]
    order = Order(0, tuple(sources), (Phase(0, BATCH, SEQUENCE, MIXTURE),), packing)
    rows = np.arange(BATCH)
    for batch in batches(mixture, order, 0, 10**9, lambda step: rows, Reading()):
        yield batch.tokens


def nanogpt(folder: Path) -> Batches:
    """Windows at random places of a flat file, one by one, and again for the targets: nanoGPT's `get_batch`."""
    tokens, random = flat_tokens(folder), np.random.default_rng(0)
    while True:
        places = random.integers(0, len(tokens) - SEQUENCE, BATCH)
        inputs = np.stack([tokens[i : i + SEQUENCE].astype(np.int64) for i in places])
        np.stack([tokens[i + 1 : i + 1 + SEQUENCE].astype(np.int64) for i in places])
        yield inputs


def pytorch(folder: Path, workers: int) -> Batches:
    """A map-style dataset over a flat file, shuffled by PyTorch's own loader."""
    from torch.utils.data import DataLoader

    loader = DataLoader(TorchRows(folder), BATCH, shuffle=True, drop_last=True, **worker_options(workers))
    while True:
        for batch in loader:
            yield batch.numpy()


class TorchRows:
    """The rows as PyTorch wants them: one by one."""

    def __init__(self, folder: Path) -> None:
        self.rows = flat_rows(folder)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(self.rows[index].astype(np.int32))


def mosaicml_streaming(folder: Path, workers: int) -> Batches:
    """Shards of MosaicML Streaming on the local disk, in its default shuffle, through PyTorch's loader."""
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    def write(path: Path) -> None:
        with MDSWriter(out=str(path), columns={"tokens": f"ndarray:uint16:{SEQUENCE}"}) as writer:
            for row in flat_rows(folder):
                writer.write({"tokens": row})

    shards = made_once(folder / f"mds-{workers}", write)  # two of its processes cannot share a folder
    dataset = StreamingDataset(local=str(shards), shuffle=True, batch_size=BATCH)
    loader = DataLoader(dataset, BATCH, drop_last=True, collate_fn=stack_tokens, **worker_options(workers))
    while True:
        yield from loader


def stack_tokens(samples: list[dict[str, np.ndarray]]) -> np.ndarray:
    """A batch of samples with one column."""
    return np.stack([sample["tokens"] for sample in samples])


def worker_options(workers: int) -> dict[str, Any]:
    """Options of PyTorch's loader that keep its workers from one epoch to the next."""
    return {"num_workers": workers, "persistent_workers": workers > 0}


def grain_array_record(folder: Path, workers: int) -> Batches:
    """Rows as the records of an ArrayRecord file, shuffled by Grain; more threads are no faster on two cores."""
    import grain
    from absl import flags
    from array_record.python.array_record_module import ArrayRecordWriter

    def write(path: Path) -> None:
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for row in flat_rows(folder):
            writer.write(row.tobytes())
        writer.close()

    flags.FLAGS.mark_as_parsed()  # Grain's workers read absl's flags
    records = grain.sources.ArrayRecordDataSource(str(made_once(folder / "rows.array_record", write)))
    rows = grain.MapDataset.source(records).seed(0).shuffle().map(partial(np.frombuffer, dtype=np.uint16))
    batches = rows.repeat().batch(BATCH).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    return iter(batches.mp_prefetch(grain.MultiprocessingOptions(workers)) if workers else batches)


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, which `make` writes if it is not there."""
    if not path.exists():
        unfinished = path.with_name(f"unfinished-{path.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        make(unfinished)
        unfinished.rename(path)
    return path


STREAMING = ("torch", "mosaicml-streaming")
GRAIN = ("grain", "array_record")
CONTESTANTS = {
    "bare gather": Contestant(partial(bare_gather, dtype=np.uint16)),
    "bare gather, int32": Contestant(partial(bare_gather, dtype=np.int32)),
    "jaxscale": Contestant(partial(jaxscale, packing="end_to_end"), shuffles=True),
    "jaxscale, best fit": Contestant(partial(jaxscale, packing="best_fit"), shuffles=True, own_rows=True),
    "nanoGPT get_batch": Contestant(nanogpt, peer=True, own_rows=True),
    "PyTorch": Contestant(partial(pytorch, workers=0), True, peer=True, needs=("torch",)),
    "PyTorch, 2 workers": Contestant(partial(pytorch, workers=2), True, peer=True, needs=("torch",)),
    "Streaming": Contestant(partial(mosaicml_streaming, workers=0), True, peer=True, needs=STREAMING),
    "Streaming, 2 workers": Contestant(partial(mosaicml_streaming, workers=2), True, peer=True, needs=STREAMING),
    "Grain": Contestant(partial(grain_array_record, workers=0), True, peer=True, needs=GRAIN),
    "Grain, 2 workers": Contestant(partial(grain_array_record, workers=2), True, peer=True, needs=GRAIN),
}
"""The first is what the others are compared with."""


def serve(batches: Batches, versions: dict[str, str]) -> None:
    """The life of a contestant's process: warm up, say so, then feed for as many seconds as each line on stdin says.

    It prints one JSON line when it is ready, and then the batches a second of each request.
    """
    first = describe([next(batches) for _ in range(WARM_UP)])
    print(json.dumps({"batches": first, "versions": versions}), flush=True)
    for line in sys.stdin:
        rate(batches, DRAIN * float(line))
        print(rate(batches, float(line)), flush=True)


def rate(batches: Batches, seconds: float) -> float:
    """Batches a second that come when nothing else is waited for."""
    begin, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begin) < seconds:
        next(batches)
        count += 1
    return count / taken


if __name__ == "__main__":
    name, path = sys.argv[1:]
    chosen = CONTESTANTS[name]
    serve(chosen.open(Path(path)), {package: metadata.version(package) for package in ("numpy", *chosen.needs)})
