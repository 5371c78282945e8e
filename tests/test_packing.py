"""Packing: every token once, no document cut that fits a row, and plans that are never half, stale or damaged."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.config.errors import Fault, Refused
from jaxscale.data import packing_plan
from jaxscale.data.best_fit import Places, best_fit_decreasing
from jaxscale.data.packing import PADDING_ROW, DocumentSpan, Planned, View, gather, open_view
from jaxscale.data.store import TokenDataset
from tests.disks import small_disk
from tests.processes import start
from tests.test_store import random_documents, write

PLANNED = ("one_a_row", "best_fit")
PACKINGS = ("end_to_end", *PLANNED)


def numbered(sizes: Sequence[int]) -> list[np.ndarray]:
    """Documents of these sizes whose tokens are 1, 2, 3 and so on through all of them."""
    return np.split(np.arange(1, sum(sizes) + 1), np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_of_sources_whose_ids_are_stored_in_different_widths(packing: str, tmp_path: Path) -> None:
    """Each row is what its own source gives, and wide ids stay whole beside narrow ones; padding rows between them."""
    sizes = [5, 17, 1, 30, 8, 8, 3]
    narrow = open_view(write(tmp_path / "narrow", numbered(sizes), 40, vocabulary=2000), 8, packing)
    wide = write(tmp_path / "wide", [ids + 100_000 for ids in numbered(sizes[::-1])], 40, vocabulary=200_000)
    views = {0: narrow, 3: open_view(wide, 8, packing)}
    sources = np.array([3, 0, 3, 3, 0, 0, 3])
    rows = np.array([1, 2, 0, 1, PADDING_ROW, 0, PADDING_ROW])
    found = gather(views, sources, rows, 8)
    assert found.tokens.dtype == np.uint32 and found.tokens.max() > 100_000
    for number, (source, row) in enumerate(zip(sources, rows, strict=True)):
        alone = views[int(source)].gather(np.array([row]))
        for together, single in zip(found, alone, strict=True):
            assert np.array_equal(together[number], single[0])


def plan_folder(dataset: TokenDataset) -> Path:
    """The one packing plan beside a dataset."""
    (folder,) = dataset.folder.glob("packing-*")
    return folder


def rows_of_best_fit_decreasing(pieces: Sequence[int], capacity: int) -> int:
    """Best-fit-decreasing as the textbook has it."""
    spaces: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [space for space in spaces if space >= piece]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - piece)
    return len(spaces)


def pieces_of(sizes: Sequence[int], length: int) -> list[int]:
    """Lengths of what documents of these sizes are cut into."""
    return [min(length, size - first) for size in sizes for first in range(0, size, length)]


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    length=st.integers(1, 24),
    shard_tokens=st.integers(1, 200),
)
def test_every_token_once_and_nothing_cut_that_fits(
    packing: str, sizes: list[int], length: int, shard_tokens: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = write(Path(folder) / "d", numbered(sizes), shard_tokens, vocabulary=2000)
        view = open_view(dataset, length, packing)
        found = view.gather(np.append(np.arange(view.rows), PADDING_ROW))
        spans = [view.documents_in_row(row) for row in range(view.rows)]
    assert [array.dtype for array in found] == [np.uint16, np.bool_, np.int32]
    assert found.lengths[-1] == 0 and (found.lengths[:-1] > 0).all() and not found.starts[-1].any()
    real = np.arange(length) < found.lengths[:, None]
    assert not found.tokens[~real].any() and not found.starts[~real].any()
    assert sorted(found.tokens[real]) == list(range(1, sum(sizes) + 1))
    assert view.padding_share == pytest.approx(1 - sum(sizes) / (view.rows * length))

    first_token = np.cumsum([1, *sizes])
    for row, parts in enumerate(spans):
        column = 0
        for span in parts:
            count = span.last - span.first + 1
            assert span.tokens == sizes[span.document]
            token = first_token[span.document] + span.first
            assert found.tokens[row, column : column + count].tolist() == list(range(token, token + count))
            assert found.starts[row, column] == (span.first == 0 or column > 0)
            assert not found.starts[row, column + 1 : column + count].any()
            if packing != "end_to_end" and span.tokens <= length:
                assert count == span.tokens, "cut, though it fits a row"
            column += count
        assert column == found.lengths[row]
    if packing == "one_a_row":
        assert [len(parts) for parts in spans] == [1] * view.rows
        assert found.tokens[real].tolist() == list(range(1, sum(sizes) + 1)), "in stored order"
    if packing == "best_fit":
        assert view.rows == rows_of_best_fit_decreasing(pieces_of(sizes, length), length)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_packing_of_histograms_is_best_fit_decreasing(data: st.DataObject) -> None:
    """As many rows as piece by piece; each row holds what fits; each piece has one place, and each place one piece."""
    capacity = data.draw(st.integers(1, 60))
    counts = np.array([0, *data.draw(st.lists(st.integers(0, 9), min_size=capacity, max_size=capacity))], np.int64)
    counts[-1] += 1
    groups = best_fit_decreasing(counts, capacity)
    pieces = np.repeat(np.arange(capacity + 1), counts)
    assert sum(group.rows for group in groups) == rows_of_best_fit_decreasing(pieces.tolist(), capacity)
    rows = [[length for length, n in group.parts for _ in range(n)] for group in groups for _ in range(group.rows)]
    assert max(map(sum, rows)) <= capacity
    layout = np.concatenate(rows)
    coming = np.random.default_rng(int(counts.sum())).permutation(pieces)
    places, cut = Places(groups), len(coming) // 3
    taken = np.concatenate([places.take(coming[:cut]), places.take(coming[cut:])])
    assert sorted(taken) == list(range(len(pieces))) and np.array_equal(layout[taken], coming)


def test_little_padding_where_lengths_are_those_of_text(tmp_path: Path) -> None:
    """Under 0.1 %, not 72 %, of rows of 2048 where documents have 600 tokens on average, log-normally."""
    random = np.random.default_rng(0)
    sizes = np.maximum(1, random.lognormal(np.log(600) - 1.1**2 / 2, 1.1, 20_000)).astype(int)
    counts = np.bincount(pieces_of(sizes.tolist(), 2048), minlength=2049)
    rows = sum(group.rows for group in best_fit_decreasing(counts, 2048))
    assert 1 - sizes.sum() / (rows * 2048) < 1e-3
    assert 1 - sizes.sum() / (counts.sum() * 2048) > 0.7


@pytest.mark.parametrize("packing", PLANNED)
def test_plan_does_not_depend_on_how_it_is_worked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    """Chunks of documents and pieces, and the cut into shards, do not show in a plan."""
    documents = random_documents(np.random.default_rng(3).integers(1, 100, 200).tolist())
    content = set()
    for name, chunk, shard_tokens in (("a", 2**20, 10**6), ("b", 7, 10**6), ("c", 1, 300)):
        monkeypatch.setattr(packing_plan, "CHUNK", chunk)
        dataset = write(tmp_path / name, documents, shard_tokens)
        open_view(dataset, 32, packing)
        folder = plan_folder(dataset)
        content.add(tuple((folder / file).read_bytes() for file in ("pieces.npy", "groups.npy")))
    assert len(content) == 1


def test_continuations_do_not_join_what_stands_before_them(tmp_path: Path) -> None:
    """The rest of a long document, packed behind another, has a start of its own; alone in a row it has none."""
    dataset = write(tmp_path / "d", numbered([20, 5]), 100)
    view = open_view(dataset, 8, "best_fit")
    rows = {tuple(view.documents_in_row(row)): view.gather(np.array([row])) for row in range(view.rows)}
    assert rows[DocumentSpan(1, 0, 4, 5),].starts[0].tolist() == [True] + 7 * [False]
    for alone in (DocumentSpan(0, 8, 15, 20), DocumentSpan(0, 16, 19, 20)):
        assert not rows[alone,].starts.any()
    view = open_view(dataset, 9, "best_fit")  # 9 + 9 + 2, and 5
    (both,) = [row for row in range(view.rows) if len(view.documents_in_row(row)) == 2]
    assert view.documents_in_row(both) == [DocumentSpan(1, 0, 4, 5), DocumentSpan(0, 18, 19, 20)]
    found = view.gather(np.array([both]))
    assert found.tokens[0].tolist() == [21, 22, 23, 24, 25, 19, 20, 0, 0]
    assert np.flatnonzero(found.starts[0]).tolist() == [0, 5] and found.lengths.tolist() == [7]


@pytest.mark.parametrize("packing", PLANNED)
def test_rows_that_do_not_exist(tmp_path: Path, packing: str) -> None:
    view = open_view(write(tmp_path / "d", random_documents([10, 3]), 10), 8, packing)
    for row in (-2, view.rows):
        with pytest.raises(IndexError, match=f"there are {view.rows}"):
            view.gather(np.array([row]))
    assert view.gather(np.array([], np.int64)).tokens.shape == (0, 8)
    assert view.gather(np.array([PADDING_ROW, PADDING_ROW])).lengths.tolist() == [0, 0]


def test_a_plan_is_made_once_and_read_again(tmp_path: Path) -> None:
    dataset, told = write(tmp_path / "d", random_documents([10, 3, 40]), 10), []
    first = open_view(dataset, 8, "best_fit", lambda *progress: told.append(progress))
    assert told[-1] == ("packing rows of 8", 6, 6)
    again = open_view(TokenDataset.open(dataset.folder), 8, "best_fit", fail)
    assert plan_of(first) == plan_of(again)
    assert plan_folder(dataset).parent == dataset.folder, "it is beside the dataset"
    pieces = np.load(plan_folder(dataset) / "pieces.npy", mmap_mode="r")
    assert pieces["length"].sum() == dataset.tokens, "any NumPy user can open it"


def fail(what: str, done: int, total: int) -> NoReturn:
    raise AssertionError("a plan was made")


def plan_of(view: View) -> tuple[bytes, bytes]:
    assert isinstance(view, Planned)
    return view.plan.pieces.tobytes(), view.plan.groups.tobytes()


def test_another_dataset_in_the_same_folder_has_another_plan(tmp_path: Path) -> None:
    """A plan that was left behind is not used for it."""
    old = write(tmp_path / "old", random_documents([10, 3, 40]), 100)
    open_view(old, 8, "best_fit")
    new = write(tmp_path / "new", random_documents([5, 5, 7]), 100)
    plan_folder(old).rename(new.folder / plan_folder(old).name)
    assert open_view(new, 8, "best_fit").rows == 3
    assert len(list(new.folder.glob("packing-*"))) == 2


DAMAGE = {
    "cut short": lambda plan: (plan / "pieces.npy").write_bytes((plan / "pieces.npy").read_bytes()[:-1]),
    "missing": lambda plan: (plan / "groups.npy").unlink(),
    "half a plan.json": lambda plan: (plan / "plan.json").write_text('{"format": "jaxscale'),
    "of another purpose": lambda plan: (plan / "plan.json").write_text(
        json.dumps(json.loads((plan / "plan.json").read_text()) | {"sequence_length": 9})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    dataset = write(tmp_path / "d", random_documents([10, 3, 40]), 100)
    rows = open_view(dataset, 8, "best_fit").rows
    plan = plan_folder(dataset)
    DAMAGE[damage](plan)
    with pytest.raises(Refused, match=rf"{plan.name}: damaged packing plan .*remove the folder and it is made again"):
        open_view(dataset, 8, "best_fit")
    for file in plan.iterdir():
        file.unlink()
    plan.rmdir()
    assert open_view(dataset, 8, "best_fit").rows == rows


@contextmanager
def as_ordinary_user(owned: Path) -> Iterator[None]:
    """Root may write everywhere, so root becomes somebody else, who owns the folder `owned`."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(owned, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_plans_of_a_read_only_dataset_go_to_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        dataset, cache = write(Path(root) / "d", random_documents([10, 3, 40]), 100), Path(root) / "cache"
        cache.mkdir()
        monkeypatch.setenv("JAXSCALE_CACHE", str(cache))
        before = sorted(dataset.folder.iterdir())
        os.chmod(dataset.folder, 0o555)
        with as_ordinary_user(cache):
            view = open_view(dataset, 8, "best_fit")
            assert plan_of(open_view(dataset, 8, "best_fit", fail)) == plan_of(view)
            assert [path.name[:19] for path in (cache / "data").glob("pack*")] == ["packing-best_fit-8-"]
            os.chmod(cache / "data", 0o555)
            with pytest.raises(Fault, match=r"packing plan cannot be written.*Permission denied"):
                open_view(dataset, 16, "best_fit")
        os.chmod(dataset.folder, 0o755)
        os.chmod(cache / "data", 0o755)
        assert sorted(dataset.folder.iterdir()) == before


