"""Writers of other programs' token files, from the descriptions of the formats alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

Ids = Sequence[int]


def packed(ids: Ids, code: str) -> bytes:
    """Little-endian integers: `H` uint16, `I` uint32, `i` int32, `q` int64, `Q` uint64."""
    return struct.pack(f"<{len(ids)}{code}", *ids)


def write_flat(path: Path, documents: Sequence[Ids], code: str = "H") -> None:
    """nanoGPT: ids and nothing else."""
    path.write_bytes(packed(list(chain(*documents)), code))


def write_llm_c(path: Path, documents: Sequence[Ids], code: str = "H", header: dict[int, int] | None = None) -> None:
    """llm.c: 256 int32 (magic, version, number of ids, zeros), then ids. `header`: numbers that are not right."""
    ids = list(chain(*documents))
    numbers = {0: 20240520, 1: 1} if code == "H" else {0: 20240801, 1: 7}
    numbers |= {2: len(ids)} | (header or {})
    path.write_bytes(packed([numbers.get(place, 0) for place in range(256)], "i") + packed(ids, code))


def write_megatron(prefix: Path, documents: Sequence[Sequence[Ids]], code: str = "H") -> None:
    """Megatron-LM: documents of sequences; PREFIX.bin and PREFIX.idx."""
    sequences = list(chain(*documents))
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(packed(ids, code) for ids in sequences))
    lengths, width = [len(ids) for ids in sequences], struct.calcsize(code)
    first = [0, *accumulate(len(document) for document in documents)]
    write_megatron_index(prefix.with_name(prefix.name + ".idx"), lengths, width, first, {"H": 8, "i": 4}[code])


def write_megatron_index(path: Path, lengths: Ids, width: int, first_sequences: Ids, code: int) -> None:
    """The .idx: magic, version, dtype code, counts; lengths int32, first bytes int64, first sequences int64."""
    starts = [0, *accumulate(length * width for length in lengths)][: len(lengths)]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(first_sequences))
    path.write_bytes(header + packed(lengths, "i") + packed(starts, "q") + packed(first_sequences, "q"))


def write_datatrove(path: Path, documents: Sequence[Ids], code: str = "H") -> None:
    """datatrove: NAME.ds, its .index of document ends, its .metadata of three lines."""
    path.write_bytes(b"".join(packed(ids, code) for ids in documents))
    ends = list(accumulate(len(ids) for ids in documents))
    path.with_name(path.name + ".index").write_bytes(packed(ends, "Q"))
    count, width = sum(len(ids) for ids in documents), struct.calcsize(code)
    path.with_name(path.name + ".metadata").write_text(f"some/tokenizer|{width}\n{count}\n{count} T")


def write_tokenizer(path: Path, vocabulary: int) -> None:
    """A tokenizer.json of a few words, with ids up to `vocabulary` - 1; 0 is the end marker, 1 the begin marker."""
    words = {"<|endoftext|>": 0, "<s>": 1, "word": vocabulary - 1}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "word"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def overwrite(path: Path, place: int, content: bytes) -> None:
    """Put bytes at a place of a file."""
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + content + whole[place + len(content) :])
