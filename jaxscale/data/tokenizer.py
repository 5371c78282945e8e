"""Text to token ids and back: a byte-level tokenizer that is built in, and any `tokenizer.json`.

No tokenizer adds markers by itself here: begin and end markers are put around each document by `prepare.py`, exactly
once, whatever the file's own post-processing would do. Text that merely looks like a marker is encoded as plain text.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxscale.config.errors import Refused
from jaxscale.data.build.pieces import pieces
from jaxscale.data.files import replace_file

if TYPE_CHECKING:
    from jaxscale.data.fast import Fast

BEGIN, END, MASK = "<|begin|>", "<|end|>", "<|mask|>"
"""Markers of the built-in tokenizer and of those that `train_bpe` makes."""

END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    END,
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)
BEGIN_NAMES = (
    "<|begin_of_text|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    BEGIN,
    "<s>",
    "<bos>",
    "[BOS]",
    "[CLS]",
)
MASK_NAMES = (MASK, "<mask>", "[MASK]")
"""The only spellings under which markers are recognised; of several in one vocabulary the first listed counts."""

TRAINING_PIECE = 2**10
"""Longest text in one piece for training, whose time grows with the square of the longest run without a blank."""
GROUP = 2**20
"""Characters handed to the library at one time: bounds memory, since each token costs it about 100 bytes."""

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Where `train_bpe` splits text, so that no token crosses: words, digits by three, punctuation, line ends, blanks."""


