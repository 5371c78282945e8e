"""Attention: exact against dense float64, never a whole score matrix, and no look at what the mask hides."""

from __future__ import annotations

import math
import re
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config.errors import Refused
from jaxscale.config.model import ModelConfig
from jaxscale.data.packing import open_view
from jaxscale.model.attention import attention, choose_implementation
from jaxscale.model.blockwise import BLOCK, Mask, blockwise
from jaxscale.model.objective import Examples
from jaxscale.train.build import Run
from tests import tiny
from tests.test_store import write


class Case(NamedTuple):
    """One shape and mask of attention."""

    length: int
    causal: bool = True
    documents: bool = False
    padded: bool = False
    heads: int = 2
    kv_heads: int = 1
    rows: int = 2

    def __str__(self) -> str:
        marks = {"documents": self.documents, "padded": self.padded, f"{self.heads}:{self.kv_heads}": True}
        direction = "causal" if self.causal else "encoder"
        return " ".join([str(self.length), direction, *(mark for mark, holds in marks.items() if holds)])


# Bands of two blocks (and one of one) where it is causal, one of 17 where it is not: loops; then a rest.
LONG = [Case(2200, causal, documents=True, heads=1, kv_heads=1, rows=1) for causal in (True, False)]
CASES = [
    *(Case(length, documents=True) for length in (1, 7, 128, 200, 256, 500)),
    *(Case(length, causal=False, padded=True) for length in (1, 7, 128, 200, 256, 500)),
    Case(200),
    Case(200, padded=True),
    Case(200, causal=False, heads=4, kv_heads=4),
    Case(200, causal=False, documents=True, heads=6, kv_heads=2),
    *LONG,
]


def inputs(case: Case, head_dim: int = 8) -> dict[str, np.ndarray]:
    """Queries, keys, values and a gradient of the output, all of the order of 1."""
    random = np.random.default_rng([11, *map(int, case)])
    query, key = ((case.rows, case.length, heads, head_dim) for heads in (case.heads, case.kv_heads))
    shapes = {"queries": query, "keys": key, "values": key, "gradient": query}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def document_numbers(case: Case) -> np.ndarray:
    """`[rows, sequence]`: documents of some 40 tokens, numbered from 0."""
    starts = np.random.default_rng([13, *map(int, case)]).random((case.rows, case.length)) < 1 / 40
    return np.cumsum(starts, axis=1).astype(np.int32)


