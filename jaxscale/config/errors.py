"""The ways a verb can end other than well, each with the exit code that scripts rely on."""

from __future__ import annotations

import json


class Stop(Exception):
    """Ends a verb: the command line prints the message, without a traceback, and exits with `exit_code`."""

    exit_code = 1


class Fault(Stop):
    """Something broke while working (a dead worker, a full disk): exit code 1."""


class Refused(Stop):
    """What was asked cannot be right: exit code 2, before any work.

    The message names the key or file, its value, what is allowed, and the nearest valid spelling or number.
    """

    exit_code = 2


class StoppedByGuard(Stop):
    """A guard ended the run (non-finite loss, spike, replicas that differ): exit code 3."""

    exit_code = 3


class DataExhausted(Stop):
    """The dataset ended before the run: exit code 4."""

    exit_code = 4


class StoppedEarly(Stop):
    """Stopped with a complete checkpoint; the same command continues the run: exit code 75."""

    exit_code = 75


class WrongValue(Refused):
    """A value of the config that cannot be right; knows its dotted key, so that the file and line can be told."""

    def __init__(self, key: str, value: object, complaint: str) -> None:
        """`complaint` says what is allowed and what is nearest; a `value` of None is not shown."""
        shown = "" if value is None else f" = {json.dumps(value, default=str, ensure_ascii=False)}"
        super().__init__(f"{key}{shown}: {complaint}")
        self.key = key
