"""Generation with a cache against recomputing everything, and sampling against its definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.model.generate import generate, sample
from jaxscale.train.build import Run
from tests import tiny

PROMPT, LONGEST, NEVER = 5, 14, 10_000
"""Tokens of the prompt, and with its continuation; an end token that is no token."""
SMALL = {**tiny.DECODER, "embed_dim": 32, "mlp_dim": 32}
MODELS = {
    "llama": SMALL,
    "grouped queries": {**SMALL, "kv_heads": 2, "query_key_norm": True, "head_dim": 16},
    "gpt2": {
        **SMALL,
        "positions": "learned",
        "max_positions": 64,
        "norm": "layer",
        "bias": True,
        "activation": "gelu_tanh",
    },
}


def prompts() -> np.ndarray:
    return np.random.default_rng(43).integers(0, 250, (3, PROMPT)).astype(np.int32)


def run_of(model: str) -> Run:
    return tiny.make_run(tiny.config(MODELS[model], mesh={"fsdp": 1}))


def generator(run: Run, **settings: Any) -> Callable[..., np.ndarray]:
    """`(end_id, vocabulary_size=...) -> [rows, LONGEST]`: greedy continuations unless told otherwise."""
    settings = {"temperature": 0.0, "top_p": 1.0, "vocabulary_size": 250} | settings
    params = tiny.random_params(run)

    @partial(jax.jit, compiler_options=tiny.QUICK)
    def continue_prompts(params: Any, key: jax.Array, end_id: int) -> jax.Array:
        return generate(tiny.merge(run, params), prompts(), key, longest=LONGEST, end_id=end_id, **settings)

    return lambda end_id=NEVER, seed=0: np.asarray(continue_prompts(params, jax.random.key(seed), end_id))


def greedy(run: Run) -> np.ndarray:
    """The likeliest continuations, each token from all logits of the whole row, computed anew."""
    logits, params = tiny.logits_of(run), tiny.random_params(run)
    tokens = np.zeros((3, LONGEST), np.int32)
    tokens[:, :PROMPT] = prompts()
    batch = {"tokens": tokens, "starts": np.zeros(tokens.shape, bool), "lengths": np.full(3, LONGEST, np.int32)}
    for position in range(PROMPT, LONGEST):
        tokens[:, position] = logits(params, batch)[:, position - 1].argmax(axis=-1)
    return tokens


@pytest.mark.parametrize("model", MODELS)
def test_the_cache_changes_nothing(model: str) -> None:
    """Temperature 0 gives the tokens that a computation without a cache finds likeliest."""
    run = run_of(model)
    ours = generator(run)()
    np.testing.assert_array_equal(ours, greedy(run))
    assert len(np.unique(ours[:, PROMPT:])) > 5, "not one token again and again"


def test_a_cache_is_filled_in_any_portions() -> None:
    """Hidden states of a prompt at once, and of its tokens in two portions."""
    run = run_of("grouped queries")

    @partial(jax.jit, compiler_options=tiny.QUICK)
    def extend(params: Any, tokens: jax.Array) -> Any:
        model = tiny.merge(run, params)
        whole, cache = model.extend(tokens, model.empty_cache(3, LONGEST), 0)
        first, portion = model.extend(tokens[:, :3], model.empty_cache(3, LONGEST), 0)
        second, portions = model.extend(tokens[:, 3:], portion, 3)
        return whole, cache, first, second, portions

    whole, cache, first, second, portions = extend(tiny.random_params(run), prompts())
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, rtol=1e-5, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), portions, cache)
    assert cache.keys.shape == (2, 3, LONGEST, 2, 16)
    assert not np.asarray(cache.keys[:, :, PROMPT:]).any()


def test_a_row_ends_at_the_end_token() -> None:
    """What follows an end token is end tokens; the other rows go on as if nothing had happened."""
    continue_prompts = generator(run_of("llama"))
    free = continue_prompts()
    end = int(free[0, PROMPT + 2])
    ended = continue_prompts(end)
    for row, expected in zip(ended, free, strict=True):
        ends = np.flatnonzero(expected[PROMPT:] == end)
        stop = PROMPT + ends[0] if len(ends) else LONGEST
        np.testing.assert_array_equal(row[:stop], expected[:stop])
        assert (row[stop:] == end).all()
    assert (ended[0, PROMPT + 2 :] == end).all()
    assert (free[0, PROMPT + 2 :] != end).any()


def test_only_the_tokenizers_tokens_are_chosen() -> None:
    """A model may know more ids than the tokenizer."""
    run = run_of("llama")
    free, limited = generator(run)(), generator(run, vocabulary_size=50)()
    assert free[:, PROMPT:].max() >= 50
    assert limited[:, PROMPT:].max() < 50


def test_the_same_key_gives_the_same_text() -> None:
    """And draws anew for each token: of all but equal probabilities, not the same one again and again."""
    continue_prompts = generator(run_of("llama"), temperature=1e4)
    first, again, other = (continue_prompts(seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first[:, :PROMPT] == prompts()).all()
    drawn = np.concatenate([first[:, PROMPT:], other[:, PROMPT:]])
    assert len(np.unique(drawn)) > 0.8 * drawn.size


PROBABILITIES = np.array([0.05, 0.4, 0.02, 0.3, 0.08, 0.15])
DRAWS = 20_000


def nucleus(temperature: float, top_p: float) -> np.ndarray:
    """The distribution that the arguments ask for: the likeliest tokens until they have top_p, renormalised."""
    sharpened = PROBABILITIES ** (1 / temperature)
    sharpened /= sharpened.sum()
    kept: list[int] = []
    for token in np.argsort(-sharpened):
        if sum(sharpened[kept]) < top_p:
            kept.append(int(token))
    result = np.zeros_like(sharpened)
    result[kept] = sharpened[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.69), (1.0, 0.71), (2.0, 0.5), (1.0, 1e-6)]
)
def test_sampling_has_the_distribution_asked_for(temperature: float, top_p: float) -> None:
    """Frequencies of 20,000 draws within 5 standard deviations; what is outside the nucleus is never drawn."""
    logits = jnp.broadcast_to(jnp.log(PROBABILITIES.astype(np.float32)) + 3, (DRAWS, len(PROBABILITIES)))
    drawn = np.asarray(sample(logits, jax.random.key(1), temperature, top_p))
    assert drawn.dtype == np.int32
    expected = nucleus(temperature, top_p)
    for token, share in enumerate(expected):
        assert abs((drawn == token).mean() - share) <= 5 * np.sqrt(share * (1 - share) / DRAWS)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = jnp.asarray(np.random.default_rng(47).normal(size=(50, 6)), jnp.float32)
    np.testing.assert_array_equal(sample(logits, jax.random.key(1), 0.0, 0.9), np.argmax(logits, axis=-1))
