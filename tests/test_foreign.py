"""Token files of other programs: read in place as token datasets, and refused by name where they are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxscale.config.errors import Refused
from jaxscale.data import scan
from jaxscale.data.formats import recognise
from jaxscale.data.manifest import Shard, manifest_text
from jaxscale.data.packing import EndToEnd
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxscale.data.writer import DatasetWriter
from tests.foreign import (
    overwrite,
    packed,
    write_datatrove,
    write_flat,
    write_llm_c,
    write_megatron,
    write_megatron_index,
    write_tokenizer,
)

END, BEGIN = 0, 1
"""Of the tokenizers here; of `bytes` they are 257 and 256."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the test."""
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder for token files."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[[int], str]:
    """The path of a tokenizer.json with this many ids."""

    def path(vocabulary: int) -> str:
        write_tokenizer(tmp_path / f"{vocabulary}.json", vocabulary)
        return str(tmp_path / f"{vocabulary}.json")

    return path


def documents_of(dataset: TokenDataset, length: int = 7) -> list[list[int]]:
    """All documents, put together from rows."""
    view = EndToEnd(dataset, length)
    tokens, starts, lengths = view.gather(np.arange(view.rows))
    real = np.arange(length) < lengths[:, None]
    begins = np.flatnonzero(starts[real])
    assert begins[0] == 0
    return [ids.tolist() for ids in np.split(tokens[real], begins[1:])]


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of everything in a folder, and its own time."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


SHORT = [[5, 6, END], [7, END], [8, 9, 10, 11, END]]
LONG = [*SHORT, [*(2 + number % 40_000 for number in range(70_000)), END], [12, END]]
"""With a document beyond 2^16 tokens."""
LARGE = [*LONG, [65_535, 65_536, 128_000, END]]
"""With ids beyond 2^16."""


