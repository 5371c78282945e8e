"""Run one command in several processes on this machine: their output told apart, none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from jaxscale.config.errors import DataExhausted, StoppedByGuard, StoppedEarly

GRACE_SECONDS = 4.0
TAIL_LINES = 30
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

# Endings that all processes have agreed on, so the first to end need not end the others.
_AGREED_ENDINGS = (0, StoppedByGuard.exit_code, DataExhausted.exit_code, StoppedEarly.exit_code)


@dataclass(frozen=True)
class Command:
    """One process to start: its arguments, variables on top of our own environment, and the file of its output."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def run(config_path: Path, overrides: Sequence[str], processes: int, logs: Path) -> int:
    """`jaxscale train CONFIG key=value ...` in `processes` processes that find each other; returns the exit code.

    The output of process i also goes to `logs`/process-i.log. See `supervise` for the rest.
    """
    port = _free_port()
    arguments = (sys.executable, "-m", "jaxscale", "train", str(config_path), *overrides)
    commands = [
        Command(
            arguments,
            {
                "JAXSCALE_COORDINATOR": f"127.0.0.1:{port}",
                "JAXSCALE_PROCESSES": str(processes),
                "JAXSCALE_PROCESS_ID": str(index),
                "JAXSCALE_LOCAL_PROCESSES": str(processes),
                "JAXSCALE_LOCAL_PROCESS_ID": str(index),
                "PYTHONUNBUFFERED": "1",
            },
            logs / f"process-{index}.log",
        )
        for index in range(processes)
    ]
    return supervise(commands)


def supervise(commands: Sequence[Command], output: TextIO | None = None) -> int:
    """Run the commands side by side until all have ended, and return the exit code of the run.

    Each line of output is shown (on `output`, default stdout) behind its process's index and kept in its log. If one
    process fails, the others are ended within five seconds (SIGTERM, then SIGKILL), the end of its log is shown, and
    its exit code is returned; 128 + signal if it was killed. Endings that are no failure of one process (stopped early,
    by a guard, or out of data) are waited for in all. SIGTERM, SIGUSR1 and SIGINT are passed on.
    """
    shown = sys.stdout if output is None else output
    children: list[subprocess.Popen[bytes]] = []
    printers: list[threading.Thread] = []
    with _signals_passed_on(children):
        try:
            for index, command in enumerate(commands):
                children.append(_spawn(command))
                printers.append(
                    threading.Thread(target=_copy_lines, args=(children[-1], index, command.log, shown), daemon=True)
                )
            for printer in printers:
                printer.start()
            failed = _first_failure(children)
        finally:
            _end(children)
    for printer in printers:
        printer.join(timeout=1.0)
    if failed is None:
        return max(child.returncode for child in children)
    code = _exit_code(children[failed].returncode)
    print(f"process {failed} ended with exit code {code}; the end of {commands[failed].log}:", file=shown)
    for line in commands[failed].log.read_text(errors="replace").splitlines()[-TAIL_LINES:]:
        print(f"    {line}", file=shown)
    return code


def _spawn(command: Command) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a process group of its own, so that what it starts can be ended with it."""
    command.log.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        command.arguments,
        env={**os.environ, **command.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """In the child: have Linux kill it if we are killed in a way that leaves us no time to do so (prctl(2))."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _copy_lines(child: subprocess.Popen[bytes], index: int, log: Path, shown: TextIO) -> None:
    """Write each line of a process to its log and, behind its index, to `shown`."""
    assert child.stdout is not None
    with log.open("wb", buffering=0) as file:
        for line in child.stdout:
            file.write(line)
            with contextlib.suppress(BrokenPipeError):  # the log goes on where nobody looks any more
                shown.write(f"[{index}] {line.decode(errors='replace')}")
                shown.flush()


def _first_failure(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all processes have ended in good order (None) or one has failed (its index)."""
    while True:
        codes = [child.poll() for child in children]
        for index, code in enumerate(codes):
            if code is not None and code not in _AGREED_ENDINGS:
                return index
        if None not in codes:
            return None
        time.sleep(_POLL_SECONDS)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, and everything that it has started."""
    _signal_groups(children, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(_POLL_SECONDS)
    _signal_groups(children, signal.SIGKILL)
    for child in children:
        child.wait()


def _signal_groups(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the process group of each child; a group that is gone is no matter."""
    for child in children:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            continue


@contextlib.contextmanager
def _signals_passed_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Inside the block, signals that ask us to stop go to the children, whose ends then end us."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _exit_code(returncode: int) -> int:
    """A shell's form of a process's end: 128 + signal for a killed one."""
    return 128 - returncode if returncode < 0 else returncode


def _free_port() -> int:
    """A port of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
