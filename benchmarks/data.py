"""Times how fast jaxscale and its peers feed batches of tokens to this machine's CPU.

    python -m benchmarks.data [--repeats N] [--python PYTHON_WITH_PEERS] [--json]

All feed the same tokens, which are made first and stay in the page cache, as batches of 64 rows of 2048 on the host.
Each contestant is a process of its own, which opens its data and warms up. Then they take turns: in every round each of
them feeds for a while and the others are stopped, read-ahead and all, so that whatever else the machine does hits all
alike. Ratios are taken within a round. A contestant whose first batches are not rows of the data ends the benchmark.

The peers are PyTorch, MosaicML Streaming and Grain over ArrayRecord (`pip install torch mosaicml-streaming grain
array_record`); those that the Python of `--python` lacks are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.feed_contestants import CONTESTANTS, Contestant
from benchmarks.feed_data import BATCH, BATCH_TOKENS, SEQUENCE, complaint, flat_rows, make_data, row_sums
from benchmarks.step import answer, turns

QUIET_SECONDS = 0.1
"""Pause between turns."""
END_SECONDS = 10
"""What a contestant may take to end its own processes before they are killed."""
PACKAGES = "import importlib.metadata, json; print(json.dumps([d.name for d in importlib.metadata.distributions()]))"


@dataclass
class Racer:
    """A contestant's running process and its rates so far."""

    name: str
    contestant: Contestant
    process: subprocess.Popen[str]
    start_seconds: float
    batches: list[dict[str, Any]]
    """What its first batches are like."""
    versions: dict[str, str]
    rates: list[float] = field(default_factory=list)
    """Tokens a second, in each round."""

    def turn(self, seconds: float) -> None:
        """Feeds for a while."""
        with awake(self.process):
            assert self.process.stdin is not None
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.flush()
            self.rates.append(float(answer(self.process, self.name)) * BATCH_TOKENS)


@contextmanager
def awake(process: subprocess.Popen[str]) -> Iterator[None]:
    """Lets a stopped process and its children run."""
    os.killpg(process.pid, signal.SIGCONT)
    yield
    os.killpg(process.pid, signal.SIGSTOP)


@contextmanager
def racer(name: str, folder: Path, python: str) -> Iterator[Racer]:
    """A contestant, warmed up and stopped until its first turn."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [python, "-m", "benchmarks.feed_contestants", name, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        process_group=0,  # its own, with its children; should this process die, the system wakes and ends them
    )
    try:
        ready = json.loads(answer(process, name))
        seconds = time.perf_counter() - begin
        os.killpg(process.pid, signal.SIGSTOP)
        yield Racer(name, CONTESTANTS[name], process, seconds, ready["batches"], ready["versions"])
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a contestant: by itself, which removes what it shares with its children, or else by force."""
    assert process.stdin is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def race(
    contestants: Mapping[str, Contestant], folder: Path, repeats: int, seconds: float, peers_python: str
) -> list[Racer]:
    """These contestants, with their rates in every round of turns of so many seconds."""
    known = set(row_sums(flat_rows(folder)))
    with ExitStack() as stack:
        racers = []
        for name, contestant in contestants.items():
            python = peers_python if contestant.peer else sys.executable
            racers.append(stack.enter_context(racer(name, folder, python)))
            check(racers[-1], known)
        for each in turns(racers, repeats, QUIET_SECONDS):
            each.turn(seconds)
    return racers


def check(racer: Racer, known: set[int]) -> None:
    """Ends the benchmark if a contestant's first batches are not of the data, whose rows have these checksums."""
    contestant = racer.contestant
    wrong = complaint(racer.batches, None if contestant.own_rows else known, contestant.shuffles)
    if wrong:
        raise SystemExit(f"{racer.name} feeds something else: {wrong}")


def missing(contestant: Contestant, packages: Sequence[str]) -> list[str]:
    """What a contestant needs and is not among these installed packages."""
    there = {plain(package) for package in packages}
    return [package for package in contestant.needs if plain(package) not in there]


def plain(package: str) -> str:
    """A package's name, spelled in one way."""
    return package.lower().replace("_", "-")


def summary(racers: Sequence[Racer]) -> list[dict[str, Any]]:
    """Tokens a second of each contestant, and its ratios to the bare gather and to the best peer that shuffles."""
    gather = racers[0].rates
    shuffling = [racer.rates for racer in racers if racer.contestant.peer and racer.contestant.shuffles]
    best_peer = [max(rates) for rates in zip(*shuffling, strict=True)]

    def ratios(rates: Sequence[float], base: Sequence[float]) -> dict[str, float] | None:
        if not base:
            return None
        found = sorted(ours / theirs for ours, theirs in zip(rates, base, strict=True))
        return {"median": statistics.median(found), "smallest": found[0], "largest": found[-1]}

    return [
        {
            "name": racer.name,
            "shuffles": racer.contestant.shuffles,
            "tokens_per_second": statistics.median(racer.rates),
            "slowest": min(racer.rates),
            "fastest": max(racer.rates),
            "to_bare_gather": ratios(racer.rates, gather),
            "to_best_shuffling_peer": ratios(racer.rates, best_peer),
            "start_seconds": racer.start_seconds,
            "versions": racer.versions,
        }
        for racer in racers
    ]


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """A table for people."""
    print(f"batches of {BATCH} x {SEQUENCE}; million tokens/s; ratios within a round: median (smallest to largest)")
    print(f"{'':<22}{'tokens/s':>9}{'slowest':>9}{'fastest':>9}{'to bare gather':>26}{'to best shuffling peer':>26}")
    for row in rows:
        numbers = "".join(f"{row[name] / 1e6:>9,.1f}" for name in ("tokens_per_second", "slowest", "fastest"))
        gather, peer = ratio_text(row["to_bare_gather"]), ratio_text(row["to_best_shuffling_peer"])
        print(f"{row['name']:<22}{numbers}{gather:>26}{peer:>26}{'  shuffles' if row['shuffles'] else ''}".rstrip())


def ratio_text(ratio: dict[str, float] | None) -> str:
    """A ratio and its spread."""
    return "-" if ratio is None else "{median:.2g} ({smallest:.2g} to {largest:.2g})".format(**ratio)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8, help="rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn")
    parser.add_argument("--tokens", type=int, default=300_000_000, help="of the data, about")
    parser.add_argument("--python", default=sys.executable, help="a Python that has the peers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    packages = json.loads(subprocess.run([options.python, "-c", PACKAGES], stdout=-1, check=True).stdout)
    absent = {name: lacks for name, each in CONTESTANTS.items() if each.peer and (lacks := missing(each, packages))}
    for name, lacks in absent.items():
        print(f"{name}: left out, {options.python} has no {' and no '.join(lacks)}", file=sys.stderr)
    contestants = {name: each for name, each in CONTESTANTS.items() if name not in absent}
    with tempfile.TemporaryDirectory(prefix="jaxscale-feeding-") as temporary:
        make_data(Path(temporary), options.tokens)
        rows = summary(race(contestants, Path(temporary), options.repeats, options.seconds, options.python))
    if options.json:
        report = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "feeding": rows}
        print(json.dumps({**report, "left_out": absent}))
    else:
        print_summary(rows)


if __name__ == "__main__":
    main()