OPEN = """
import os, signal, sys
from pathlib import Path
from jaxscale.data import packing_plan
from jaxscale.data.packing import open_view
from jaxscale.data.store import TokenDataset
packing_plan.CHUNK = 8
told = []
def progress(what, done, total):
    told.append(done)
    if len(told) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
view = open_view(TokenDataset.open(Path(sys.argv[1])), 32, "best_fit", progress)
print(view.rows, bool(told))
"""


def many_documents(folder: Path) -> TokenDataset:
    return write(folder, random_documents(np.random.default_rng(5).integers(1, 100, 100).tolist()), 10**6)


@pytest.mark.parametrize("at", [5, 20])
def test_killed_while_planning(tmp_path: Path, at: int) -> None:
    """Half a plan has another name; who comes next clears it away, and makes the same plan."""
    undisturbed = open_view(many_documents(tmp_path / "other"), 32, "best_fit")
    dataset = many_documents(tmp_path / "d")
    killed = start(OPEN, str(dataset.folder), str(at))
    assert killed.communicate()[0] == "" and killed.returncode == -9
    assert not list(dataset.folder.glob("packing-*")) and list(dataset.folder.glob(".packing-*-*[0-9]"))
    assert plan_of(open_view(dataset, 32, "best_fit")) == plan_of(undisturbed)
    assert not list(dataset.folder.glob(".packing-*-*[0-9]"))


