"""Tokenizers: exact round trips, no markers from plain text, and linear time on one huge document."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxscale.config.errors import Refused
from jaxscale.data.build.pieces import PIECE, pieces
from jaxscale.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "Grüße, 世界! 🙂 e\u0301",
    "\r\n\ttabs  and   blanks \n\n",
    "1234567 <|end|>",
    "",
]


def byte_level(markers: list[str], special: bool = True, **options: Any) -> tokenizers.Tokenizer:
    """A GPT-2-like tokenizer without merges, with the markers given as added tokens."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([tokenizers.AddedToken(marker, special=special, normalized=False) for marker in markers])
    return library


def saved(library: tokenizers.Tokenizer, folder: Path) -> str:
    path = folder / "tokenizer.json"
    library.save(str(path))
    return str(path)


def test_bytes_round_trip_and_markers() -> None:
    tokenizer = load_tokenizer("bytes")
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert (tokenizer.vocabulary_size, tokenizer.begin_id, tokenizer.end_id, tokenizer.mask_id) == (259, 256, 257, 258)
    assert tokenizer.decode([256, 104, 105, 257]) == "<|begin|>hi<|end|>"
    assert tokenizer.decode([0xE4, 0xB8]) == "\ufffd"  # half a character


@pytest.mark.parametrize("special", [True, False])
def test_text_that_looks_like_a_marker_stays_text(tmp_path: Path, special: bool) -> None:
    tokenizer = load_tokenizer(saved(byte_level(["<|endoftext|>", "<mask>"], special), tmp_path))
    text = "a<|endoftext|>b <mask>"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.end_id not in ids and tokenizer.mask_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end_id]) == text + "<|endoftext|>"


def test_markers_of_the_post_processor_truncation_and_padding_do_not_count(tmp_path: Path) -> None:
    library = byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    library.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|end_of_text|>",
        special_tokens=[(t, library.token_to_id(t)) for t in ("<|begin_of_text|>", "<|end_of_text|>")],
    )
    library.enable_truncation(4)
    library.enable_padding(length=8)
    assert len(library.encode("a").ids) == 8
    tokenizer = load_tokenizer(saved(library, tmp_path))
    assert [len(ids) for ids in tokenizer.encode_batch(["a", "abcdefghij", ""])] == [1, 10, 0]
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.mask_id) == (256, 257, None)


def test_wordpiece_uses_its_own_marker_names(tmp_path: Path) -> None:
    words = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "[MASK]", "sep", "un", "##able", "[", "]"])}
    library = tokenizers.Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer = load_tokenizer(saved(library, tmp_path))
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.mask_id, tokenizer.vocabulary_size) == (1, 2, 3, 9)
    assert tokenizer.encode("unable [SEP]").tolist() == [5, 6, 7, 4, 8]


def test_refused_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no such file.*'bytes'"):
        load_tokenizer(str(tmp_path / "nothing.json"))
    broken = tmp_path / "broken.json"
    for content in (b"", b"{", b"[]", b"{}", b'{"model": 3}', b"\xff"):
        broken.write_bytes(content)
        with pytest.raises(Refused, match=r"broken\.json"):
            load_tokenizer(str(broken))
    with pytest.raises(Refused, match=r"no end marker; known are <\|endoftext\|>"):
        load_tokenizer(saved(byte_level(["<|stop|>"]), tmp_path))


def test_marker_that_the_model_itself_produces_is_refused(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = load_tokenizer(saved(library, tmp_path))
    assert tokenizer.encode("a a").tolist() == [0, 0]
    with pytest.raises(Refused, match="marker '</s>'"):
        tokenizer.encode("a </s>")


def test_ids_with_holes_stay_below_the_vocabulary_size(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 5, "</s>": 70_000, "?": 2}, unk_token="?"))
    tokenizer = load_tokenizer(saved(library, tmp_path))
    assert (tokenizer.vocabulary_size, tokenizer.end_id) == (70_001, 70_000)


