"""Phases and mixtures in real runs: what is fed is what the order says, over kills, processes and changes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxscale.config.load import load
from jaxscale.config.phases import Phase, phases_of
from tests.command import CONFIG, Workplace, finish, numbers, wait_for

MIXTURE = (
    "data.build=none",
    "data.train.code.path=datasets/tiny/validation",
    "data.train.code.weight=0.3",
    "data.train.web.path=datasets/tiny/train",
    "data.train.web.weight=0.7",
)
PHASES = (
    "phases=[{start=5,global_size=16,sequence_length=16},{start=9,weights={web=1.0}},{start=11,sequence_length=32}]"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with datasets, in which the run "whole" went over phases of a mixture undisturbed."""
    place = Workplace(tmp_path_factory.mktemp("phases"))
    finish(place.start("data", "build", str(CONFIG)), 0)
    output = place.train("whole", *MIXTURE, PHASES)
    assert "from step 1: 8 x 32 tokens; code 30.000%, web 70.000% (draws of 10)" in output
    assert "from step 6: 16 x 16 tokens" in output and "from step 10: 16 x 16 tokens; code 0.000%, web 100" in output
    return place


def show(place: Workplace, name: str, step: int, *overrides: str) -> dict[str, Any]:
    """The facts of `data show`."""
    arguments = (str(CONFIG), *place.always, f"name={name}", "--step", str(step), "--json", *overrides)
    return dict(json.loads(finish(place.start("data", "show", *arguments), 0)))


def test_lines_count_over_phases_and_show_names_the_batch(place: Workplace) -> None:
    lines = place.metrics("whole")
    sizes = [(8, 32)] * 5 + [(16, 16)] * 6 + [(16, 32)] * 5
    for number, line in enumerate(lines):
        assert line["examples"] == sum(rows for rows, _ in sizes[: number + 1])
        assert line["tokens"] == sum(rows * length for rows, length in sizes[: number + 1])
    for step in (1, 5, 6, 10, 16):
        facts = show(place, "whole", step, *MIXTURE, PHASES)
        assert facts["batch_digest"] == lines[step - 1]["batch_digest"]
        assert {row["source"] for row in facts["rows"]} == ({"web"} if step >= 10 else {"web", "code"})
        assert (facts["global_batch"], facts["sequence_length"]) == sizes[step - 1]
    assert show(place, "whole", 10**9, *MIXTURE, PHASES)["cursor"] > 10**9


def test_kills_and_processes_do_not_appear(place: Workplace) -> None:
    """Killed in the first phase and in the second, gone on with by two processes, and by one."""
    for seen in (2, 7):
        process = place.start_training("killed", *MIXTURE, PHASES, "checkpoint.every_steps=1")
        wait_for(lambda seen=seen: place.steps_done("killed") > seen, process)
        time.sleep(0.02)
        process.kill()
        process.communicate()
    place.train("killed", *MIXTURE, PHASES, "train.steps=12", "cluster.simulate=1", processes=2)
    place.train("killed", *MIXTURE, PHASES)
    for mine, whole in zip(place.metrics("killed"), place.metrics("whole"), strict=True):
        assert mine["batch_digest"] == whole["batch_digest"]
        assert (mine["examples"], mine["tokens"]) == (whole["examples"], whole["tokens"])
        if mine["step"] > 12:
            assert mine["loss"] == pytest.approx(whole["loss"], rel=2e-5)


def test_a_changed_batch_appends_a_phase_if_told(place: Workplace) -> None:
    place.train("grown", *MIXTURE, "train.steps=4")
    refusal = place.train("grown", *MIXTURE, "train.steps=6", "batch.global_size=24", code=2)
    assert "batch.global_size = 24, was 8" in refusal and "data.accept_change=true" in refusal
    told = ("batch.global_size=24", "data.accept_change=true")
    assert "from step 5: 24 x 32 tokens" in place.train("grown", *MIXTURE, "train.steps=6", *told)
    # Once told it is part of the run: the same config goes on without being told again, and `show` knows its past.
    place.train("grown", *MIXTURE, "train.steps=8", "batch.global_size=24")
    lines = place.metrics("grown")
    assert [line["examples"] for line in lines] == [8, 16, 24, 32, 56, 80, 104, 128]
    for step in (4, 5, 8):
        facts = show(place, "grown", step, *MIXTURE, "batch.global_size=24")
        assert facts["batch_digest"] == lines[step - 1]["batch_digest"]
    # The rows that follow are those that would have followed.
    place.train("small", *MIXTURE, "train.steps=16")
    grown = [row for step in (5, 6) for row in show(place, "grown", step, *MIXTURE, "batch.global_size=24")["rows"]]
    small = [row for step in range(5, 11) for row in show(place, "small", step, *MIXTURE)["rows"]]
    assert [(row["source"], row["dataset_row"]) for row in grown] == [(r["source"], r["dataset_row"]) for r in small]


