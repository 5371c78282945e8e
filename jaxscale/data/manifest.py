"""The manifest of a token dataset: what is in it, which files hold it, and how it was built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.data.tokenizer import Tokenizer

MANIFEST = "dataset.json"
FORMAT = "jaxscale token dataset"
VERSION = 1


@dataclass(frozen=True)
class Shard:
    """A file of tokens and the file that says where its documents end.

    Files are named relative to the manifest; an absolute path is a file that another program wrote, read in place.
    """

    tokens_file: str
    """Its last `tokens` ids are the documents, end to end; before them stands a header, which may be empty."""
    tokens: int
    tokens_bytes: int
    """Size of the whole file."""
    tokens_sha256: str
    documents_file: str
    """`.npy`, `[documents] uint64`: where each document ends, counted from the first token of the shard."""
    documents: int
    documents_bytes: int
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a manifest says."""

    documents: int
    tokens: int
    text_bytes: int | None
    """Bytes of UTF-8 text that were encoded: the denominator of bits per byte. None: unknown."""
    vocabulary_size: int
    """Every id is below this."""
    end_id: int
    begin_id: int | None
    mask_id: int | None
    dtype: str
    """Of the tokens: uint16 or uint32."""
    shards: tuple[Shard, ...]
    tokenizer_fingerprint: str
    built_in_tokenizer: bool
    """Whether the tokenizer is `bytes`, which needs no file."""
    built: dict[str, Any] = field(compare=False)
    """How it was built."""


def manifest_text(
    tokenizer: Tokenizer, dtype: str, shards: Sequence[Shard], text_bytes: int | None, built: dict[str, Any]
) -> str:
    """Content of the manifest of these shards; the arguments are those of `Manifest`."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "text_bytes": text_bytes,
        "dtype": dtype,
        "tokenizer": {
            "built_in": tokenizer.definition is None,
            "fingerprint": tokenizer.fingerprint,
            "vocabulary_size": tokenizer.vocabulary_size,
            "end_id": tokenizer.end_id,
            "begin_id": tokenizer.begin_id,
            "mask_id": tokenizer.mask_id,
        },
        "built": built,
        "shards": [asdict(shard) for shard in shards],
    }
    return json.dumps(manifest, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder whose files are all there.

    Raises Refused, naming the file, for one that is missing, damaged, cut short or of another kind, as far as sizes
    and headers show it.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        kind, version = content["format"], content["version"]
        if (kind, version) != (FORMAT, VERSION):
            raise Refused(f"{path}: {kind!r} version {version}; this jaxscale reads {FORMAT!r} version {VERSION}")
        tokenizer = content["tokenizer"]
        manifest = Manifest(
            documents=content["documents"],
            tokens=content["tokens"],
            text_bytes=content["text_bytes"],
            vocabulary_size=tokenizer["vocabulary_size"],
            end_id=tokenizer["end_id"],
            begin_id=tokenizer["begin_id"],
            mask_id=tokenizer["mask_id"],
            dtype=content["dtype"],
            shards=tuple(Shard(**shard) for shard in content["shards"]),
            tokenizer_fingerprint=tokenizer["fingerprint"],
            built_in_tokenizer=tokenizer["built_in"],
            built=content["built"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path}: damaged manifest ({type(error).__name__}: {error})") from error
    if manifest.dtype not in ("uint16", "uint32"):
        raise Refused(f"{path}: dtype {manifest.dtype!r}; allowed: uint16, uint32")
    for counted, name in ((manifest.tokens, "tokens"), (manifest.documents, "documents")):
        if counted != sum(getattr(shard, name) for shard in manifest.shards):
            raise Refused(f"{path}: damaged manifest (its shards do not add up to {counted} {name})")
    if manifest.tokens < 1:
        raise Refused(f"{path}: the dataset is empty")
    for shard in manifest.shards:
        _check_file(folder / shard.tokens_file, shard.tokens_bytes, shard.tokens, manifest.dtype)
        _check_file(folder / shard.documents_file, shard.documents_bytes, shard.documents, "uint64")
    return manifest


def _check_file(path: Path, size: int, count: int, dtype: str) -> None:
    """Raise Refused unless `path` has `size` bytes and, if it is an `.npy` file, is a flat array of `count` `dtype`."""
    try:
        found_size = path.stat().st_size
    except OSError as error:
        raise Refused(f"{path}: missing, though {MANIFEST} lists it ({error.strerror})") from error
    if found_size != size:
        raise Refused(f"{path}: {found_size} bytes, but {MANIFEST} says {size}")
    if path.suffix != ".npy":
        return
    try:
        with open(path, "rb") as file:
            np.lib.format.read_magic(file)
            shape, _, found = np.lib.format.read_array_header_1_0(file)
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: not an .npy file that can be read ({error})") from error
    if shape != (count,) or found != np.dtype(dtype):
        raise Refused(f"{path}: holds {shape} {found}, but {MANIFEST} says ({count},) {dtype}")
