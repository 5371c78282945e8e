"""The Hugging Face model families that a Transformer can be, and where each of their tensors lies in its parameters.

A family is a set of settings that its models share, the keys of `config.json` that give the rest, and a list of
`Tensor`s made from a ModelConfig. The list is read in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config.model import ModelConfig


@dataclass(frozen=True)
class Tensor:
    """One tensor of a Hugging Face model and the parameters of jaxscale that it holds."""

    name: str
    """Hugging Face's name; `{layer}` stands for the number of the layer."""
    paths: tuple[str, ...]
    """Dotted paths of the parameters; several lie side by side along the tensor's output axis."""
    shape: tuple[int, ...]
    """Shape of each of the parameters, without the axis of layers."""
    inner: int = 0
    """Leading axes of `shape` that are the input of a matrix; 0 for a vector."""
    output_first: bool = False
    """Whether the tensor is `[output, input]` (torch.nn.Linear) rather than `[input, output]` as in jaxscale."""
    rows: int | None = None
    """First rows that exist at Hugging Face; the rest is jaxscale's padding, which is zero. None: all."""

    @property
    def huggingface_shape(self) -> tuple[int, ...]:
        """Shape of the tensor: axes of heads and the like joined, without padding."""
        *inputs, outputs = self._flat
        shape = (*inputs, outputs * len(self.paths))
        if self.output_first:
            return shape[::-1]
        return shape if self.rows is None else (self.rows, *shape[1:])

    def read(self, tensor: np.ndarray) -> Iterator[np.ndarray]:
        """The parameters that the tensor holds, float32, in the order of `paths`."""
        for part in np.split(tensor.astype(np.float32), len(self.paths), axis=self._output_axis):
            part = part.T if self.output_first else part
            padding = 0 if self.rows is None else self.shape[0] - self.rows
            yield np.pad(part, [(0, padding)] + [(0, 0)] * (part.ndim - 1)).reshape(self.shape)

    def write(self, parameters: list[np.ndarray]) -> np.ndarray:
        """The tensor that holds the parameters: the inverse of `read`."""
        parts = [parameter.reshape(self._flat)[: self.rows] for parameter in parameters]
        parts = [part.T if self.output_first else part for part in parts]
        return np.ascontiguousarray(np.concatenate(parts, axis=self._output_axis))

    @property
    def _flat(self) -> tuple[int, ...]:
        """Shape of a parameter as a matrix `(input, output)` or a vector `(output,)`."""
        inputs = (math.prod(self.shape[: self.inner]),) if self.inner else ()
        return (*inputs, math.prod(self.shape[self.inner :]))

    @property
    def _output_axis(self) -> int:
        return 0 if self.output_first else -1


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face."""

    settings: Mapping[str, Any]
    """Fields of ModelConfig that all its models share."""
    keys: Mapping[str, str]
    """Field of ModelConfig -> key of config.json that gives it."""
    optional: frozenset[str]
    """Fields that may be left open there, and then mean the same to ModelConfig."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys of config.json that change what is computed -> the values that jaxscale computes, the default first."""
    tensors: Callable[[ModelConfig], Iterator[Tensor]]
    aliases: Callable[[ModelConfig], dict[str, str]]
    """Second names that a model may store a shared tensor under -> its first name."""
    tied_embeddings: bool = False
    """Whether the output matrix is tied where config.json leaves it open."""
    mlp_multiple: int | None = None
    """mlp_dim / embed_dim where config.json leaves mlp_dim open; None: it may not."""


