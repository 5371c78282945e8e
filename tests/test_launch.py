"""Several processes on one machine: told apart, ended together, none left behind."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from pathlib import Path

from jaxscale.launch.local import Command, run, supervise
from tests.processes import start


def commands(folder: Path, *scripts: str) -> list[Command]:
    """One process for each script; each first writes its process id to `folder`/pid-INDEX."""
    begin = (
        f"import os, signal, sys, time\nfrom pathlib import Path\npid = Path(r'{folder}/pid-' + os.environ['INDEX'])\n"
    )
    return [
        Command(
            (
                sys.executable,
                "-u",
                "-c",
                f"{begin}pid.write_text(str(os.getpid()))\n{script}",
            ),
            {"INDEX": str(index)},
            folder / "logs" / f"process-{index}.log",
        )
        for index, script in enumerate(scripts)
    ]


def supervised(folder: Path, *scripts: str) -> tuple[int, str, float]:
    """Exit code, what was shown, and seconds of `supervise`."""
    shown = io.StringIO()
    began = time.monotonic()
    code = supervise(commands(folder, *scripts), shown)
    return code, shown.getvalue(), time.monotonic() - began


def is_running(process: int) -> bool:
    """Whether a process runs; one that ended but was not yet waited for (Z) does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def nothing_is_left(folder: Path) -> bool:
    """Whether every process that wrote its id is gone."""
    return not any(is_running(int(path.read_text())) for path in folder.glob("pid-*"))


def test_output_is_told_apart(tmp_path: Path) -> None:
    script = "print('hello from', os.environ['INDEX']); print('error', file=sys.stderr)"
    code, shown, _ = supervised(tmp_path, script, script)
    assert code == 0
    assert sorted(shown.splitlines()) == ["[0] error", "[0] hello from 0", "[1] error", "[1] hello from 1"]
    assert (tmp_path / "logs" / "process-1.log").read_text() == "hello from 1\nerror\n"


def test_first_failure_ends_the_others(tmp_path: Path) -> None:
    fail = "time.sleep(0.3); print('the reason'); sys.exit(4 + 3)"
    code, shown, seconds = supervised(tmp_path, "time.sleep(60)", fail, "time.sleep(60)")
    assert code == 7
    assert seconds < 5
    end = shown[shown.index("process 1 ended with exit code 7") :]
    assert "process-1.log:\n    the reason\n" in end
    assert nothing_is_left(tmp_path)


def test_stubborn_processes_are_killed_within_five_seconds(tmp_path: Path) -> None:
    """Also one that ignores SIGTERM, and what it has started itself."""
    stubborn = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = os.fork()\nif child: Path(r'{tmp_path}/pid-child').write_text(str(child))\n"
        "time.sleep(60)"
    )
    code, _, seconds = supervised(tmp_path, stubborn, "time.sleep(1); sys.exit(1)")
    assert code == 1
    assert seconds < 1 + 5 + 2  # two interpreters start first, which a busy machine takes a moment for
    assert nothing_is_left(tmp_path)


def test_killed_process_gives_128_plus_signal(tmp_path: Path) -> None:
    code, shown, _ = supervised(tmp_path, "time.sleep(60)", "os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 128 + signal.SIGKILL
    assert "process 1 ended with exit code 137" in shown


def test_stopped_early_is_waited_for_in_all(tmp_path: Path) -> None:
    """The first that ends with 75 must not cut short what process 0 still writes."""
    code, shown, _ = supervised(tmp_path, "time.sleep(1); print('report written'); sys.exit(75)", "sys.exit(75)")
    assert code == 75
    assert "report written" in shown
    assert "ended with" not in shown


LAUNCHER = """
import sys
from pathlib import Path
from tests.test_launch import commands, supervise
sys.exit(supervise(commands(Path({folder!r}), *[{script!r}] * 2)))
"""


def launched(folder: Path, script: str):
    """A launcher in a process of its own, once its two processes run."""
    child = start(LAUNCHER.format(folder=str(folder), script=script))
    deadline = time.monotonic() + 20
    while len(list(folder.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return child


def test_signals_are_passed_on(tmp_path: Path) -> None:
    ready = f"Path(r'{tmp_path}/ready-' + os.environ['INDEX']).touch(); time.sleep(60)"
    stop = "signal.signal(signal.{0}, lambda *_: (time.sleep(0.2), sys.exit(75)))\n"
    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        for path in tmp_path.glob("ready-*"):
            path.unlink()
        launcher = launched(tmp_path, stop.format(name) + ready)
        launcher.send_signal(getattr(signal, name))
        launcher.communicate(timeout=20)
        assert launcher.returncode == 75
        assert nothing_is_left(tmp_path)


def test_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    launcher = launched(tmp_path, f"Path(r'{tmp_path}/ready-' + os.environ['INDEX']).touch(); time.sleep(60)")
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=20)
    deadline = time.monotonic() + 5
    while not nothing_is_left(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_run_refuses_a_bad_config_like_train_does(tmp_path: Path, capsys) -> None:
    assert run(tmp_path / "missing.toml", [], 2, tmp_path / "logs") == 2
    assert "missing.toml" in capsys.readouterr().out
