"""benchmarks/data.py is only worth something if all contestants feed the same tokens, and stand still between turns."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.data import check, missing, print_summary, race, racer, summary
from benchmarks.feed_contestants import CONTESTANTS
from benchmarks.feed_data import BATCH, SEQUENCE, complaint, describe, flat_rows, make_data, row_sums
from jaxscale.data.packing import EndToEnd
from jaxscale.data.store import TokenDataset
from tests.tiny import repository

TOKENS = 1_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("feeding")
    make_data(path, TOKENS)
    return path


def test_all_formats_hold_the_same_tokens(folder: Path) -> None:
    datasets = [TokenDataset.open(folder / "sources" / str(number)) for number in range(3)]
    for dataset in datasets:
        dataset.verify()
    views = [EndToEnd(dataset, SEQUENCE) for dataset in datasets]
    own = np.concatenate([view.gather(np.arange(view.rows)).tokens for view in views])
    assert np.array_equal(own, flat_rows(folder))
    tokens, documents = (sum(getattr(dataset, name) for dataset in datasets) for name in ("tokens", "documents"))
    assert 0.98 * TOKENS < tokens <= TOKENS and 600 < tokens / documents < 1000


@pytest.mark.parametrize("name", [name for name, contestant in CONTESTANTS.items() if not contestant.needs])
def test_contestants_feed_rows_of_the_data(name: str, folder: Path) -> None:
    contestant, rows = CONTESTANTS[name], flat_rows(folder)
    batches = list(islice(contestant.open(folder), 5))
    known = None if contestant.own_rows else set(row_sums(rows))
    assert complaint(describe(batches), known, contestant.shuffles) is None
    assert len({batch.tobytes() for batch in batches}) == 5


def test_what_is_wrong_is_told(folder: Path) -> None:
    rows = flat_rows(folder)
    known, batch = set(row_sums(rows)), rows[:BATCH].astype(np.int32)
    assert complaint(describe([batch]), known, once=True) is None
    assert "a row twice" in str(complaint(describe([batch, batch]), known, once=True))
    assert "not in the data" in str(complaint(describe([np.roll(batch, 1)]), known, once=False))
    assert complaint(describe([np.roll(batch, 1)]), None, once=False) is None
    assert "shape" in str(complaint(describe([batch[1:]]), known, once=False))
    assert "ids from 0 to 259" in str(complaint(describe([np.where(batch > 200, 259, batch)]), None, once=False))
    assert "ends of documents" in str(complaint(describe([np.where(batch > 200, 257, batch)]), None, once=False))


def test_contestants_take_turns_in_processes_that_are_stopped_between_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with racer("jaxscale", folder, sys.executable) as one:
        check(one, set(row_sums(flat_rows(folder))))
        process = psutil.Process(one.process.pid)
        one.turn(0.05)
        used = process.cpu_times()
        time.sleep(0.2)
        assert process.status() == psutil.STATUS_STOPPED and process.cpu_times() == used
        one.turn(0.05)
        with pytest.raises(SystemExit, match="jaxscale feeds something else: rows that are not in the data"):
            check(one, {0})
    assert one.process.returncode == 0 and len(one.rates) == 2

    racers = race({"bare gather": CONTESTANTS["bare gather"]}, folder, 2, 0.05, "no peers")
    (row,) = summary(racers)
    assert row["slowest"] <= row["tokens_per_second"] <= row["fastest"] and row["to_best_shuffling_peer"] is None
    assert row["to_bare_gather"] == {"median": 1, "smallest": 1, "largest": 1}
    print_summary([row])
    assert "bare gather" in capsys.readouterr().out


def test_ratios_are_taken_within_a_round(folder: Path) -> None:
    with (
        racer("bare gather", folder, sys.executable) as bare,
        racer("nanoGPT get_batch", folder, sys.executable) as peer,
    ):
        pass
    peer.contestant = CONTESTANTS["PyTorch"]
    bare.rates, peer.rates = [8.0, 4.0, 6.0], [2.0, 2.0, 1.0]
    gather, shuffling = summary([bare, peer])
    assert shuffling["to_bare_gather"] == {"median": 1 / 4, "smallest": 1 / 6, "largest": 1 / 2}
    assert gather["to_best_shuffling_peer"] == {"median": 4, "smallest": 2, "largest": 6}


def test_peers_that_are_not_installed_are_known() -> None:
    assert missing(CONTESTANTS["Streaming"], ["Torch", "numpy"]) == ["mosaicml-streaming"]
    assert missing(CONTESTANTS["Grain"], ["grain", "array-record"]) == []
    assert missing(CONTESTANTS["bare gather"], []) == []


@pytest.mark.slow
def test_the_command_races_those_that_are_installed_and_names_the_others() -> None:
    command = [sys.executable, "-m", "benchmarks.data", "--repeats", "1", "--seconds", "0.1", "--tokens", str(TOKENS)]
    done = subprocess.run([*command, "--json"], cwd=repository(), capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    raced, left_out = [row["name"] for row in report["feeding"]], report["left_out"]
    assert {*raced, *left_out} == {*CONTESTANTS} and not {*raced} & {*left_out}
    assert "jaxscale" in raced and "Grain" in raced and all(row["slowest"] > 0 for row in report["feeding"])
    assert all(f"{name}: left out" in done.stderr for name in left_out)
