"""Hugging Face checkpoints <-> jaxscale parameters: mappings of named NumPy arrays, without torch, jax or files.

    model = model_config(json.loads(config_text))
    params = from_huggingface(tensors, model)
    tensors = to_huggingface(params, model)

Nothing is permuted: rotary pairs are the halves of a head in both (`rotate_half` there, `rotate` in model/layers.py).
Matrices change their axes, layers are stacked, vocabularies are padded on the way in and cut on the way out; so a round
trip gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from pydantic import ValidationError

from jaxscale.config.errors import Refused
from jaxscale.config.model import ModelConfig
from jaxscale.interop.families import FAMILIES, Family, Tensor

Parameters = dict[str, Any]
"""A nested dict of arrays, as `TrainState.params`."""
Shapes = dict[str, tuple[int, ...]]

REPORTED = 10
"""Most tensors named in one message."""


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The shape of the model that a Hugging Face `config.json` describes.

    What only training reads (dropout, the scale of initial weights) is not taken over.

    Raises:
        Refused: another `model_type`, a missing key, or a setting that jaxscale does not compute.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise Refused(f"config.json: model_type = {kind!r} is not known; one of {', '.join(FAMILIES)}")
    for key, allowed in family.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise Refused(
                f"config.json: {key} = {config[key]!r}; of model_type {kind!r} jaxscale computes {wanted} only"
            )
    values = {field: config[key] for field, key in family.keys.items() if config.get(key) is not None}
    if family.mlp_multiple is not None and "embed_dim" in values:
        values.setdefault("mlp_dim", family.mlp_multiple * values["embed_dim"])
    missing = [key for field, key in family.keys.items() if field not in values and field not in family.optional]
    if missing:
        raise Refused(f"config.json: of model_type {kind!r} it must give {', '.join(missing)}")
    if family.settings["positions"] == "rope":
        values["rope"] = _rope(config)
    tied = config.get("tie_word_embeddings", family.tied_embeddings)
    try:
        return ModelConfig.model_validate({**family.settings, **values, "tied_embeddings": tied})
    except ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(map(str, wrong["loc"]))
        raise Refused(f"config.json: {family.keys.get(field, field)}: {wrong['msg']}") from None


def from_huggingface(tensors: Mapping[str, np.ndarray], model: ModelConfig) -> Parameters:
    """Parameters of jaxscale, float32, from the tensors of a Hugging Face model of the same shape.

    A tensor that is stored a second time under another name (a tied output matrix) must be the same there.

    Raises:
        Refused: a tensor is missing, left over, or of another shape; or no family has this shape of model.
    """
    kind, family = family_of(model)
    aliases = {alias: name for alias, name in family.aliases(model).items() if alias in tensors}
    listed = list(family.tensors(model))
    own = {name: tensors[name] for name in tensors if name not in aliases}
    _check(own, {name: t.huggingface_shape for t in listed for name in _names(t, model)}, f"tensors of {kind}")
    for alias, name in aliases.items():
        if not np.array_equal(tensors[alias], tensors[name]):
            raise Refused(f"{alias}: the config ties it to {name}, but they differ; set tied_embeddings = false")

    parameters: Parameters = {}
    for tensor in listed:
        layers = [list(tensor.read(tensors[name])) for name in _names(tensor, model)]
        for path, parts in zip(tensor.paths, zip(*layers, strict=True), strict=True):
            _set(parameters, path, np.stack(parts) if _is_stacked(path) else parts[0])
    return parameters


def to_huggingface(parameters: Parameters, model: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of the Hugging Face model with these parameters: the inverse of `from_huggingface`.

    A tied output matrix is stored once, as the embedding.

    Raises:
        Refused: a parameter is missing, left over, or of another shape; or no family has this shape of model.
    """
    _, family = family_of(model)
    listed = list(family.tensors(model))
    arrays = dict(_flatten(parameters))
    stacked = {path: (model.layers,) if _is_stacked(path) else () for t in listed for path in t.paths}
    _check(arrays, {path: stacked[path] + t.shape for t in listed for path in t.paths}, "parameters of the model")
    tensors = {}
    for tensor in listed:
        parts = [arrays[path] if _is_stacked(path) else arrays[path][None] for path in tensor.paths]
        for layer, name in enumerate(_names(tensor, model)):
            tensors[name] = tensor.write([part[layer] for part in parts])
    return tensors


def family_of(model: ModelConfig) -> tuple[str, Family]:
    """The `model_type` that a model is.

    Raises:
        Refused: there is none; the message names what the nearest one has instead.
    """
    differences = {kind: list(_differences(model, family)) for kind, family in FAMILIES.items()}
    nearest = min(differences, key=lambda kind: len(differences[kind]))
    if differences[nearest]:
        raise Refused(
            f"no Hugging Face model has this shape; nearest: {nearest}, with {', '.join(differences[nearest])}"
        )
    return nearest, FAMILIES[nearest]


def _differences(model: ModelConfig, family: Family) -> Iterator[str]:
    """What a model would have to change to be of a family."""
    for field, value in family.settings.items():
        if getattr(model, field) != value:
            yield f"model.{field} = {value!r}"
    if "token_types" in family.keys and not model.token_types:
        yield "model.token_types = 2"
    if "kv_heads" not in family.keys:
        if model.key_value_heads != model.heads:
            yield f"model.kv_heads = {model.heads}"
        if model.heads * model.width_of_head != model.embed_dim:
            yield f"model.head_dim = {model.embed_dim // model.heads}"


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of RopeConfig from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    settings = {"theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0))}
    if kind == "default":
        return settings
    if kind != "llama3":
        raise Refused(f"config.json: rope_type = {kind!r}; jaxscale computes 'default' and 'llama3' only")
    keys = {
        "scaling_factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    }
    missing = [key for key in keys.values() if key not in rope]
    if missing:
        raise Refused(f"config.json: rope_type = 'llama3' needs {', '.join(missing)}")
    return settings | {field: rope[key] for field, key in keys.items()}


def _check(arrays: Mapping[str, np.ndarray], shapes: Shapes, what: str) -> None:
    """Refuses arrays that are not exactly those of `shapes`."""
    wrong = [*_mistakes(arrays, shapes)]
    if wrong:
        more = [f"... and {len(wrong) - REPORTED} more"] if len(wrong) > REPORTED else []
        raise Refused("\n".join([f"these are not the {what}:", *islice(wrong, REPORTED), *more]))


def _mistakes(arrays: Mapping[str, np.ndarray], shapes: Shapes) -> Iterator[str]:
    for name, shape in shapes.items():
        if name not in arrays:
            yield f"{name}: missing; its shape is {list(shape)}"
        elif arrays[name].shape != shape:
            yield f"{name}: has shape {list(arrays[name].shape)}, not {list(shape)}"
    for name in arrays:
        if name not in shapes:
            yield f"{name}: left over, of shape {list(arrays[name].shape)}"


def _names(tensor: Tensor, model: ModelConfig) -> list[str]:
    """Hugging Face's names of a tensor: one for each layer, or just one."""
    layers = model.layers if "{layer}" in tensor.name else 1
    return [tensor.name.format(layer=layer) for layer in range(layers)]


def _is_stacked(path: str) -> bool:
    return path.startswith("layers.")


def _set(parameters: Parameters, path: str, value: np.ndarray) -> None:
    *branches, leaf = path.split(".")
    for branch in branches:
        parameters = parameters.setdefault(branch, {})
    parameters[leaf] = value


def _flatten(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", np.asarray(value)
