"""The law *mesh*: the mesh is invisible."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.config.errors import Refused
from tests import tiny

ONE = {"fsdp": 1}
MESHES = {
    "replica 8": {"replica": 8, "fsdp": 1},
    "fsdp 8": {"fsdp": 8},
    "fsdp 2 x tensor 4": {"fsdp": 2, "tensor": 4},
    "replica 2 x fsdp 2 x tensor 2": {"replica": 2, "fsdp": 2, "tensor": 2},
}
# 60 and 500 divide by 4 but not by 8, so fsdp must find another axis; 50,257 (GPT-2) is padded to 393 x 128.
ODD = {
    **tiny.DECODER,
    "vocabulary_size": 50257,
    "embed_dim": 60,
    "layers": 1,
    "head_dim": 16,
    "mlp_dim": 500,
    "tied_embeddings": True,
}
MODELS = {"decoder": tiny.DECODER, "encoder": tiny.ENCODER, "odd sizes": ODD}
LEARNING_RATE = 1e-3
# Adam divides a gradient by its own size: where the true gradient is all but zero, the update is rounding noise. Among
# the 3 million entries of the odd table some are, so there epsilon stands above the noise.
EPSILON = {"decoder": 1e-8, "encoder": 1e-8, "odd sizes": 1e-6}


@cache
def trained(model: str, mesh: str | None) -> tuple[Any, Any, list[dict[str, np.ndarray]]]:
    """Initial parameters, parameters after three updates, and metrics, all on the host."""
    config = tiny.config(
        MODELS[model],
        mesh=MESHES[mesh] if mesh else ONE,
        optimizer={"learning_rate": LEARNING_RATE, "epsilon": EPSILON[model]},
    )
    run = tiny.make_run(config)
    with jax.set_mesh(run.mesh):
        initial = jax.device_get(run.initialize().params)
    state, metrics = tiny.train(run)
    return initial, jax.device_get(state.params), metrics


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_any_mesh_gives_the_run_of_one_device(model: str, mesh: str) -> None:
    """Initial weights bit for bit, loss and gradient norm to 2e-6, weights to 0.1 x learning rate an update."""
    initial, weights, metrics = trained(model, mesh)
    one_initial, one_weights, one_metrics = trained(model, None)
    jax.tree.map(np.testing.assert_array_equal, initial, one_initial)
    for one, other in zip(one_metrics, metrics, strict=True):
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-6)
        np.testing.assert_allclose(other["grad_norm"], one["grad_norm"], rtol=2e-6)
        assert other["valid_tokens"].tolist() == one["valid_tokens"].tolist()

    def close(path: Any, one: np.ndarray, other: np.ndarray, before: np.ndarray) -> None:
        assert np.abs(one - other).max() <= 3 * 0.1 * LEARNING_RATE, path
        if np.linalg.norm(before) > 0:  # biases start at zero: their norm is what three noisy updates made it
            assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(one), path

    jax.tree.map_with_path(close, one_weights, weights, one_initial)


def test_three_updates_change_the_weights() -> None:
    """The comparison above is between weights that have moved."""
    initial, weights, _ = trained("decoder", None)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), initial, weights)
    assert min(jax.tree.leaves(moved)) > LEARNING_RATE / 2


def test_parameters_are_really_sharded() -> None:
    """No device holds a whole matrix on a mesh that shards it, neither of parameters nor of moments."""
    run = tiny.make_run(tiny.config(mesh={"fsdp": 2, "tensor": 4}))
    with jax.set_mesh(run.mesh):
        state = run.initialize()
    for tree in (state.params, state.optimizer_state):
        kernels = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim >= 3]
        assert kernels
        for leaf in kernels:
            assert leaf.addressable_shards[0].data.size == leaf.size // 8


def test_padding_of_the_vocabulary_stays_zero() -> None:
    """Rows beyond the vocabulary are zero after updates, on every mesh: they are in no softmax and get no gradient."""
    for mesh in (None, "fsdp 2 x tensor 4"):
        _, weights, _ = trained("decoder", mesh)
        for table in (weights["embedding"]["tokens"]["table"], weights["head"]["table"]):
            assert table.shape[0] == 256
            assert not table[250:].any()
            assert table[:250].any(axis=1).all()


def test_six_heads_on_two_or_four_tensor_devices() -> None:
    """tensor must divide the heads; the message says which values would."""
    six = {**tiny.DECODER, "heads": 6, "kv_heads": 6, "head_dim": 16}
    run = tiny.make_run(tiny.config(six, mesh={"fsdp": 1, "tensor": 2}))
    one = tiny.make_run(tiny.config(six, mesh=ONE))
    losses = [tiny.train(r, 1)[1][0]["loss"] for r in (run, one)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-6)
    with pytest.raises(Refused, match=r"tensor.*1, 2"):
        tiny.make_run(tiny.config(six, mesh={"fsdp": 1, "tensor": 4}))


def test_large_parameter_that_fsdp_cannot_shard_is_refused() -> None:
    """Small parameters that no axis divides are copied, large ones are refused with the values that would work."""
    odd = {**tiny.DECODER, "embed_dim": 515, "head_dim": 15 * 2, "heads": 3, "kv_heads": 3, "mlp_dim": 1021}
    with pytest.raises(Refused, match=r"fsdp = 8.*1, 5, 103, 515"):
        tiny.make_run(tiny.config(odd, mesh={"fsdp": 8}))
