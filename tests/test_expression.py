"""Expressions over fields: what they mean, and that they can do nothing else."""

from __future__ import annotations

import pytest

from jaxscale.config.expression import Expression

FIELDS = {"lang": "en", "score": 0.5, "tags": ["a", "b"], "meta": {"source": {"name": "web"}}, "n": -3, "none": None}


@pytest.mark.parametrize(
    "text",
    [
        'lang == "en"',
        "lang != 'de' and score >= 0.5",
        "score < 0.1 or 0.4 < score <= 0.5",
        "'a' in tags and 'c' not in tags",
        "lang in ['en', 'fr']",
        "meta.source.name == 'web'",
        "meta.source.nothing == null and meta.nothing.deeper == null and nothing == null",
        "len(tags) == 2 and len(lang) > 1",
        "not (lang == 'de') and n == -3 and true and not false",
        "tags",
    ],
)
def test_what_holds(text: str) -> None:
    assert Expression(text).holds(FIELDS)
    assert not Expression(f"not ({text})").holds(FIELDS)


@pytest.mark.parametrize("text", ["nothing > 1", "lang < 3", "1 in score", "len(score) == 1", "none.x in none"])
def test_what_cannot_be_evaluated_is_an_error_and_not_false(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be evaluated"):
        Expression(text).holds(FIELDS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lang ==",
        "__import__('os').system('true')",
        "lang.upper() == 'EN'",
        "(lambda: 1)()",
        "[x for x in tags]",
        "tags[0] == 'a'",
        "2 ** 100000",
        "lang = 'en'",
        "lang; score",
        "f'{lang}'",
        "len(tags, tags) == 1",
        "'a'.__class__ == 1",
        "lang is null",
        "x if y else z",
        "(" * 5000,
    ],
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: fields"):
        Expression(text)


def test_the_fields_it_names() -> None:
    assert Expression("a.b.c == d and len(e) in [f, true, null]").fields == {"a", "d", "e", "f"}
