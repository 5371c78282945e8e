"""The written formula: parameters of a model, and the floating-point operations of training on one token.

Parameters are counted in closed form, without the padding of the vocabulary.

FLOPs of one token, forward and backward:

    6 x P  +  12 x layers x heads x head_dim x A

* P, the matmul parameters, are the elements of the matrices a token is multiplied with: attention, MLP and the output
  matrix (tied to the embedding or not), and the dense matrix of BERT's head. A product costs 2 operations an element
  forward, and 4 backward (gradients of its input and of its weights). The embedding lookup multiplies nothing, norms,
  biases, activations, rotation and the optimizer are left out.
* A is the mean number of positions that a token attends to: (S + 1) / 2 in a causal row of S tokens, S in an encoder's.
  Scores and weighted values cost 2 x heads x head_dim operations each and position forward, and twice that backward.
  Document boundaries inside a row make the true number smaller; the formula takes whole rows, so that it depends on
  the config alone.
* What rematerialisation computes again is work, not progress: it is never counted.

MFU = FLOPs of a token x tokens a second / peak FLOPs a second of all devices.
"""

from __future__ import annotations

from jaxscale.config.model import ModelConfig


def parameter_count(model: ModelConfig) -> int:
    """Trainable numbers of the model, tied matrices once, padding not counted."""
    norm = model.embed_dim * (2 if model.norm == "layer" else 1)
    rows = model.vocabulary_size + (model.max_positions or 0) + model.token_types
    embeddings = rows * model.embed_dim + (norm if model.embedding_norm else 0)
    final_norm = norm if model.norm_placement == "pre" else 0
    output = 0 if model.tied_embeddings else model.vocabulary_size * model.embed_dim
    head = model.embed_dim**2 + model.embed_dim + norm + model.vocabulary_size if model.head_transform else 0
    layer = _layer_matrices(model) + _layer_biases(model) + 2 * norm
    layer += 2 * model.width_of_head if model.query_key_norm else 0
    return embeddings + model.layers * layer + final_norm + head + output


def matmul_parameters(model: ModelConfig) -> int:
    """Elements of the matrices that one token is multiplied with, the output matrix included, the embedding not."""
    head = model.embed_dim**2 if model.head_transform else 0
    return model.layers * _layer_matrices(model) + head + model.vocabulary_size * model.embed_dim


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Operations of one token of a row of `sequence_length`, forward and backward, by the formula of this module."""
    attended = (sequence_length + 1) / 2 if model.causal else sequence_length
    attention = 12 * model.layers * model.heads * model.width_of_head * attended
    return 6 * matmul_parameters(model) + attention


def _layer_matrices(model: ModelConfig) -> int:
    """Elements of one block's matrices: queries and output, keys and values, MLP."""
    queries = model.heads * model.width_of_head
    keys = model.key_value_heads * model.width_of_head
    mlp = (3 if model.activation == "swiglu" else 2) * model.mlp_dim
    return model.embed_dim * (2 * queries + 2 * keys + mlp)


def _layer_biases(model: ModelConfig) -> int:
    """Biases of one block's matrices, if it has them."""
    if not model.bias:
        return 0
    attention = (model.heads + 2 * model.key_value_heads) * model.width_of_head + model.embed_dim
    mlp = (2 if model.activation == "swiglu" else 1) * model.mlp_dim + model.embed_dim
    return attention + mlp
