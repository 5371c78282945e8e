"""Hosts that pass files on in a tree, so that one of them reads the file server for all.

Each host serves the files that it has finished over HTTP to the few hosts below it, and asks the one above it for its
own. Who asks must know the dataset's fingerprint, so nobody gets what they may not read anyway. Nothing relies on the
tree: whoever receives a file verifies it, and reads from the source what the host above does not give.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

BRANCHES = 2
"""Hosts directly below each one."""
PORT = 47391
"""Where a host serves if it does not say."""
PATIENCE = 60.0
"""Seconds after which a host above that does not answer, or hosts below that do not ask, are given up."""
PAUSE = 0.1
"""Seconds between two questions for a file that is not there yet."""


@dataclass(frozen=True)
class Tree:
    """All hosts that stage one dataset at the same time."""

    hosts: Sequence[str]
    """NAME or NAME:PORT of each; the same on all of them."""
    index: int
    """Which of them this one is; 0 reads the source."""

    @property
    def above(self) -> str | None:
        """The host that this one asks."""
        return self.hosts[(self.index - 1) // BRANCHES] if self.index else None

    @property
    def below(self) -> set[int]:
        """Indices of the hosts that ask this one."""
        first = self.index * BRANCHES + 1
        return set(range(first, min(first + BRANCHES, len(self.hosts))))


ALONE = Tree(("",), 0)
"""A host that reads for itself and serves nobody."""


class Above:
    """The host above this one, for as long as it answers."""

    def __init__(self, tree: Tree, fingerprint: str) -> None:
        self._tree, self._fingerprint = tree, fingerprint
        self._deadline = time.monotonic() + PATIENCE

    def open(self, name: str) -> HTTPResponse | None:
        """The content of a file, as soon as the host above has it; None if it does not answer."""
        while self._tree.above and time.monotonic() < self._deadline:
            with suppress(OSError, HTTPException):
                response = self._ask("GET", name)
                if response.status == 200:
                    return response
                response.close()
            time.sleep(PAUSE)
        return None

    def say_done(self) -> None:
        """Tell it that this host needs nothing more."""
        if self._tree.above and time.monotonic() < self._deadline:
            with suppress(OSError, HTTPException):
                self._ask("POST", str(self._tree.index)).close()

    def _ask(self, verb: str, name: str) -> HTTPResponse:
        host, _, port = str(self._tree.above).partition(":")
        connection = HTTPConnection(host, int(port or PORT), timeout=PATIENCE)
        connection.request(verb, f"/{self._fingerprint}/{quote(name)}")
        response = connection.getresponse()
        if response.status != 404:  # which is another dataset's, that will not come to an end for us
            self._deadline = time.monotonic() + PATIENCE
        return response


@contextmanager
def served(tree: Tree, fingerprint: str, folders: Sequence[Path], names: Sequence[str]) -> Iterator[None]:
    """Serve files of these names, in whichever of `folders` they are, until the block and the hosts below are done."""
    server = None
    with suppress(OSError):  # another process of this host serves already
        server = _Server(tree, fingerprint, folders, frozenset(names)) if tree.below else None
    if server is None:
        yield
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
        while server.waiting_for and time.monotonic() < server.asked_at + PATIENCE:
            time.sleep(PAUSE)
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """Serves the finished files of one dataset."""

    def __init__(self, tree: Tree, fingerprint: str, folders: Sequence[Path], names: frozenset[str]) -> None:
        self.fingerprint, self.folders, self.names = fingerprint, folders, names
        self.waiting_for = tree.below
        self.asked_at = time.monotonic()
        super().__init__(("", int(tree.hosts[tree.index].partition(":")[2] or PORT)), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A host that goes away while it is being answered is nobody's concern here."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one question: GET /FINGERPRINT/FILE, or POST /FINGERPRINT/INDEX from a host that is done."""

    server: _Server

    def do_GET(self) -> None:
        """200 and the content of a file, or 503: it is not there yet."""
        if (name := self._name()) is None:
            return
        for folder in self.server.folders:
            with suppress(FileNotFoundError), open(folder / name, "rb") as file:
                self.send_response(200)
                self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
                self.end_headers()
                self.connection.sendfile(file)
                return
        self._answer(503)

    def do_POST(self) -> None:
        """200: understood."""
        if (index := self._name()) is not None:
            self.server.waiting_for.discard(int(index))
            self._answer(200)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def _name(self) -> str | None:
        """What is asked for; None, and 404, unless it is a file of the dataset, or the index of a host."""
        fingerprint, _, name = unquote(self.path.removeprefix("/")).partition("/")
        known = name in self.server.names if self.command == "GET" else name.isdecimal()
        if fingerprint != self.server.fingerprint or not known:
            self._answer(404)
            return None
        self.server.asked_at = time.monotonic()
        return name

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