def test_starts_count_the_updates_that_a_changed_run_has_really_done() -> None:
    """Three updates of 8, then 16: a phase at update 6 begins after three more; one that is behind holds at once."""
    overrides = ["batch.global_size=16", "data.sequence_length=32", "schedule.warmup=0"]
    config = load(CONFIG, [*overrides, "phases=[{start=2,microbatch=4},{start=6,sequence_length=16}]"])
    assert phases_of(config, [Phase(0, 8, 32)], cursor=24) == (
        Phase(0, 8, 32),
        Phase(24, 16, 32, microbatch=4),
        Phase(24 + 3 * 16, 16, 16, microbatch=4),
    )


def test_data_that_end_before_the_first_update_are_told_at_once(place: Workplace) -> None:
    output = place.train("nothing", *MIXTURE, "data.train.code.max_epochs=1e-9", "data.train.code.weight=1", code=4)
    assert "code has had its max_epochs = 1e-09 after step 0 of 16" in output and "Traceback" not in output


def test_skips_may_be_added_ahead(place: Workplace) -> None:
    place.train("skips", *MIXTURE, "train.steps=4")
    skip = "data.skip=[{{sequence_length=32,first={},end=60}}]"
    assert "at least 32" in place.train("skips", *MIXTURE, "train.steps=6", skip.format(31), code=2)
    place.train("skips", *MIXTURE, "train.steps=6", skip.format(40))
    assert "put it back" in place.train("skips", *MIXTURE, "train.steps=8", code=2)
    rows = [row["dataset_row"] for row in show(place, "skips", 6, *MIXTURE, skip.format(40))["rows"]]
    expected = [row["dataset_row"] for step in (8, 9) for row in show(place, "none", step, *MIXTURE)["rows"]][4:12]
    assert rows == expected


def test_exhausted_data_end_the_run(place: Workplace) -> None:
    """code has 10 draws of 100: a hundredth of its rows is soon drawn."""
    limited = (*MIXTURE, "data.train.code.max_epochs=0.01", "checkpoint.every_steps=50")
    output = place.train("limited", *limited, "train.steps=2000", code=4)
    last = place.steps_done("limited")
    assert f"code has had its max_epochs = 0.01 after step {last:,} of 2,000" in output and 0 < last < 2000
    assert place.checkpoints("limited")[-1] == last
    assert f"after step {last:,} of 2,000" in place.train("limited", *limited, "train.steps=2000", code=4)
    told = ("data.when_exhausted=renormalize", "data.accept_change=true")
    place.train("limited", *limited, f"train.steps={last + 5}", *told)
    assert {row["source"] for row in show(place, "limited", last + 5, *limited, *told)["rows"]} == {"web"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            (*MIXTURE, "phases=[{start=5,weights={wed=1}}]"),
            "phases.0.weights.wed: is no source of data.train; it has: code, web",
        ),
        (
            ("phases=[{start=0,global_size=4}]",),
            "phases.0.start = 0: must be after the start of the phase before; at least 1",
        ),
        (("phases=[{start='1000 tokens'}]",), "nearest: 1024 tokens"),
        (("phases=[{start='1 epoch'}]",), "must be in updates or tokens"),
        ((*MIXTURE, "train.steps=none", "train.epochs=1"), "epochs are for one dataset without phases"),
        ((*MIXTURE, "data.train.web.weight=0", "data.train.code.weight=0"), "all weights are 0"),
        (
            ("phases=[{start=5,global_size=10,microbatch=4}]",),
            "phases.0.microbatch = 4: must divide phases.0.global_size = 10",
        ),
        (("data.skip=[{sequence_length=32,first=5,end=5}]",), "data.skip.0.end = 5: must be above first = 5"),
        (
            ("data.skip=[{sequence_length=31,first=5,end=6}]",),
            "no part of the run has rows of this length; nearest: 32",
        ),
        (("phases=[{start=5}]",), "phases.0: changes nothing"),
        (("phases.0.start=5",), "a list is written whole, such as phases=["),
        (("data.skip=[{sequence_length=32,first=0,end=99999999999999999999}]",), "data.skip.0.end"),
        (("data.train.web.path=x",), "data.build: builds one dataset, but data.train is a mixture"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], says: str, tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    assert says in finish(place.start("config", "show", str(CONFIG), *place.always, *overrides), 2)


def test_two_runs_of_one_mixture_are_equal(place: Workplace) -> None:
    place.train("again", *MIXTURE, PHASES)
    assert [numbers(line) for line in place.metrics("again")] == [numbers(line) for line in place.metrics("whole")]
