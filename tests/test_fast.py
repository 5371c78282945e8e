"""tiktoken in place of tokenizers: only where the ids are the same, and known to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxscale.data.build.prepare import build
from jaxscale.data.fast import GPT2_WORDS, _letters, make_fast
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import FileTokenizer, load_tokenizer, train_bpe
from tests.test_prepare import config, jsonl, stored
from tests.test_tokenizer import saved

SOURCE = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
HARD = [
    "",
    " ",
    "   \n\n\t  \u00a0\u3000 \u0085\u2028 end   ",
    "don't DON'T it'\u017f we'LL 'sS 123456 1½²३ a1b2 __init__ <|end|> <|begin|>",
    "Grüße e\u0301 \U0001f642\u200d\U0001f525 世界한국어 \u0130\u0131 \ufeff\x00\x1f",
    "x" * 3000 + " " * 3000 + "=" * 3000 + "\n" * 3000,
]
SPLITS = {
    "gpt2": GPT2_WORDS,
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def trained(split: str, **model: Any) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(**model))
    words = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(SOURCE, trainer)
    return library


def fast(path: str) -> FileTokenizer:
    tokenizer = load_tokenizer(path).faster()
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


@pytest.mark.parametrize("split", SPLITS)
def test_ids_are_those_of_tokenizers(tmp_path: Path, split: str) -> None:
    tokenizer = fast(saved(trained(SPLITS[split]), tmp_path))
    assert tokenizer.engine == "tiktoken"
    slow = load_tokenizer(str(tmp_path / "tokenizer.json"))
    texts = [*SOURCE, *HARD]
    for text, one, other in zip(texts, tokenizer.encode_batch(texts), slow.encode_batch(texts), strict=True):
        assert one.tolist() == other.tolist() and one.dtype == other.dtype == tokenizer.dtype
        assert slow.decode(one) == text


def test_a_tokenizer_trained_here_is_run_fast(tmp_path: Path) -> None:
    train_bpe(iter(SOURCE), 600, tmp_path / "t.json", markers=("<|fim_prefix|>",))
    tokenizer = fast(str(tmp_path / "t.json"))
    assert tokenizer.engine == "tiktoken" and tokenizer.token_id("<|fim_prefix|>") == 3
    assert tokenizer.token_id("nothing") is None


def changed(path: Path, **changes: Any) -> tokenizers.Tokenizer:
    definition = json.loads(path.read_text())
    definition["model"] |= changes
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def test_what_could_differ_is_left_to_tokenizers(tmp_path: Path) -> None:
    plain = trained(GPT2_WORDS)
    path = Path(saved(plain, tmp_path))
    merges, vocabulary = (json.loads(path.read_text())["model"][key] for key in ("merges", "vocab"))
    swapped = dict(vocabulary)
    one, other = ("".join(merge) for merge in merges[10:12])
    swapped[one], swapped[other] = vocabulary[other], vocabulary[one]
    normal, prefixed, digits, added, word = (trained(GPT2_WORDS) for _ in range(5))
    normal.normalizer = normalizers.NFC()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    digits.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    added.add_tokens(["def "])
    word.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    cases = {
        "order of merges": changed(path, vocab=swapped),
        "dropout": changed(path, dropout=0.1),
        "a merge that comes too late": changed(path, merges=[*merges[1:], merges[0]]),
        "normalizer": normal,
        "prefix": prefixed,
        "digits": digits,
        "added token": added,
        "words that are not matched, which tiktoken drops": trained(r"\p{L}+"),
    }
    for name, library in cases.items():
        assert make_fast(json.loads(library.to_str()), library, False) is None, name
    assert make_fast(json.loads(word.to_str()), word, False) is not None


def test_a_token_that_is_merged_from_other_parts_is_found_out() -> None:
    """`abc` is listed as ab + c, but bc is merged first: tokenizers leaves a + bc, tiktoken makes abc of them."""
    letters = sorted(_letters())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {"bc": 256, "ab": 257, "abc": 258}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("b", "c"), ("a", "b"), ("ab", "c")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert library.encode("abc").ids == [vocabulary["a"], 256]
    assert make_fast(json.loads(library.to_str()), library, False) is None
    assert make_fast(json.loads(library.to_str()), library, True).encoding.encode_ordinary("abc") == [258]  # type: ignore[union-attr]


def test_a_difference_in_the_corpus_gives_the_whole_build_to_tokenizers(tmp_path: Path) -> None:
    """The two libraries read this regular expression alike for every character, but not for "'\u017f"."""
    library = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(r"[[:alpha:]]+|[^[:alpha:]]+"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    merges = [("'", "\u00c5"), ("'\u00c5", "\u00bf")]  # an apostrophe and the two bytes of U+017F
    vocabulary = {letter: i for i, letter in enumerate(sorted(_letters()))} | {"'\u00c5": 256, "'\u00c5\u00bf": 257}
    library.model = models.BPE(vocab=vocabulary, merges=merges)
    library.add_special_tokens(["<|end|>"])
    path = saved(library, tmp_path)
    if not isinstance(tokenizer := load_tokenizer(path).faster(), FileTokenizer) or tokenizer.fast is None:
        pytest.skip("these versions of the libraries read it differently in other ways, too")
    texts = ["plain text"] * 30
    settings = {"tokenizer": path, "task_bytes": 100, "workers": 1}
    build(config(tmp_path / "same", files=(jsonl(tmp_path / "a.jsonl", texts),), **settings))
    assert TokenDataset.open(tmp_path / "same" / "train").built["encoded_by"] == "tiktoken"
    texts[20] = "it'\u017f text"
    if tokenizer.encode(texts[20]).tolist() == load_tokenizer(path).encode(texts[20]).tolist():
        pytest.skip("these versions of the libraries agree")
    build(config(tmp_path / "other", files=(jsonl(tmp_path / "b.jsonl", texts),), **settings))
    assert TokenDataset.open(tmp_path / "other" / "train").built["encoded_by"] == "tokenizers"
    assert stored(tmp_path / "other" / "train")[20] == [*library.encode(texts[20]).ids, 258]