def test_fingerprint_follows_the_content_not_the_spelling(tmp_path: Path) -> None:
    path = saved(byte_level(["</s>"]), tmp_path)
    tokenizer = load_tokenizer(path)
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()), indent=3))
    assert load_tokenizer(path).fingerprint == tokenizer.fingerprint
    tokenizer.save(tmp_path / "copy" / "tokenizer.json")
    assert load_tokenizer(str(tmp_path / "copy" / "tokenizer.json")).fingerprint == tokenizer.fingerprint
    assert load_tokenizer(saved(byte_level(["</s>", "<s>"]), tmp_path)).fingerprint != tokenizer.fingerprint
    assert ByteTokenizer().fingerprint == ByteTokenizer().fingerprint


def test_trained_tokenizer_round_trips_and_is_reproducible(tmp_path: Path) -> None:
    texts = ["def function(argument):\n    return argument + 12345\n" * 20, "while True:\n    pass # über\n" * 20]
    one = train_bpe(iter(texts), 300, tmp_path / "one.json")
    two = train_bpe(iter(texts), 300, tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert one.fingerprint == two.fingerprint and one.vocabulary_size == 300
    assert len({one.begin_id, one.end_id, one.mask_id, None}) == 4
    for text in TEXTS + texts:
        assert one.decode(one.encode(text)) == text
    assert len(one.encode(texts[0])) < len(texts[0]) / 2


@pytest.mark.parametrize(("vocabulary", "message"), [(258, "at least 259"), (5000, "it yields [0-9]+ ids")])
def test_vocabulary_that_cannot_be_is_refused(tmp_path: Path, vocabulary: int, message: str) -> None:
    with pytest.raises(Refused, match=message):
        train_bpe(iter(["too little text"]), vocabulary, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


WORDY = " ".join(f"word{i * 7919 % 1000:x}" for i in range(60_000))


@pytest.mark.parametrize(
    "text",
    [
        WORDY,
        WORDY.replace(" ", "\n"),
        "x" * 200_001,
        " " * 200_001,
        "".join(chr(0x4E00 + i % 900) for i in range(99_999)),
    ],
    ids=["blanks", "lines", "no-blanks", "only-blanks", "chinese"],
)
def test_pieces_join_to_the_text_and_are_short(text: str) -> None:
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert all(0 < len(piece) <= PIECE for piece in cut) and len(cut) <= 2 * len(text) // PIECE + 1


@pytest.mark.parametrize("blank", [" ", "\n"])
def test_cuts_at_blanks_and_lines_do_not_change_the_ids(tmp_path: Path, blank: str) -> None:
    tokenizer = train_bpe(iter([WORDY]), 400, tmp_path / "t.json")
    text = WORDY.replace(" ", blank)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    assert tokenizer.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


def test_ids_do_not_depend_on_the_other_texts_of_the_batch(tmp_path: Path) -> None:
    tokenizer = train_bpe(iter([WORDY]), 400, tmp_path / "t.json")
    texts = ["first", WORDY, "", "y" * 150_000, "last words"]
    together = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, together, strict=True):
        assert np.array_equal(tokenizer.encode(text), ids)


@pytest.mark.parametrize("blanks", [True, False])
def test_huge_document_takes_linear_time(tmp_path: Path, blanks: bool) -> None:
    tokenizer = train_bpe(iter([WORDY]), 400, tmp_path / "t.json")
    small = (WORDY if blanks else WORDY.replace(" ", "x"))[: 2**18]

    def seconds(text: str) -> float:
        begun = time.perf_counter()
        tokenizer.encode(text)
        return time.perf_counter() - begun

    seconds(small)
    # Quadratic time would be 256 times as much; the machine is shared, hence the room.
    assert seconds(small * 16) < 16 * 4 * min(seconds(small) for _ in range(3))