def row_lengths(case: Case) -> np.ndarray:
    """`[rows]`: a padded row and a full one."""
    return np.array([case.length - case.length // 3, case.length], np.int32)[: case.rows]


def masks(case: Case) -> tuple[Mask, np.ndarray]:
    """The mask of a case, and the same as `[rows, sequence, sequence] bool`, written out."""
    index = np.arange(case.length)
    seen = np.ones((case.rows, case.length, case.length), bool)
    segments = lengths = None
    if case.causal:
        seen &= index[:, None] >= index
    if case.documents:
        segments = document_numbers(case)
        seen &= segments[:, :, None] == segments[:, None, :]
    if case.padded:
        lengths = row_lengths(case)
        seen &= index < lengths[:, None, None]
    return Mask(case.causal, *(None if x is None else jnp.asarray(x) for x in (segments, lengths))), seen


def dense(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, gradient: np.ndarray, seen: np.ndarray
) -> dict[str, np.ndarray]:
    """The output and the gradients in float64, from the definition, a head at a time."""
    q, k, v, g = (np.float64(x) for x in (queries, keys, values, gradient))
    group, scale = q.shape[2] // k.shape[2], 1 / math.sqrt(q.shape[3])
    result = {name: np.zeros_like(x) for name, x in (("output", q), ("queries", q), ("keys", k), ("values", v))}
    for row in range(len(q)):
        for head in range(q.shape[2]):
            q1, g1 = q[row, :, head], g[row, :, head]
            k1, v1 = k[row, :, head // group], v[row, :, head // group]
            scores = np.where(seen[row], q1 @ k1.T * scale, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            d_weights = g1 @ v1.T
            d_scores = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True)) * scale
            result["output"][row, :, head] = weights @ v1
            result["queries"][row, :, head] = d_scores @ k1
            result["keys"][row, :, head // group] += d_scores.T @ q1
            result["values"][row, :, head // group] += weights.T @ g1
    return result


def output_and_gradients(arrays: dict[str, jax.Array], mask: Mask) -> dict[str, jax.Array]:
    """What `dense` gives, by the blockwise implementation."""
    names = ("queries", "keys", "values")
    output, pull_back = jax.vjp(lambda *x: blockwise(*x, mask), *(arrays[name] for name in names))
    return {"output": output, **dict(zip(names, pull_back(arrays["gradient"]), strict=True))}


@cache
def compiled(case: Case) -> jax.stages.Compiled:
    """`output_and_gradients` for the shapes of a case."""
    return jax.jit(output_and_gradients).lower(inputs(case), masks(case)[0]).compile(tiny.QUICK)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blockwise_is_exact(case: Case) -> None:
    """Output and gradients are those of the definition; padding takes part in neither."""
    arrays, (mask, seen) = inputs(case), masks(case)
    real = np.ones((case.rows, case.length), bool)
    if case.padded:
        real = np.arange(case.length) < row_lengths(case)[:, None]
        arrays["gradient"] *= real[:, :, None, None]
    ours, exact = compiled(case)(arrays, mask), dense(**arrays, seen=seen)
    for name, expected in exact.items():
        assert ours[name].dtype == np.float32
        np.testing.assert_allclose(np.asarray(ours[name])[real], expected[real], rtol=2e-5, atol=2e-5, err_msg=name)
    for name in ("queries", "keys", "values"):
        assert not np.asarray(ours[name])[~real].any(), f"padding has a gradient for its {name}"


def test_bfloat16_is_as_exact_as_its_rounding() -> None:
    """Scores and sums are float32: only inputs, weights and outputs are rounded to 8 bits."""
    case = Case(200, documents=True)
    arrays, (mask, seen) = inputs(case, head_dim=128), masks(case)
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    ours = jax.jit(output_and_gradients)(arrays, mask)
    exact = dense(**{name: np.asarray(x, np.float64) for name, x in arrays.items()}, seen=seen)
    for name, expected in exact.items():
        assert ours[name].dtype == jnp.bfloat16
        error = np.asarray(ours[name], np.float64) - expected
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(expected), name
        assert np.abs(error).max() < 0.05 * np.abs(expected).max(), name


@pytest.mark.parametrize("case", LONG, ids=str)
def test_no_pass_holds_a_score_matrix(case: Case) -> None:
    """Neither what is traced nor what XLA makes of it, forward and backward, has sequence x sequence elements."""
    longer = case._replace(length=4096)
    traced = tiny.traced_shapes(output_and_gradients, inputs(longer), masks(longer)[0])
    program = [shape.split(",") for shape in re.findall(r"[a-z0-9]+\[([\d,]+)\]", compiled(case).as_text())]
    for length, shapes in ((4096, traced), (case.length, [tuple(map(int, shape)) for shape in program])):
        assert 0.9 * BLOCK * length <= max(map(math.prod, shapes)) <= length**2 / 7


FIRST, LENGTH = 150, 300
"""Tokens of document A, and of the row: neither boundary is one of blocks."""
MODELS = {
    "decoder": {**tiny.DECODER, "heads": 8, "kv_heads": 4, "head_dim": 8, "layers": 2},
    "encoder": {**tiny.ENCODER, "max_positions": LENGTH},
}
MESHES = {"one device": {"fsdp": 1}, "fsdp 2 x tensor 4": {"fsdp": 2, "tensor": 4}}


def two_documents(first_tokens: int) -> dict[str, np.ndarray]:
    """Rows of A (ids of its own range, by `first_tokens`) and B (ids from 100 on)."""
    a = np.random.default_rng([17, first_tokens]).integers(0, 100, (2, FIRST))
    b = np.random.default_rng(19).integers(100, 249, (2, LENGTH - FIRST))
    starts = np.zeros((2, LENGTH), bool)
    starts[:, [0, FIRST]] = True
    return {
        "tokens": np.concatenate([a, b], axis=1).astype(np.int32),
        "starts": starts,
        "lengths": np.full(2, LENGTH, np.int32),
    }


def only_second(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Document B alone in its row, at its beginning."""
    rows = {name: np.roll(batch[name], -FIRST, axis=1) for name in ("tokens", "starts")}
    return rows | {"lengths": np.full(2, LENGTH - FIRST, np.int32)}


def two_document_run(model: str, mesh: str, **data: Any) -> Run:
    return tiny.make_run(tiny.config(MODELS[model], mesh=MESHES[mesh], batch={"global_size": 2}, data=data))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_documents_do_not_see_each_other(model: str, mesh: str) -> None:
    """Another document A changes no bit of B's logits, which are those of B alone in a row, at positions from 0."""
    run = two_document_run(model, mesh)
    logits, params = tiny.logits_of(run), tiny.random_params(run)
    one, other = (logits(params, two_documents(seed))[:, FIRST:] for seed in (1, 2))
    np.testing.assert_array_equal(one, other)
    alone = logits(params, only_second(two_documents(1)))[:, : LENGTH - FIRST]
    np.testing.assert_allclose(one, alone, rtol=1e-5, atol=1e-5)


def test_documents_see_each_other_where_asked() -> None:
    """With data.attend_across_documents, what the test above calls equal differs."""
    run = two_document_run("decoder", "one device", attend_across_documents=True)
    logits, params = tiny.logits_of(run), tiny.random_params(run)
    one, other = (logits(params, two_documents(seed))[:, FIRST:] for seed in (1, 2))
    assert np.abs(one - other).max() > 1e-2
    alone = logits(params, only_second(two_documents(1)))[:, : LENGTH - FIRST]
    assert np.abs(one - alone).max() > 1e-2


@cache
def loss_and_gradients(model: str, across: bool, implementation: str) -> tuple[Any, Any, Any]:
    """Parameters, `host batch -> examples`, and `(params, examples) -> (loss, gradients)`, for rows of LENGTH."""
    untied = {**MODELS[model], "tied_embeddings": False, "attention": implementation}
    objective = {} if model == "decoder" else {"random_share": 0.0}  # a random token of B could be one of A's
    data = {"attend_across_documents": across}
    run = tiny.make_run(tiny.config(untied, mesh={"fsdp": 1}, batch={"global_size": 2}, data=data, objective=objective))

    def loss(params: Any, examples: Examples) -> jax.Array:
        return run.objective.loss(tiny.merge(run, params), examples, None)[0]

    return (
        tiny.random_params(run),
        jax.jit(partial(tiny.examples, run)),
        jax.jit(jax.value_and_grad(loss), compiler_options=tiny.QUICK),
    )


@pytest.mark.parametrize("model", MODELS)
def test_no_gradient_crosses_documents(model: str) -> None:
    """The gradient of B's loss for the embeddings of A's tokens is exactly 0, that for B's own is not."""
    params, make_examples, gradients = loss_and_gradients(model, False, "blockwise")
    examples = make_examples(two_documents(1))
    only_b = examples._replace(weights=examples.weights.at[:, :FIRST].set(0))
    table = np.asarray(gradients(params, only_b)[1]["embedding"]["tokens"]["table"])
    assert not table[:100].any()
    assert np.abs(table[100:]).max() > 0


def serves_documents_here(implementation: str) -> bool:
    """Whether an implementation can honour a document mask on this process's devices."""
    try:
        choose_implementation(
            implementation, jax.default_backend(), documents=True, dtype=jnp.dtype(jnp.float32), head_dim=64
        )
    except Refused:
        return False
    return implementation != "auto"


IMPLEMENTATIONS = [
    name for name in get_args(ModelConfig.model_fields["attention"].annotation) if serves_documents_here(name)
]
PIECES = (90, 70, 60, 40, 25)
"""Lengths of what best fit puts into the second row below; the second of them is the rest of a long document."""


def packed_batch(folder: Path, changed: int | None = None) -> dict[str, np.ndarray]:
    """Two packed rows: the beginning of a long document, then `PIECES` and padding; one piece has other content."""
    content = [
        np.random.default_rng([23, number, number == changed]).integers(0, 249, length)
        for number, length in enumerate(PIECES)
    ]
    content[1] = np.concatenate([np.random.default_rng(29).integers(0, 249, LENGTH), content[1]])
    view = open_view(write(folder / f"changed {changed}", content[::-1], 10**6), LENGTH, "best_fit")
    batch = view.gather(np.arange(2))._asdict()
    assert batch["lengths"].tolist() == [LENGTH, sum(PIECES)]
    return batch


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_packed_pieces_do_not_see_each_other(tmp_path: Path, model: str, implementation: str) -> None:
    """Other content of a piece of a packed row changes no bit of the others' logits, nor of their loss's gradients."""
    asked = {**MODELS[model], "attention": implementation}
    run = tiny.make_run(tiny.config(asked, mesh={"fsdp": 1}, batch={"global_size": 2}))
    logits, logits_params = tiny.logits_of(run), tiny.random_params(run)
    params, make_examples, gradients = loss_and_gradients(model, False, implementation)
    batch = packed_batch(tmp_path)
    for number, length in enumerate(PIECES):
        first = sum(PIECES[:number])
        own, other = slice(first, first + length), packed_batch(tmp_path, changed=number)
        assert (other["tokens"] != batch["tokens"]).any(axis=1).tolist() == [False, True]
        ours, theirs = (logits(logits_params, rows) for rows in (batch, other))
        assert np.abs(ours[1, own] - theirs[1, own]).max() > 1e-2
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(*(np.delete(rows[1], own, axis=0) for rows in (ours, theirs)))
        of_others = [
            gradients(params, examples._replace(weights=examples.weights.at[1, own].set(0)))
            for examples in (make_examples(batch), make_examples(other))
        ]
        jax.tree.map(np.testing.assert_array_equal, *of_others)


@pytest.mark.parametrize("across", [False, True], ids=["documents", "lengths"])
@pytest.mark.parametrize("model", MODELS)
def test_content_of_padding_changes_nothing(model: str, across: bool) -> None:
    """Other ids in the padding: the same loss and gradients, bit for bit."""
    params, make_examples, gradients = loss_and_gradients(model, across, "blockwise")
    batch = two_documents(1) | {"lengths": np.array([FIRST, 5], np.int32)}
    real = np.arange(LENGTH) < batch["lengths"][:, None]
    other = {**batch, "tokens": np.where(real, batch["tokens"], two_documents(2)["tokens"][:, ::-1])}
    assert (other["tokens"] != batch["tokens"]).sum() > LENGTH
    results = [gradients(params, make_examples(x)) for x in (batch, other)]
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert results[0][0] > 1


def test_choice_of_an_implementation() -> None:
    """`auto` takes cuDNN on GPUs, in half precision, without a document mask; asked for elsewhere, it is refused."""
    half, full = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    for asked in ("auto", "cudnn"):
        assert choose_implementation(asked, "gpu", documents=False, dtype=half, head_dim=64) == "cudnn"
        assert (
            choose_implementation(asked, "gpu", documents=False, dtype=jnp.dtype(jnp.float16), head_dim=64) == "cudnn"
        )
    assert choose_implementation("blockwise", "gpu", documents=False, dtype=half, head_dim=64) == "blockwise"
    obstacles: list[tuple[str, bool, jnp.dtype, int, str]] = [
        ("cpu", False, half, 64, "cpu"),
        ("gpu", True, half, 64, "data.attend_across_documents"),
        ("gpu", False, full, 64, "precision.compute is float32"),
        ("gpu", False, half, 160, "heads are 160 wide, it takes multiples of 8 up to 128"),
        ("gpu", False, half, 60, "heads are 60 wide"),
    ]
    for platform, documents, dtype, head_dim, reason in obstacles:
        found = choose_implementation("auto", platform, documents=documents, dtype=dtype, head_dim=head_dim)
        assert found == "blockwise"
        with pytest.raises(Refused, match=rf'model\.attention = "cudnn".*{re.escape(reason)}.*"auto" or "blockwise"'):
            choose_implementation("cudnn", platform, documents=documents, dtype=dtype, head_dim=head_dim)
    with pytest.raises(Refused, match=r"cpu devices; data.*; precision"):
        choose_implementation("cudnn", "cpu", documents=True, dtype=full, head_dim=64)


def test_cudnn_is_refused_where_it_is_called() -> None:
    """The call itself refuses too, on the devices of this process."""
    case = Case(7)
    arrays = inputs(case)
    with pytest.raises(Refused, match="cudnn"):
        attention(arrays["queries"], arrays["keys"], arrays["values"], Mask(True), implementation="cudnn")
