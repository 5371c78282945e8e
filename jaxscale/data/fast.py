"""A byte-level BPE `tokenizer.json` run by tiktoken, where that gives the same ids, several times as fast.

Both programs merge the adjacent pair of lowest rank until none is left. The library tokenizers takes ranks from its
list of merges and merges listed pairs only; tiktoken merges any pair whose bytes together are a token, by its id. Let
the last step of tiktoken from a token's own bytes to the token be a listed merge, for every token: `_same_merges` tries
them all. In any text, two parts that tiktoken merges into a token cover just that token's bytes, and no merge before
has crossed their edges; so what happened inside is what happens to these bytes alone, and the pair is the one that was
tried, a listed one. What tokenizers could merge, tiktoken could too, in the same order; so, step by step, they agree.

What remains is where text is split into words before, by the same regular expression in two libraries. That is held
against tokenizers for every kind of character here, and on the corpus's own text by `encode.py` while it is encoded.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from tokenizers import pre_tokenizers

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How the pre-tokenizer `ByteLevel` splits text."""

_CODES = (range(0x3401), range(0x9FFF, 0xAC01), range(0xD7A3, 0x20001), range(0x3FFFF, 0xF0000))
"""Characters that are tried: all but the inner ones of Han and Hangul, which are letters, and those for private use."""

Ranks = Mapping[bytes, int]


@dataclass(frozen=True)
class Fast:
    """tiktoken with the vocabulary of a `tokenizer.json`."""

    encoding: tiktoken.Encoding
    lengths: np.ndarray
    """`[ids] int64`: bytes of each token."""


def make_fast(definition: Mapping[str, Any], library: tokenizers.Tokenizer, proven: bool) -> Fast | None:
    """tiktoken for `definition` (the content of a `tokenizer.json`, which `library` runs).

    None where it is anything else than a byte-level BPE of one regular expression, or where ids could differ, which
    need not be tried where it is `proven`.
    """
    pattern = _pattern(definition["pre_tokenizer"] or {})
    if pattern is None or definition["normalizer"] or not all(token["special"] for token in definition["added_tokens"]):
        return None
    ranks = _ranks(definition["model"], proven)
    if ranks is None:
        return None
    try:
        encoding = tiktoken.Encoding("tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError:  # a regular expression that only the other library understands
        return None
    lengths = np.zeros(max(ranks.values()) + 1, np.int64)
    lengths[list(ranks.values())] = [len(token) for token in ranks]
    return Fast(encoding, lengths) if proven or _same_words(encoding, library) else None


def _pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The one regular expression that a pre-tokenizer splits by; None if it does anything else."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get("use_regex", True):
            return GPT2_WORDS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _ranks(model: Mapping[str, Any], proven: bool) -> dict[bytes, int] | None:
    """Bytes of each token -> its id, if merging by id is the same as merging by the model's list; else None."""
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(option) for option in options):
        return None
    letters, vocabulary = _letters(), model["vocab"]
    if not letters.keys() <= vocabulary.keys():
        return None
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    if any(left + right not in vocabulary or not set(left + right) <= letters.keys() for left, right in merges):
        return None
    if model.get("ignore_merges") and len(vocabulary) > len({left + right for left, right in merges}) + len(letters):
        return None  # whole words could become tokens that no merge makes

    to_bytes = {ord(letter): byte for letter, byte in letters.items()}

    def as_bytes(token: str) -> bytes:
        return token.translate(to_bytes).encode("latin-1")

    pairs = [(as_bytes(left), as_bytes(right)) for left, right in merges]
    ranks = {bytes([byte]): vocabulary[letter] for letter, byte in letters.items()}
    ranks |= {left + right: vocabulary[a + b] for (left, right), (a, b) in zip(pairs, merges, strict=True)}
    return ranks if proven or _same_merges(ranks, pairs) else None


def _same_merges(ranks: Ranks, merges: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether ids rise with the list, and tiktoken's last step to each token is a listed merge of older tokens."""
    order = [ranks[left + right] for left, right in merges]
    if order != sorted(order):
        return False
    listed = set(merges)
    for token in {left + right for left, right in merges}:
        last = _last_pair(token, ranks)
        if last not in listed or any(len(part) > 1 and ranks[part] >= ranks[token] for part in last):
            return False
    return True


def _last_pair(token: bytes, ranks: Ranks) -> tuple[bytes, ...]:
    """What is left of a token's bytes after all merges but the last one."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right) for left, right in pairwise(parts)]
        lowest = min((rank for rank in found if rank is not None), default=None)
        if lowest is None:
            break
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)


def _same_words(encoding: tiktoken.Encoding, library: tokenizers.Tokenizer) -> bool:
    """Whether both split alike around every kind of character: after a letter, between digits, after a blank."""
    characters = [chr(code) for code in chain(*_CODES) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    texts = ["".join(f"a{c}1{c} {c}" for c in characters[i : i + 256]) for i in range(0, len(characters), 256)]
    expected = library.encode_batch_fast(texts, add_special_tokens=False)
    return all(encoding.encode_ordinary(text) == ids.ids for text, ids in zip(texts, expected, strict=True))


def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: the printable ones for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
