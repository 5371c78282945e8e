"""Hosts that pass files on: one of them reads the source, and what the tree does not give is read there as well."""

from __future__ import annotations

import shutil
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from jaxscale.cli import main
from jaxscale.data import relay
from jaxscale.data.relay import Tree, served
from jaxscale.data.stage import stage
from tests.processes import free_port, start
from tests.test_stage import content, dataset_of

HOST = """
import os, sys, threading
from pathlib import Path
from jaxscale.data import relay
from jaxscale.data.relay import Tree
from jaxscale.data.stage import stage
source, root, hosts, index = sys.argv[1:]
relay.PATIENCE, relay.PAUSE = 20.0, 0.01
read = 0
def count(event, arguments):
    global read
    copying = threading.current_thread() is not threading.main_thread()
    if event == "open" and copying and str(arguments[0]).startswith(source + "/"):
        read += os.stat(arguments[0]).st_size
sys.addaudithook(count)
print(stage(Path(source), Path(root), streams=2, tree=Tree(hosts.split(","), int(index))), read)
"""


def test_only_the_first_of_seven_hosts_reads_the_source(tmp_path: Path) -> None:
    """Counted by what each process opens; and the others' source holds garbage, so that nothing of it can be used."""
    source = dataset_of(tmp_path / "source").folder
    for index in range(1, 7):
        shutil.copytree(source, tmp_path / f"source {index}")
        for path in (tmp_path / f"source {index}").glob("*.npy"):
            path.write_bytes(path.read_bytes()[:128] + bytes(path.stat().st_size - 128))
    hosts, processes = ",".join(f"127.0.0.1:{free_port()}" for _ in range(7)), []
    for index in reversed(range(7)):
        own = tmp_path / f"source {index}" if index else source
        processes.append(start(HOST, str(own), str(tmp_path / f"local {index}"), hosts, str(index)))
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), printed
    folders, read = zip(*(line.rsplit(" ", 1) for line in printed), strict=True)
    whole = sum(path.stat().st_size for path in source.glob("*.npy"))
    assert list(map(int, read)) == [0] * 6 + [whole]
    for folder in folders:
        assert content(Path(folder)) == content(source)


@pytest.mark.parametrize("answer", ["none", "garbage", "half of it", "another dataset's"])
def test_what_the_host_above_does_not_give_is_read_from_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(relay, "PATIENCE", 0.5)
    source = dataset_of(tmp_path / "source").folder

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = (source / Path(self.path).name).read_bytes()
            self.send_response(404 if answer == "another dataset's" else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if answer == "half of it" else bytes(len(data)))

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    if answer == "none":
        server.server_close()
    else:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    tree = Tree([f"127.0.0.1:{server.server_port}", "127.0.0.1"], 1)
    try:
        assert content(stage(source, tmp_path / "local", tree=tree)) == content(source)
    finally:
        if answer != "none":
            server.shutdown()
            server.server_close()


def test_only_finished_files_are_served_and_only_to_who_knows_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "part").mkdir()
    for name in ("copy/a.npy", "part/b.npy", "part/c.npy.part", "secret"):
        (tmp_path / name).write_text(name)
    port = free_port()
    tree = Tree([f"127.0.0.1:{port}", "127.0.0.1:1"], 0)

    def ask(verb: str, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(verb, path)
        response = connection.getresponse()
        return response.status, response.read()

    with served(tree, "f00d", [tmp_path / "copy", tmp_path / "part"], ["a.npy", "b.npy", "c.npy"]):
        with served(tree, "f00d", [tmp_path], ["secret"]):  # a second process of the host: the first goes on serving
            assert ask("GET", "/f00d/a.npy") == (200, b"copy/a.npy")
        assert ask("GET", "/f00d/b.npy") == (200, b"part/b.npy")
        assert ask("GET", "/f00d/c.npy")[0] == 503
        for path in ("/f00d/../secret", "/f00d/..%2Fsecret", "/f00d/secret", "/cafe/a.npy", "/f00d", "/"):
            assert ask("GET", path) == (404, b"")
        assert ask("POST", "/f00d/1")[0] == 200  # else the end of this block would wait for host 1


def test_shape_of_the_tree() -> None:
    """Every host but the first is below exactly one, which it asks."""
    trees = [Tree([f"n{index}" for index in range(128)], index) for index in range(128)]
    assert sorted(index for tree in trees for index in tree.below) == list(range(1, 128))
    assert all(trees[index].above == f"n{tree.index}" for tree in trees for index in tree.below)
    assert trees[0].above is None


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "stage", str(dataset_of(tmp_path / "source").folder), str(tmp_path / "local")]
    assert main([*arguments, "--hosts", "localhost"]) == 0
    assert main([*arguments, "--hosts", "n1,n2", "--host-index", "2"]) == 2
    assert "--host-index 2: --hosts names 2; the last one is 1" in capsys.readouterr().err
    assert main([*arguments, "--host-index", "1"]) == 2
