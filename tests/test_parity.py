"""The model and its weights against Hugging Face's: the same logits at every position, the same tensors back again.

Stored outputs (tests/parity/make_outputs.py) are compared always; where torch and transformers are installed (the extra
`parity`), models are also run side by side, in both directions.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.config.errors import Refused
from jaxscale.config.load import load
from jaxscale.config.model import ModelConfig
from jaxscale.flops import parameter_count
from jaxscale.interop.huggingface import family_of, from_huggingface, model_config, to_huggingface
from jaxscale.model.attention import Mask
from jaxscale.model.layers import Parameter
from jaxscale.model.transformer import Transformer
from jaxscale.precision import Precision
from tests.parity import make_outputs
from tests.parity.make_outputs import CASES, OUTPUTS, weight

TOLERANCE = 1e-4


def case(name: str) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The model of a case and its Hugging Face tensors."""
    model = model_config(json.loads((OUTPUTS / f"{name}.json").read_text()))
    return model, huggingface_tensors(model)


def huggingface_tensors(model: ModelConfig) -> dict[str, np.ndarray]:
    tensors = {}
    for tensor in family_of(model)[1].tensors(model):
        for layer in range(model.layers if "{layer}" in tensor.name else 1):
            name = tensor.name.format(layer=layer)
            tensors[name] = weight(name, tensor.huggingface_shape)
    return tensors