@dataclass(frozen=True)
class Tokenizer(ABC):
    """Text to ids and back, without markers."""

    vocabulary_size: int
    """Every id is below this."""
    end_id: int
    """Closes each document."""
    begin_id: int | None
    mask_id: int | None
    fingerprint: str
    """sha256 (hex) of what defines the tokenizer."""
    definition: str | None = field(repr=False)
    """Content of its `tokenizer.json`; None: the built-in tokenizer, which needs no file."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, `[tokens]` of `dtype`, without markers and independent of the other texts."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; markers are spelt out, incomplete UTF-8 becomes U+FFFD."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling; None if there is none."""

    @property
    def dtype(self) -> np.dtype:
        """In which ids are stored: uint16 if it holds all of them, else uint32."""
        return np.dtype(np.uint16 if self.vocabulary_size <= 2**16 else np.uint32)

    @property
    def engine(self) -> str:
        """What encodes: `bytes`, or the library `tokenizers` or `tiktoken`."""
        return "bytes"

    def faster(self, proven: bool = False) -> Tokenizer:
        """A tokenizer that gives the same ids sooner, as far as that can be known without a corpus; else itself.

        `proven`: that has been found out before.
        """
        return self

    def save(self, path: Path) -> None:
        """Write the `tokenizer.json`; the built-in tokenizer has none and writes nothing."""
        if self.definition is not None:
            replace_file(path, self.definition.encode())

    def encode(self, text: str) -> np.ndarray:
        """Ids of one text, `[tokens] uint32`, without markers."""
        return self.encode_batch([text])[0]


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8; then the begin, end and mask markers."""

    def __init__(self) -> None:
        super().__init__(
            vocabulary_size=259,
            begin_id=256,
            end_id=257,
            mask_id=258,
            fingerprint=hashlib.sha256(f"bytes {BEGIN} {END} {MASK}".encode()).hexdigest(),
            definition=None,
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def token_id(self, token: str) -> int | None:
        return {BEGIN: self.begin_id, END: self.end_id, MASK: self.mask_id}.get(token)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        markers = (BEGIN, END, MASK)
        return b"".join(bytes([i]) if i < 256 else markers[i - 256].encode() for i in map(int, ids)).decode(
            errors="replace"
        )


@dataclass(frozen=True)
class FileTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the library `tokenizers`, or by tiktoken where `faster` has found it equal."""

    library: tokenizers.Tokenizer = field(repr=False, compare=False)
    fast: Fast | None = field(default=None, repr=False, compare=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        encode = self._run_library if self.fast is None else self._run_tiktoken
        for group in _groups((owner, piece) for owner, text in enumerate(texts) for piece in pieces(text)):
            for (owner, _), ids in zip(group, encode([piece for _, piece in group]), strict=True):
                parts[owner].append(ids.astype(self.dtype))
        encoded = [np.concatenate(part) if part else np.zeros(0, self.dtype) for part in parts]
        markers = [i for i in (self.end_id, self.begin_id, self.mask_id) if i is not None]
        for ids, text in zip(encoded, texts, strict=True):
            found = next((marker for marker in markers if (ids == marker).any()), None)
            if found is not None:
                raise Refused(
                    f"the tokenizer turns plain text into its marker {self.library.id_to_token(found)!r} "
                    f"(in the text that starts {text[:60]!r}); declare the marker in added_tokens of its tokenizer.json"
                )
        return encoded

    @property
    def engine(self) -> str:
        return "tokenizers" if self.fast is None else "tiktoken"

    def faster(self, proven: bool = False) -> Tokenizer:
        from jaxscale.data.fast import make_fast  # only who builds datasets needs the other library

        assert self.definition is not None
        return replace(self, fast=make_fast(json.loads(self.definition), self.library, proven))

    def token_id(self, token: str) -> int | None:
        return self.library.token_to_id(token)

    def _run_library(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _run_tiktoken(self, texts: Sequence[str]) -> list[np.ndarray]:
        if threads() == 1:
            return list(map(self._run_tiktoken_on, texts))
        with ThreadPoolExecutor(threads()) as pool:
            return list(pool.map(self._run_tiktoken_on, texts))

    def _run_tiktoken_on(self, text: str) -> np.ndarray:
        assert self.fast is not None
        ids = self.fast.encoding.encode_to_numpy(text, disallowed_special=())
        # It drops what its regular expression does not match; the other library keeps that.
        complete = self.fast.lengths[ids].sum() == len(text.encode())
        return ids if complete else self._run_library([text])[0]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.library.decode([int(i) for i in ids], skip_special_tokens=False)


def threads() -> int:
    """Threads that encode text: what `RAYON_NUM_THREADS` says, which the library tokenizers obeys too, or one a CPU."""
    return int(os.environ.get("RAYON_NUM_THREADS") or len(os.sched_getaffinity(0)))


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: `bytes`, or the path of a `tokenizer.json`.

    Raises Refused where the file is missing, unreadable, or has no end marker of `END_NAMES`.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if not path.is_file():
        raise Refused(f"tokenizer {spec!r}: no such file; allowed: 'bytes', or the path of a tokenizer.json")
    try:
        definition = json.loads(path.read_bytes())
        # Padding and truncation belong to whoever wrote the file; a document is neither padded nor cut.
        definition |= {"padding": None, "truncation": None}
        ids = _vocabulary(tokenizers.Tokenizer.from_str(json.dumps(definition)))
        end, begin, mask = (_first(names, ids) for names in (END_NAMES, BEGIN_NAMES, MASK_NAMES))
        for token in definition["added_tokens"]:
            # The library leaves only tokens that are declared special out of plain text.
            token["special"] |= token["content"] in (end, begin, mask)
        text = json.dumps(definition, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise Refused(f"tokenizer {spec!r}: the library tokenizers cannot read it: {error}") from error
    if end is None:
        raise Refused(f"tokenizer {spec!r}: its vocabulary has no end marker; known are {', '.join(END_NAMES)}")
    library.encode_special_tokens = True  # means: text that looks like a special token stays text
    return FileTokenizer(
        vocabulary_size=max(ids.values()) + 1,
        end_id=ids[end],
        begin_id=ids[begin] if begin else None,
        mask_id=ids[mask] if mask else None,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        definition=text,
        library=library,
    )


def train_bpe(texts: Iterable[str], vocabulary: int, path: Path, markers: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocabulary` ids and save it as `path`.

    Among the ids are the 256 bytes, the begin, end and mask markers, and further `markers`.

    The result depends on the texts alone. Raises Refused where they do not yield that many ids.
    """
    special = [BEGIN, END, MASK, *markers]
    smallest = 256 + len(special)
    if vocabulary < smallest:
        raise Refused(f"train_vocabulary = {vocabulary}: a byte-level vocabulary has at least {smallest} ids")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator((piece for text in texts for piece in pieces(text, TRAINING_PIECE)), trainer)
    found = library.get_vocab_size()
    if found < vocabulary:
        raise Refused(f"train_vocabulary = {vocabulary}: the corpus is too small for it; it yields {found} ids")
    replace_file(path, library.to_str().encode())
    return load_tokenizer(str(path))


def _groups(items: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Lists of consecutive items with about `GROUP` characters of text together."""
    group: list[tuple[int, str]] = []
    size = 0
    for item in items:
        group.append(item)
        size += len(item[1])
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _vocabulary(library: Any) -> dict[str, int]:
    return library.get_vocab(with_added_tokens=True)


def _first(names: tuple[str, ...], ids: dict[str, int]) -> str | None:
    return next((name for name in names if name in ids), None)
