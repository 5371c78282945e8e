"""The command line: exit codes, help, and the verbs that print configs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale import cli
from jaxscale.cli import main
from jaxscale.config.errors import DataExhausted, Fault, Refused, Stop, StoppedByGuard, StoppedEarly

REPOSITORY = Path(__file__).parent.parent
CONFIGS = REPOSITORY / "configs"
DECODER = CONFIGS / "tiny" / "decoder.toml"


@pytest.mark.parametrize(
    ("ending", "code"),
    [(Fault, 1), (Refused, 2), (StoppedByGuard, 3), (DataExhausted, 4), (StoppedEarly, 75)],
)
def test_exit_codes(
    ending: type[Stop], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way to end has its exit code, and its message stands on stderr, every line marked as ours."""

    def fail(*_: object) -> None:
        raise ending("first\nsecond")

    monkeypatch.setattr(cli, "load", fail)
    assert main(["train", "x.toml"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "jaxscale: first\njaxscale: second\n")


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C ends as shells expect it: 128 + SIGINT."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupt)
    assert main(["train", "x.toml"]) == 130


def test_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is not hidden: Python prints it and exits with 1."""

    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(cli, "load", fail)
    with pytest.raises(RuntimeError, match="unforeseen"):
        main(["train", "x.toml"])


def test_help_is_quick() -> None:
    """Help of every verb is there, and nothing heavy is imported for it."""
    verbs = [[], ["train"], ["eval"], ["generate"], ["plan"], ["data"], ["data", "tokenizer"], ["data", "build"]]
    verbs += [
        ["data", "inspect"],
        ["data", "verify"],
        ["data", "show"],
        ["launch", "local"],
        ["config", "show"],
        ["config", "schema"],
    ]
    script = (
        "import json, sys\nfrom jaxscale.cli import main\n"
        "codes = [main([*verb, '--help']) for verb in json.load(sys.stdin)]\n"
        "assert not any(codes) and not {'jax', 'numpy', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], input=json.dumps(verbs), cwd=REPOSITORY, text=True, check=True)


def test_config_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    """`config diff` and `config schema` print what they say, as text and as JSON."""
    assert main(["config", "diff", str(DECODER), str(CONFIGS / "tiny" / "encoder.toml"), "--json"]) == 0
    changes = {change["key"]: change["new"] for change in json.loads(capsys.readouterr().out)}
    assert changes["model.causal"] is False and changes["objective.kind"] == "masked"
    assert main(["config", "diff", str(DECODER), str(DECODER)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Config"