def formats() -> list[tuple[str, Callable[[Path], None], str, list[list[int]], str]]:
    """(format, writer of a folder, name in it, documents, dtype) of every format and width."""
    megatron, llm_c = "Megatron-LM (.bin, .idx)", "llm.c token file (.bin with a header)"
    datatrove, flat = "datatrove (.ds)", "flat token file (.bin)"
    halves = [[ids[: len(ids) // 2], ids[len(ids) // 2 :]] for ids in LARGE]
    return [
        (megatron, lambda f: write_megatron(f / "x_text", [[ids] for ids in LONG]), "x_text", LONG, "uint16"),
        (megatron, lambda f: write_megatron(f / "x", halves, "i"), "x.bin", LARGE, "uint32"),
        (datatrove, lambda f: write_datatrove(f / "x.ds", LONG), "x.ds", LONG, "uint16"),
        (datatrove, lambda f: write_datatrove(f / "x.ds", LARGE, "I"), ".", LARGE, "uint32"),
        (llm_c, lambda f: write_llm_c(f / "x.bin", LONG), "x.bin", LONG, "uint16"),
        (llm_c, lambda f: write_llm_c(f / "x.bin", LARGE, "I"), "x*.bin", LARGE, "uint32"),
        (flat, lambda f: write_flat(f / "x.bin", LONG), "x.bin", LONG, "uint16"),
        (flat, lambda f: write_flat(f / "x.bin", LARGE, "I"), "x.bin", LARGE, "uint32"),
    ]


@pytest.mark.parametrize("case", formats(), ids=lambda case: f"{case[0]} {case[4]}")
def test_every_format_is_read_in_place(
    case: tuple[str, Callable[[Path], None], str, list[list[int]], str],
    data: Path,
    cache: Path,
    tokenizer: Callable[[int], str],
) -> None:
    """The documents come out as they went in; nothing is written beside the files; a flipped bit is found."""
    kind, write, name, documents, dtype = case
    write(data)
    before, path, words = state(data), data / name, tokenizer(200_000 if dtype == "uint32" else 50_000)
    assert TokenDataset.find(path, words) is None and not cache.exists()
    dataset = TokenDataset.open(path, words)
    assert documents_of(dataset) == documents
    assert (dataset.documents, dataset.tokens) == (len(documents), sum(map(len, documents)))
    assert (dataset.dtype, dataset.text_bytes, dataset.path) == (dtype, None, path)
    assert dataset.built["format"] == kind and dataset.built["largest_id"] == max(map(max, documents))
    assert dataset.tokenizer().fingerprint == load_tokenizer(words).fingerprint
    assert EndToEnd(dataset, 4).documents_in_row(0)[1][0] == 1
    dataset.verify()
    assert state(data) == before

    file = next(file for file in data.iterdir() if file.suffix in (".bin", ".ds"))
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-3] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    found = TokenDataset.find(path, words)
    assert found is not None and found.fingerprint == dataset.fingerprint  # known by size and time, so not read again
    with pytest.raises(Refused, match=f"{file.name}: its content is not what .*sha256 differs"):
        found.verify()
    os.utime(file)
    assert TokenDataset.find(path, words) is None
    assert TokenDataset.open(path, words).fingerprint != dataset.fingerprint


def test_the_fingerprint_is_that_of_the_content(data: Path, tokenizer: Callable[[int], str]) -> None:
    """One set of files under each of its names, and a copy of it, are one dataset; with another tokenizer another."""
    write_megatron(data / "c4.v2_text", [[[5], [6, END]], [[7, END]]])
    (data / "copy").mkdir()
    write_megatron(data / "copy" / "x", [[[5, 6, END]], [[7, END]]])
    names = ("c4.v2_text", "c4.v2_text.bin", "c4.v2_text.idx", "c4.*", "copy/x")
    assert len({TokenDataset.open(data / name, tokenizer(100)).fingerprint for name in names}) == 1
    one = TokenDataset.open(data / "copy" / "x", tokenizer(100))
    assert one.fingerprint != TokenDataset.open(data / "copy" / "x", tokenizer(101)).fingerprint


def test_several_files_are_shards_in_the_order_of_their_names(data: Path, tokenizer: Callable[[int], str]) -> None:
    """As datatrove's tasks leave them: one of them empty, and of documents without tokens nothing is read."""
    write_datatrove(data / "00001.ds", [[7, END], [], [8, END]])
    write_datatrove(data / "00000.ds", [[], [5, END], [6, END], []])
    write_datatrove(data / "00002.ds", [])
    dataset = TokenDataset.open(data, tokenizer(100))
    assert documents_of(dataset, 3) == [[5, END], [6, END], [7, END], [8, END]]
    assert [Path(shard.tokens_file).name for shard in dataset.shards] == ["00000.ds", "00001.ds"]
    assert dataset.built["empty_documents"] == 3
    write_megatron(data / "b", [[], [[8], [], [END]], [[]], [[9, END]]])
    write_megatron(data / "a", [[[7, END]]])
    write_megatron(data / "c", [])
    dataset = TokenDataset.open(data / "*.idx", tokenizer(100))
    assert documents_of(dataset, 3) == [[7, END], [8, END], [9, END]] and dataset.built["empty_documents"] == 2


@pytest.mark.parametrize("block", [4, 8, 2**22])
@pytest.mark.parametrize("code", ["H", "I"])
def test_documents_of_flat_files_end_at_markers(
    code: str, block: int, data: Path, tokenizer: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each end marker and before each begin marker, wherever blocks of reading end; the last needs no marker."""
    monkeypatch.setattr(scan, "BLOCK", block)
    documents = [[BEGIN, 5, END], [BEGIN, 6], [BEGIN, 7, 8, 9, END], [END], [10, END], [BEGIN], [BEGIN, 11, 12]]
    write_flat(data / "x.bin", documents, code)
    assert documents_of(TokenDataset.open(data / "x.bin", tokenizer(100))) == documents
    write_datatrove(data / "x.ds", documents, code)
    (data / "x.ds.index").unlink()
    assert documents_of(TokenDataset.open(data / "x.ds", tokenizer(100))) == documents
    write_flat(data / "y.bin", [[5, 6]], code)
    assert documents_of(TokenDataset.open(data / "y.bin", tokenizer(100))) == [[5, 6]]


def test_the_width_of_ids_that_nothing_tells(data: Path, tokenizer: Callable[[int], str]) -> None:
    """uint32 where all ids are then below the vocabulary, else uint16, else refused with the largest id."""
    write_flat(data / "x.bin", [[5, 6, 300, END]])
    assert TokenDataset.open(data / "x.bin", tokenizer(301)).dtype == "uint16"
    with pytest.raises(Refused, match=r"x\.bin: read as uint16, its largest id is 300, .*only the ids 0 to 299"):
        TokenDataset.open(data / "x.bin", tokenizer(300))
    # As uint32 it is right up to its last id: found out only at the end.
    np.append(np.full(2**21, 5, np.uint32), 7 + 8 * 2**16).astype(np.uint32).tofile(data / "y.bin")
    assert TokenDataset.open(data / "y.bin", tokenizer(100)).dtype == "uint16"
    write_flat(data / "z.bin", [[5, 99, 80_000]], "I")
    with pytest.raises(Refused, match=r"z\.bin: read as uint32, its largest id is 80000"):
        TokenDataset.open(data / "z.bin", tokenizer(80_000))
    assert TokenDataset.open(data / "z.bin", tokenizer(80_001)).dtype == "uint32"
    write_flat(data / "o.bin", [[5, 6, 7]])
    with pytest.raises(Refused, match=r"o\.bin: no whole number of uint32 ids, which a tokenizer of 80001 ids needs"):
        TokenDataset.open(data / "o.bin", tokenizer(80_001))
    assert TokenDataset.open(data / "o.bin", tokenizer(2**16)).dtype == "uint16"
    write_datatrove(data / "x.ds", [[5, 99, 80_000]], "I")
    (data / "x.ds.metadata").unlink()  # then the last end tells it
    assert TokenDataset.open(data / "x.ds", tokenizer(80_001)).dtype == "uint32"
    write_datatrove(data / "y.ds", [[5, 99]])
    with pytest.raises(Refused, match="some files have uint16 ids and some uint32"):
        TokenDataset.open(data, tokenizer(80_001))


def test_negative_ids_are_refused(data: Path, tokenizer: Callable[[int], str]) -> None:
    """Megatron-LM's int32 has room for them, no vocabulary has."""
    write_megatron(data / "x", [[[5, -1]]], "i")
    with pytest.raises(Refused, match=r"x\.bin: read as uint32, its largest id is 4294967295"):
        TokenDataset.open(data / "x", tokenizer(100))


def test_the_tokenizer_is_named_or_lies_beside(data: Path, tmp_path: Path) -> None:
    """Without one the message says what to set; a dataset that has one is held against the one that is named."""
    write_flat(data / "x.bin", [[5, 6, END]])
    for look in (TokenDataset.open, TokenDataset.find):
        with pytest.raises(Refused, match=r"set data\.tokenizer .*or put it there as .*files/tokenizer\.json"):
            look(data / "x.bin")
    with pytest.raises(Refused, match=r"'words\.json': no such file"):
        TokenDataset.open(data / "x.bin", "words.json")
    write_tokenizer(data / "tokenizer.json", 50)
    assert TokenDataset.open(data / "x.bin").vocabulary_size == 50
    assert TokenDataset.open(data / "x.bin", "bytes").vocabulary_size == 259
    with DatasetWriter(tmp_path / "own", ByteTokenizer(), {}) as writer:
        writer.add(np.array([5, 257], np.uint32), 1)
    assert TokenDataset.open(tmp_path / "own", "bytes").path == tmp_path / "own"
    with pytest.raises(Refused, match=r"own: was built with another tokenizer than .*json"):
        TokenDataset.open(tmp_path / "own", str(data / "tokenizer.json"))


def cut(path: Path, size: int = -2) -> None:
    """Cut the end off a file."""
    path.write_bytes(path.read_bytes()[:size])


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no Megatron index": ("m", lambda f: overwrite(f / "m.idx", 0, b"TNTIDX"), r"m\.idx: no index of Megatron-LM"),
    "half a header": ("m", lambda f: cut(f / "m.idx", 20), r"m\.idx: no index of Megatron-LM"),
    "another version": ("m", lambda f: overwrite(f / "m.idx", 9, b"\x02"), r"m\.idx: version 2"),
    "float ids": ("m", lambda f: overwrite(f / "m.idx", 17, b"\x07"), r"m\.idx: .*code 7; read are 4 \(int32\) and 8"),
    "too many sequences": (
        "m",
        lambda f: overwrite(f / "m.idx", 18, b"\xff" * 8),
        r"m\.idx: [0-9]+ bytes, but must be",
    ),
    "an index cut short": ("m", lambda f: cut(f / "m.idx"), r"m\.idx: [0-9]+ bytes, but must be"),
    "ids cut short": ("m", lambda f: cut(f / "m.bin"), r"m\.bin: [0-9]+ bytes, but must be .*m\.idx ends there"),
    "no ids": ("m", lambda f: (f / "m.bin").unlink(), r"m\.bin: missing"),
    "a gap": (
        "m",
        lambda f: overwrite(f / "m.idx", 34 + 12 + 8, b"\x08"),
        r"m\.idx: its sequences do not lie end to end",
    ),
    "documents left out": ("m", lambda f: overwrite(f / "m.idx", 34 + 36 + 24, b"\x02"), r"m\.idx: .*not hold all 3"),
    "documents that fall": ("m", lambda f: overwrite(f / "m.idx", 34 + 36 + 8, b"\x03"), "document ends do not rise"),
    "no such sequence": (
        "m",
        lambda f: overwrite(f / "m.idx", 34 + 36 + 8, b"\x09"),
        r"m\.idx: .*sequence that is not",
    ),
    "header and ids differ": ("l.bin", lambda f: cut(f / "l.bin"), r"l\.bin: .*its header says 10 uint16 ids"),
    "later llm.c": (
        "l.bin",
        lambda f: write_llm_c(f / "l.bin", SHORT, header={1: 2}),
        r"l\.bin: version 2",
    ),
    "questions": (
        "l.bin",
        lambda f: write_llm_c(f / "l.bin", SHORT, header={0: 20240522}),
        "multiple-choice questions",
    ),
    "an odd size": ("f.bin", lambda f: cut(f / "f.bin", -1), r"f\.bin: 19 bytes, which is no whole number"),
    "an empty file": ("f.bin", lambda f: cut(f / "f.bin", 0), r"f\.bin: holds no tokens"),
    "shorter than its index": ("d.ds", lambda f: cut(f / "d.ds"), r"d\.ds: 18 bytes, but must be 20"),
    "swapped with another": (
        "d.ds",
        lambda f: ((f / "d.ds.metadata").unlink(), cut(f / "d.ds")),
        r"d\.ds\.index: its last document ends at token 10, but d\.ds has 18 bytes",
    ),
    "half an index": ("d.ds", lambda f: cut(f / "d.ds.index"), r"d\.ds\.index: its last document ends at"),
    "ends that fall": ("d.ds", lambda f: overwrite(f / "d.ds.index", 0, b"\x09"), r"d\.ds: document ends do not rise"),
    "no metadata": ("d.ds", lambda f: (f / "d.ds.metadata").write_text("x|3\n10"), r"d\.ds\.metadata: does not say"),
    "masked losses": ("d.ds", lambda f: (f / "d.ds.loss").write_bytes(bytes(10)), r"d\.ds\.loss: losses of single"),
    "no token file": ("x.npz", lambda f: (f / "x.npz").write_bytes(b""), r"x\.npz: no token file that is known here"),
    "nothing": ("y.bin", lambda f: None, r"y\.bin: not a token dataset"),
    "no match": ("y*", lambda f: None, r"y\*: not a token dataset"),
    "several kinds": ("[fl].bin", lambda f: None, "files of several kinds: flat token file .* llm.c"),
    "a folder": (".", lambda f: (f / "d.ds").unlink(), r"not a token dataset .*are named one by one or as .*\*\.bin"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_named(damage: str, data: Path, cache: Path, tokenizer: Callable[[int], str]) -> None:
    """At opening, before anything is kept of it."""
    write_megatron(data / "m", [[ids] for ids in SHORT])
    write_llm_c(data / "l.bin", SHORT)
    write_flat(data / "f.bin", SHORT)
    write_datatrove(data / "d.ds", SHORT)
    name, act, message = DAMAGE[damage]
    act(data)
    with pytest.raises(Refused, match=message):
        TokenDataset.open(data / name, tokenizer(100))
    assert not [path for path in cache.glob("*") if path.is_dir()]


def test_processes_that_open_the_same_files_at_once(data: Path, cache: Path) -> None:
    """One reads the files, the others wait; what a killed one left is removed."""
    write_flat(data / "x.bin", [[5, 257]] * 2**16)
    dataset = TokenDataset.open(data / "x.bin", "bytes")
    dataset.folder.rename(dataset.folder.with_name(f".{dataset.folder.name}.{os.uname().nodename}-1"))
    script = (
        "import sys; from pathlib import Path; from jaxscale.data.store import TokenDataset; "
        "print(TokenDataset.open(Path(sys.argv[1]), 'bytes').fingerprint)"
    )
    command = [sys.executable, "-c", script, str(data / "x.bin")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate(timeout=60)[0] for process in processes} == {f"{dataset.fingerprint}\n"}
    assert sorted(path.name for path in cache.iterdir()) == [f".{dataset.folder.name}.lock", dataset.folder.name]


def test_a_cache_folder_that_cannot_be_written(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told with the variable that names another one."""
    write_flat(data / "x.bin", SHORT)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "file"))
    with pytest.raises(Refused, match=r"x\.bin: .*file.*JAXSCALE_CACHE names another"):
        TokenDataset.open(data / "x.bin", "bytes")


def test_indices_beyond_two_to_the_forty(tmp_path: Path, data: Path) -> None:
    """Sparse files of 2 TiB: indices of both formats, and rows of a file that is no .npy."""
    lengths = [2**31 - 1] * 513
    tokens = sum(lengths)
    assert tokens > 2**40
    for name, width in (("m.bin", 2), ("d.ds", 2), ("m4.bin", 4)):
        with open(data / name, "wb") as file:
            try:
                file.truncate(width * tokens)
            except OSError:
                pytest.skip("the file system has no files of this size")
            if name == "m.bin":
                file.seek(2 * tokens - 6)
                file.write(packed([7, 8, 9], "H"))
    write_megatron_index(data / "m.idx", lengths, 2, [0, 1, 511, 513], 8)
    write_megatron_index(data / "m4.idx", lengths, 4, [0, 1, 511, 513], 4)
    ends = [lengths[0], 511 * lengths[0], tokens]
    (data / "d.ds.index").write_bytes(packed(ends, "Q"))
    for name in ("m", "m4", "d.ds"):
        (file,) = recognise(data / name).files
        assert file.ends is not None and np.concatenate(list(file.ends())).tolist() == ends
    np.save(tmp_path / "documents.npy", np.array(ends, np.uint64))
    size = (tmp_path / "documents.npy").stat().st_size
    shard = Shard(str(data / "m.bin"), tokens, 2 * tokens, "", "documents.npy", 3, size, "")
    (tmp_path / "dataset.json").write_text(manifest_text(ByteTokenizer(), "uint16", [shard], None, {}))
    dataset = TokenDataset.open(tmp_path)
    view = EndToEnd(dataset, 64)
    rows = np.array([view.rows - 1, ends[1] // 64, ends[0] // 64, 2**31 + 5])
    found = view.gather(rows)
    assert found.tokens[0, tokens % 64 - 4 : tokens % 64].tolist() == [0, 7, 8, 9]
    assert [np.flatnonzero(starts).tolist() for starts in found.starts[1:]] == [[ends[1] % 64], [ends[0] % 64], []]
    assert view.documents_in_row(int(rows[1]))[1][0] == 2