DECODER = {"causal": True, "norm_placement": "pre", "token_types": 0, "embedding_norm": False, "head_transform": False}
LLAMA_SETTINGS = DECODER | {"positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False}
LLAMA_KEYS = {
    "vocabulary_size": "vocab_size",
    "embed_dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
}


def llama_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """Llama and Qwen-3, whose heads are also normalised."""
    embed, heads, kv_heads, head_dim = model.embed_dim, model.heads, model.key_value_heads, model.width_of_head
    yield _vocabulary("model.embed_tokens.weight", "embedding.tokens.table", model)
    block = "model.layers.{layer}"
    yield from _norm(f"{block}.input_layernorm", "layers.attention_norm", model)
    for name, path, outer in (("q", "query", heads), ("k", "key", kv_heads), ("v", "value", kv_heads)):
        yield from _linear(
            f"{block}.self_attn.{name}_proj", f"layers.attention.{path}", (embed,), (outer, head_dim), model
        )
    yield from _linear(f"{block}.self_attn.o_proj", "layers.attention.output", (heads, head_dim), (embed,), model)
    if model.query_key_norm:
        yield Tensor(f"{block}.self_attn.q_norm.weight", ("layers.attention.query_norm.scale",), (head_dim,))
        yield Tensor(f"{block}.self_attn.k_norm.weight", ("layers.attention.key_norm.scale",), (head_dim,))
    yield from _norm(f"{block}.post_attention_layernorm", "layers.mlp_norm", model)
    yield from _linear(f"{block}.mlp.gate_proj", "layers.mlp.gate", (embed,), (model.mlp_dim,), model)
    yield from _linear(f"{block}.mlp.up_proj", "layers.mlp.up", (embed,), (model.mlp_dim,), model)
    yield from _linear(f"{block}.mlp.down_proj", "layers.mlp.down", (model.mlp_dim,), (embed,), model)
    yield from _norm("model.norm", "final_norm", model)
    if not model.tied_embeddings:
        yield _vocabulary("lm_head.weight", "head.table", model)


def llama_aliases(model: ModelConfig) -> dict[str, str]:
    """The output matrix, if it is tied."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if model.tied_embeddings else {}


def gpt2_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """GPT-2: queries, keys and values in one matrix; matrices are `[input, output]`."""
    embed, heads, head_dim, mlp = model.embed_dim, model.heads, model.width_of_head, model.mlp_dim

    def matrix(name: str, paths: tuple[str, ...], inner: tuple[int, ...], outer: tuple[int, ...]) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", tuple(f"{path}.kernel" for path in paths), (*inner, *outer), inner=len(inner))
        yield Tensor(f"{name}.bias", tuple(f"{path}.bias" for path in paths), outer)

    yield _vocabulary("transformer.wte.weight", "embedding.tokens.table", model)
    yield Tensor("transformer.wpe.weight", ("embedding.positions.table",), (model.max_positions or 0, embed), inner=1)
    block = "transformer.h.{layer}"
    yield from _norm(f"{block}.ln_1", "layers.attention_norm", model)
    projections = tuple(f"layers.attention.{path}" for path in ("query", "key", "value"))
    yield from matrix(f"{block}.attn.c_attn", projections, (embed,), (heads, head_dim))
    yield from matrix(f"{block}.attn.c_proj", ("layers.attention.output",), (heads, head_dim), (embed,))
    yield from _norm(f"{block}.ln_2", "layers.mlp_norm", model)
    yield from matrix(f"{block}.mlp.c_fc", ("layers.mlp.up",), (embed,), (mlp,))
    yield from matrix(f"{block}.mlp.c_proj", ("layers.mlp.down",), (mlp,), (embed,))
    yield from _norm("transformer.ln_f", "final_norm", model)
    if not model.tied_embeddings:
        yield _vocabulary("lm_head.weight", "head.table", model)


def gpt2_aliases(model: ModelConfig) -> dict[str, str]:
    """The output matrix, if it is tied."""
    return {"lm_head.weight": "transformer.wte.weight"} if model.tied_embeddings else {}


def bert_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """BERT with its masked-LM head, without the pooler and the next-sentence head."""
    embed, heads, head_dim, mlp = model.embed_dim, model.heads, model.width_of_head, model.mlp_dim
    table = "bert.embeddings.{}_embeddings.weight"
    yield _vocabulary(table.format("word"), "embedding.tokens.table", model)
    positions = (model.max_positions or 0, embed)
    yield Tensor(table.format("position"), ("embedding.positions.table",), positions, inner=1)
    yield Tensor(table.format("token_type"), ("embedding.types.table",), (model.token_types, embed), inner=1)
    yield from _norm("bert.embeddings.LayerNorm", "embedding.norm", model)
    block = "bert.encoder.layer.{layer}"
    for path in ("query", "key", "value"):
        yield from _linear(
            f"{block}.attention.self.{path}", f"layers.attention.{path}", (embed,), (heads, head_dim), model
        )
    yield from _linear(f"{block}.attention.output.dense", "layers.attention.output", (heads, head_dim), (embed,), model)
    yield from _norm(f"{block}.attention.output.LayerNorm", "layers.attention_norm", model)
    yield from _linear(f"{block}.intermediate.dense", "layers.mlp.up", (embed,), (mlp,), model)
    yield from _linear(f"{block}.output.dense", "layers.mlp.down", (mlp,), (embed,), model)
    yield from _norm(f"{block}.output.LayerNorm", "layers.mlp_norm", model)
    head = "cls.predictions"
    yield from _linear(f"{head}.transform.dense", "head.dense", (embed,), (embed,), model)
    yield from _norm(f"{head}.transform.LayerNorm", "head.norm", model)
    yield Tensor(f"{head}.bias", ("head.bias",), (model.padded_vocabulary,), rows=model.vocabulary_size)
    if not model.tied_embeddings:
        yield _vocabulary(f"{head}.decoder.weight", "head.table", model)


def bert_aliases(model: ModelConfig) -> dict[str, str]:
    """The bias of the head, which is always there twice, and the output matrix, if it is tied."""
    aliases = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    tied = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}
    return aliases | tied if model.tied_embeddings else aliases


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        settings=LLAMA_SETTINGS | {"query_key_norm": False},
        keys=LLAMA_KEYS,
        optional=frozenset({"kv_heads", "head_dim"}),
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        tensors=llama_tensors,
        aliases=llama_aliases,
    ),
    "qwen3": Family(
        settings=LLAMA_SETTINGS | {"query_key_norm": True},
        keys=LLAMA_KEYS,
        optional=frozenset(),
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
        tensors=llama_tensors,
        aliases=llama_aliases,
    ),
    "gpt2": Family(
        settings=DECODER
        | {"positions": "learned", "norm": "layer", "activation": "gelu_tanh", "bias": True, "query_key_norm": False},
        keys={
            "vocabulary_size": "vocab_size",
            "embed_dim": "n_embd",
            "layers": "n_layer",
            "heads": "n_head",
            "mlp_dim": "n_inner",
            "max_positions": "n_positions",
            "norm_epsilon": "layer_norm_epsilon",
        },
        optional=frozenset(),
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        tensors=gpt2_tensors,
        aliases=gpt2_aliases,
        tied_embeddings=True,
        mlp_multiple=4,
    ),
    "bert": Family(
        settings={
            "causal": False,
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "post",
            "activation": "gelu",
            "bias": True,
            "query_key_norm": False,
            "embedding_norm": True,
            "head_transform": True,
        },
        keys={
            "vocabulary_size": "vocab_size",
            "embed_dim": "hidden_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "mlp_dim": "intermediate_size",
            "max_positions": "max_position_embeddings",
            "token_types": "type_vocab_size",
            "norm_epsilon": "layer_norm_eps",
        },
        optional=frozenset(),
        fixed={"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
        tensors=bert_tensors,
        aliases=bert_aliases,
        tied_embeddings=True,
    ),
}
"""By `model_type`."""


def _vocabulary(name: str, path: str, model: ModelConfig) -> Tensor:
    """A table `[vocabulary, embed]`, padded in jaxscale only."""
    return Tensor(name, (path,), (model.padded_vocabulary, model.embed_dim), inner=1, rows=model.vocabulary_size)


def _linear(
    name: str, path: str, inner: tuple[int, ...], outer: tuple[int, ...], model: ModelConfig
) -> Iterator[Tensor]:
    """A torch.nn.Linear."""
    yield Tensor(f"{name}.weight", (f"{path}.kernel",), (*inner, *outer), inner=len(inner), output_first=True)
    if model.bias:
        yield Tensor(f"{name}.bias", (f"{path}.bias",), outer)


def _norm(name: str, path: str, model: ModelConfig) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (f"{path}.scale",), (model.embed_dim,))
    if model.norm == "layer":
        yield Tensor(f"{name}.bias", (f"{path}.bias",), (model.embed_dim,))
