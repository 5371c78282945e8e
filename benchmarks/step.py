"""Times one training step of jaxscale and of its peers on this machine's CPU.

    python -m benchmarks.step [--preset tiny|small|all] [--repeats N] [--torch-python PYTHON] [--json]
    python -m benchmarks.step --loop

Each contestant is a process of its own, which builds, compiles and warms up. Then they take turns: in every round each
of them runs a few steps while the others are blocked, so that whatever else the machine does hits all alike. Ratios are
taken within a round, over the hand-written step. All start from the same weights and see the same data, and a
contestant whose first losses are not those of the hand-written step ends the benchmark: it computes something else.

With --loop: how much time jaxscale's loop adds to its bare compiled step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.workload import PRESETS, Preset

Someone = TypeVar("Someone")

SAME_LOSS = 1e-4
"""Largest relative difference of two contestants' losses."""
QUIET_SECONDS = 0.3
"""Pause between turns, in which the threads of the one before stop spinning."""


@dataclass(frozen=True)
class Contestant:
    """A program that speaks the protocol of `workload.serve`."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    needs_torch: bool = False


CONTESTANTS = (
    Contestant("hand-written", "benchmarks.handwritten"),
    Contestant("hand-written, scanned", "benchmarks.handwritten", ("--scanned",)),
    Contestant("jaxscale", "benchmarks.jaxscale_step"),
    Contestant("jaxscale, 2 devices", "benchmarks.jaxscale_step", ("--devices", "2")),
    Contestant("PyTorch, eager", "benchmarks.pytorch_step", needs_torch=True),
    Contestant("PyTorch, compiled", "benchmarks.pytorch_step", ("--compiled",), needs_torch=True),
)
"""The first is what the others are compared with."""


@dataclass
class Racer:
    """A contestant's running process and its times so far."""

    name: str
    process: subprocess.Popen[str]
    start_seconds: float
    losses: list[float]
    versions: dict[str, str]
    seconds: list[float] = field(default_factory=list)
    """Of one step, in each round."""

    def turn(self, steps: int) -> None:
        """Runs and times some steps."""
        self.seconds.append(float(self.ask(f"{steps}\n")) / steps)

    def ask(self, request: str) -> str:
        """Sends a request and waits for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(request)
        self.process.stdin.flush()
        return answer(self.process, self.name)


def answer(process: subprocess.Popen[str], name: str) -> str:
    """The next line that a contestant prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{name}: ended with exit code {process.wait()}; its messages are above")
    return line


@contextmanager
def racer(contestant: Contestant, preset: str, python: str) -> Iterator[Racer]:
    """A contestant, warmed up and waiting for its first turn."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [python, "-m", contestant.module, "--preset", preset, *contestant.options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**environment, "JAX_PLATFORMS": "cpu"},
    )
    try:
        ready = json.loads(answer(process, contestant.name))
        yield Racer(contestant.name, process, time.perf_counter() - begin, ready["losses"], ready["versions"])
    finally:
        process.kill()
        process.wait()


def turns(racers: Sequence[Someone], rounds: int, pause: float) -> Iterator[Someone]:
    """Each racer once in every round, after a pause (seconds); nobody always follows the same neighbour's mess."""
    for number in range(rounds):
        first = number % len(racers)
        for each in [*racers[first:], *racers[:first]]:
            time.sleep(pause)
            yield each


def race(preset: str, repeats: int, torch_python: str | None) -> list[Racer]:
    """All contestants that can run here, with their times in every round."""
    steps = PRESETS[preset].steps
    with ExitStack() as stack:
        racers: list[Racer] = []
        for contestant in CONTESTANTS:
            python = torch_python if contestant.needs_torch else sys.executable
            if python is not None:
                racers.append(stack.enter_context(racer(contestant, preset, python)))
                check_losses(racers[0], racers[-1])
        for each in turns(racers, repeats, QUIET_SECONDS):
            each.turn(steps)
    return racers


def check_losses(base: Racer, other: Racer) -> None:
    """Ends the benchmark if two contestants do not compute the same."""
    for ours, theirs in zip(base.losses, other.losses, strict=True):
        if abs(ours - theirs) > SAME_LOSS * abs(ours):
            raise SystemExit(f"{other.name} computes something else: losses {other.losses}, not {base.losses}")


def summary(preset: Preset, racers: Sequence[Racer]) -> list[dict[str, Any]]:
    """Tokens a second and ratios of each contestant."""
    base = racers[0].seconds

    def row(racer: Racer) -> dict[str, Any]:
        ratios = sorted(theirs / ours for theirs, ours in zip(base, racer.seconds, strict=True))
        return {
            "name": racer.name,
            "tokens_per_second": preset.tokens / statistics.median(racer.seconds),
            "slowest": preset.tokens / max(racer.seconds),
            "fastest": preset.tokens / min(racer.seconds),
            "ratio": statistics.median(ratios),
            "smallest_ratio": ratios[0],
            "largest_ratio": ratios[-1],
            "start_seconds": racer.start_seconds,
            "versions": racer.versions,
        }

    return [row(racer) for racer in racers]


def print_summary(preset: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table for people."""
    shape = PRESETS[preset]
    print(
        f"{preset}: embed {shape.embed}, {shape.layers} layers, {shape.heads} heads, SwiGLU {shape.mlp}, vocabulary "
        f"{shape.vocabulary}, sequence {shape.sequence}, batch {shape.batch}, float32"
    )
    print(f"{'':<22}{'tokens/s':>10}{'slowest':>10}{'fastest':>10}{'ratio':>8}{'from':>7}{'to':>7}{'start s':>8}")
    for row in rows:
        print(
            f"{row['name']:<22}{row['tokens_per_second']:>10,.0f}{row['slowest']:>10,.0f}{row['fastest']:>10,.0f}"
            f"{row['ratio']:>8.2f}{row['smallest_ratio']:>7.2f}{row['largest_ratio']:>7.2f}{row['start_seconds']:>8.1f}"
        )


def find_torch() -> str | None:
    """This interpreter, if torch is installed beside it."""
    return sys.executable if importlib.util.find_spec("torch") else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=[*PRESETS, "all"], default="tiny")
    parser.add_argument("--repeats", type=int, default=8, help="rounds")
    parser.add_argument("--torch-python", default=find_torch(), help="a Python that has torch, for the PyTorch peers")
    parser.add_argument("--loop", action="store_true", help="time jaxscale's loop against its bare compiled step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    presets = list(PRESETS) if options.preset == "all" else [options.preset]

    report: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    if options.loop:
        from benchmarks.loop import measure

        report["loop"] = measure(options.repeats)
    else:
        for preset in presets:
            report[preset] = summary(PRESETS[preset], race(preset, options.repeats, options.torch_python))
    if options.json:
        print(json.dumps(report))
    elif options.loop:
        print("loop: {with_loop:.4f} s a step, {bare:.4f} s bare: {overhead:+.2%}".format(**report["loop"]))
    else:
        for preset in presets:
            print_summary(preset, report[preset])


if __name__ == "__main__":
    main()
