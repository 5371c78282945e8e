"""Real processes for tests: a script run by several processes that find each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

_END_AT_ONCE = """
import os, sys, traceback
def end(kind, error, trace):
    traceback.print_exception(error)
    os._exit(1)
sys.excepthook = end
"""

REPOSITORY = Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
    """Our own environment without what would make a child join somebody else's run, plus `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAXSCALE_", "JAX_"))}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **variables}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python on the text of a script; stdout and stderr come together through `stdout`.

    An uncaught error ends the process at once: JAX's clean-up would wait for the other processes.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _END_AT_ONCE + script, *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_together(count: int, script: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start the script in `count` processes of one run."""
    port = free_port()
    return [
        start(
            script,
            *arguments,
            JAXSCALE_COORDINATOR=f"127.0.0.1:{port}",
            JAXSCALE_PROCESSES=str(count),
            JAXSCALE_PROCESS_ID=str(index),
        )
        for index in range(count)
    ]


def run_together(count: int, script: str, *arguments: str, timeout: float = 120) -> list[str]:
    """Run the script in `count` processes of one run, all of which must exit with 0; returns what each has printed."""
    children = start_together(count, script, *arguments)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and not any(child.poll() for child in children):
        if all(child.poll() == 0 for child in children):
            break
        time.sleep(0.02)
    codes = [child.poll() for child in children]
    for child in children:
        child.kill()
    outputs = [child.communicate()[0] for child in children]
    assert codes == [0] * count, "\n".join(f"process {i}: {code}\n{outputs[i]}" for i, code in enumerate(codes))
    return outputs