def test_of_several_processes_one_plans(tmp_path: Path) -> None:
    dataset = many_documents(tmp_path / "d")
    processes = [start(OPEN, str(dataset.folder), "0") for _ in range(3)]
    printed = sorted(process.communicate(timeout=60)[0] for process in processes)
    rows = open_view(dataset, 32, "best_fit", fail).rows
    assert printed == [f"{rows} False\n", f"{rows} False\n", f"{rows} True\n"]


def test_a_full_disk_is_a_fault_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "100k") as disk:
        dataset = write(disk / "d", [np.ones(10_000, int)], 10**6)
        files = sorted(dataset.folder.glob("[!.]*"))
        with pytest.raises(Fault, match=r"packing-one_a_row-.*cannot be written.*No space left"):
            open_view(dataset, 1, "one_a_row")
        assert sorted(dataset.folder.glob("[!.]*")) == files and not list(dataset.folder.glob(".packing-*-*[0-9]"))
        assert open_view(dataset, 100, "one_a_row").rows == 100


def test_positions_beyond_forty_bits(tmp_path: Path) -> None:
    """A document of more than 2^40 tokens on a sparse file, in rows of 2^22."""
    count, length = 2**40 + 100, 2**22
    dataset = write(tmp_path / "d", [np.zeros(2, int)], 10)
    with open(dataset.folder / "tokens-00000.npy", "r+b") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (count,)})
        size = file.tell() + 2 * count
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("the file system has no files of 2 TiB")
        file.seek(size - 6)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    np.save(dataset.folder / "documents-00000.npy", np.array([count - 3, count], np.uint64))
    manifest = json.loads((dataset.folder / "dataset.json").read_text()) | {"tokens": count, "documents": 2}
    manifest["shards"][0] |= {
        "tokens": count,
        "documents": 2,
        "tokens_bytes": size,
        "documents_bytes": (dataset.folder / "documents-00000.npy").stat().st_size,
    }
    (dataset.folder / "dataset.json").write_text(json.dumps(manifest))
    view = open_view(TokenDataset.open(dataset.folder), length, "best_fit")
    assert view.rows == 2**18 + 1
    (row,) = [row for row in (0, view.rows - 1) if len(view.documents_in_row(row)) == 2]
    first, second = view.documents_in_row(row)
    assert first == DocumentSpan(0, 2**40, count - 4, count - 3) and second == DocumentSpan(1, 0, 2, 3)
    found = view.gather(np.array([row]))
    assert found.tokens[0, 95:101].tolist() == [0, 0, 7, 8, 9, 0] and found.lengths.tolist() == [100]