def abstract_model(model: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """Structure of a float32 Transformer, and shape and dtype of its parameters."""
    precision = Precision(compute=jnp.dtype(jnp.float32))
    transformer = nnx.eval_shape(lambda: Transformer(nnx.Rngs(params=0), model, precision))
    structure, parameters = nnx.split(transformer, Parameter)
    return structure, nnx.to_pure_dict(parameters)


def logits(model: ModelConfig, parameters: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Logits `[rows, sequence, vocabulary] float32` of jaxscale."""
    structure, _ = abstract_model(model)

    @jax.jit
    def run(parameters: dict[str, Any]) -> jax.Array:
        transformer = nnx.merge(structure, parameters)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return transformer.logits(transformer(jnp.asarray(tokens), positions, Mask(model.causal)))

    return np.asarray(run(parameters))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str) -> None:
    stored = np.load(OUTPUTS / f"{name}.npz")
    model, tensors = case(name)
    ours = logits(model, from_huggingface(tensors, model), stored["tokens"])
    np.testing.assert_allclose(ours, stored["logits"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_stored_config_is_that_of_the_script(name: str) -> None:
    assert json.loads((OUTPUTS / f"{name}.json").read_text()) == CASES[name][0], (
        "run tests/parity/make_outputs.py again"
    )


@pytest.mark.parametrize("name", CASES)
def test_parameters_have_the_shapes_of_the_model(name: str) -> None:
    model, tensors = case(name)
    read = jax.tree.map(lambda x: (x.shape, x.dtype), from_huggingface(tensors, model))
    made = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_model(model)[1])
    assert read == made


@pytest.mark.parametrize("name", CASES)
def test_round_trip_gives_the_same_bits(name: str) -> None:
    model, tensors = case(name)
    parameters = from_huggingface(tensors, model)
    back = to_huggingface(parameters, model)
    assert back.keys() == tensors.keys()
    for tensor, value in tensors.items():
        np.testing.assert_array_equal(back[tensor], value, err_msg=tensor)
    table = parameters["embedding"]["tokens"]["table"]
    assert table.shape[0] % 128 == 0
    assert not table[model.vocabulary_size :].any(), "padding is zero"


def test_a_tied_matrix_is_stored_once_and_its_second_name_must_agree() -> None:
    model, tensors = case("qwen3")
    embedding = tensors["model.embed_tokens.weight"]
    assert model.tied_embeddings
    assert "lm_head.weight" not in to_huggingface(from_huggingface(tensors, model), model)
    assert sum(x.size for x in tensors.values()) == parameter_count(model)

    from_huggingface(tensors | {"lm_head.weight": embedding.copy()}, model)
    with pytest.raises(Refused, match=r"lm_head\.weight.*model\.embed_tokens\.weight.*differ"):
        from_huggingface(tensors | {"lm_head.weight": embedding + 1}, model)

    untied, separate = case("llama")
    assert not untied.tied_embeddings
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= to_huggingface(
        from_huggingface(separate, untied), untied
    ).keys()
    assert sum(x.size for x in separate.values()) == parameter_count(untied)


def test_wrong_tensors_are_refused_by_name_and_shape() -> None:
    model, tensors = case("gpt2")
    name = "transformer.h.1.attn.c_attn.weight"
    missing = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(Refused, match=r"h\.1\.attn\.c_attn\.weight: missing; its shape is \[48, 144\]"):
        from_huggingface(missing, model)
    with pytest.raises(Refused, match=r"c_attn\.weight: has shape \[144, 48\], not \[48, 144\]"):
        from_huggingface(tensors | {name: tensors[name].T}, model)
    with pytest.raises(Refused, match=r"transformer\.h\.2\.ln_1\.weight: left over, of shape \[48\]"):
        from_huggingface(tensors | {"transformer.h.2.ln_1.weight": np.ones(48, np.float32)}, model)
    with pytest.raises(Refused, match=r"and \d+ more"):
        from_huggingface({}, model)

    parameters = from_huggingface(tensors, model)
    parameters["head"] = {"table": parameters["embedding"]["tokens"]["table"]}
    del parameters["layers"]["mlp"]["up"]["bias"]
    with pytest.raises(Refused) as refused:
        to_huggingface(parameters, model)
    assert "layers.mlp.up.bias: missing; its shape is [2, 192]" in str(refused.value)
    assert "head.table: left over, of shape [256, 48]" in str(refused.value)


LLAMA_3_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BERT = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


@pytest.mark.parametrize(
    ("config", "ours"),
    [(LLAMA_3_8B, "llama3/8b"), (GPT2, "gpt2/124m"), (BERT, "bert/base")],
    ids=["llama", "gpt2", "bert"],
)
def test_published_configs_are_those_of_the_repository(config: dict[str, Any], ours: str) -> None:
    model = load(f"configs/{ours}.toml").model
    training_only = {field: getattr(model, field) for field in ("remat", "dropout", "initializer_scale", "unroll")}
    assert model_config(config).model_copy(update=training_only).key_value_heads == model.key_value_heads
    assert model_config(config).model_copy(update={**training_only, "kv_heads": model.kv_heads}) == model


def test_rope_scaling_is_read_in_the_notations_of_both_generations() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = model_config(LLAMA_3_8B | {"rope_scaling": scaling})
    new = model_config(LLAMA_3_8B | {"rope_parameters": scaling | {"rope_theta": 500000.0}})
    assert old == new
    assert (old.rope.theta, old.rope.scaling_factor, old.rope.original_length) == (500_000.0, 8.0, 8192)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'.*llama, qwen3, gpt2, bert"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
        ({"attention_bias": True}, "attention_bias = True.*False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"hidden_size": None}, "must give hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size: Input should be a valid integer"),
    ],
)
def test_configs_that_jaxscale_cannot_compute_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        model_config(LLAMA_3_8B | change)


def test_a_shape_without_a_family_is_refused_with_the_nearest() -> None:
    model, _ = case("gpt2")
    with pytest.raises(Refused, match=r"nearest: gpt2, with model\.kv_heads = 4"):
        to_huggingface({}, model.model_copy(update={"kv_heads": 2}))
    with pytest.raises(Refused, match=r"nearest: llama, with model\.bias = False"):
        to_huggingface({}, case("llama")[0].model_copy(update={"bias": True}))


@pytest.mark.parametrize("name", CASES)
def test_exported_weights_give_the_same_logits_in_transformers(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config, shape = CASES[name]
    model = model_config(config)
    noise = np.random.default_rng(0)
    parameters = jax.tree.map(lambda x: noise.normal(0, 0.2, x.shape).astype(np.float32), abstract_model(model)[1])
    for table in vocabulary_tables(parameters):
        table[model.vocabulary_size :] = 0
    tokens = make_outputs.tokens(f"{name} live", model.vocabulary_size, shape)
    exported = make_outputs.make_model(config, to_huggingface(parameters, model))
    theirs = make_outputs.logits(exported, tokens)
    np.testing.assert_allclose(logits(model, parameters, tokens), theirs, rtol=TOLERANCE, atol=TOLERANCE)

    state = {key: value.numpy() for key, value in exported.state_dict().items()}
    read = from_huggingface(state, model)
    jax.tree.map(np.testing.assert_array_equal, read, parameters)


def vocabulary_tables(parameters: dict[str, Any]) -> list[np.ndarray]:
    """The parameters that are padded along their first axis."""
    head = parameters.get("head", {})
    return [parameters["embedding"]["tokens"]["table"], *(head[key] for key in ("table", "bias") if key in head)]
