"""The shape of a model, and what it is trained to do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jaxscale.config.section import Section
from jaxscale.config.types import NaturalInt, PositiveInt, Share

VOCABULARY_MULTIPLE = 128
"""Vocabulary tables are padded to a multiple of this, whatever the mesh, so that `tensor` divides them."""


class RopeConfig(Section):
    """Rotary position embeddings (arXiv 2104.09864), half-split layout as in the published Llama weights."""

    theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotation frequencies."""
    scaling_factor: float = Field(default=1.0, ge=1)
    """Llama-3 frequency scaling: low frequencies are divided by this factor; 1 means no scaling."""
    low_frequency_factor: float = Field(default=1.0, gt=0)
    """Wavelengths above original_length / this are scaled fully."""
    high_frequency_factor: float = Field(default=4.0, gt=0)
    """Wavelengths below original_length / this are left alone; between the two bounds the scaling is interpolated."""
    original_length: PositiveInt = 8192
    """Sequence length (tokens) the frequencies were first trained at."""


class ModelConfig(Section):
    """The shape of one Transformer: decoders (Llama, Qwen, GPT-2) and encoders (BERT) alike."""

    vocabulary_size: PositiveInt
    """Number of token ids. Tables are padded to a multiple of 128 internally; padding is never counted."""
    embed_dim: PositiveInt
    """Width of the residual stream."""
    layers: PositiveInt
    """Number of blocks."""
    heads: PositiveInt
    """Number of query heads."""
    kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped queries); unset: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; unset: embed_dim / heads."""
    mlp_dim: PositiveInt
    """Hidden width of the MLP."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """MLP nonlinearity: `swiglu` has a gate matrix; `gelu` is exact, `gelu_tanh` its tanh approximation (GPT-2)."""
    causal: bool = True
    """True: decoder, each token sees itself and earlier ones. False: encoder, each token sees its whole document."""
    positions: Literal["rope", "learned"] = "rope"
    """How position enters the model."""
    rope: RopeConfig = RopeConfig()
    """Read where positions = "rope"."""
    max_positions: PositiveInt | None = None
    """Rows of the table of learned positions; needed where positions = "learned", refused elsewhere."""
    token_types: NaturalInt = 0
    """Rows of BERT's token type table, of which row 0 is used; 0: no table."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of normalisation."""
    norm_placement: Literal["pre", "post"] = "pre"
    """`pre`: before attention and MLP, with a final norm (Llama, GPT-2); `post`: after each residual sum (BERT)."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance inside every norm."""
    embedding_norm: bool = False
    """Normalise the sum of the embeddings (BERT)."""
    query_key_norm: bool = False
    """RMS-normalise queries and keys per head before the rotation (Qwen-3)."""
    bias: bool = False
    """Biases on the matrices of attention and MLP (GPT-2, BERT)."""
    tied_embeddings: bool = False
    """Use the token embedding as the output matrix."""
    head_transform: bool = False
    """BERT's masked-LM head: dense, activation, norm, then the output matrix with a bias."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout rate on embeddings and on both residual branches; never applied in evaluation or generation."""
    initializer_scale: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial matrices; those that write to the residual stream get it / sqrt(2 layers)."""
    unroll: PositiveInt = 1
    """Layers computed in one iteration of the loop over layers: more is faster to run and slower to compile."""
    attention: Literal["auto", "blockwise", "cudnn"] = "auto"
    """Attention implementation. `auto`: cuDNN where the mesh's devices are GPUs and the mask allows, else blockwise."""
    remat: Literal["none", "dots", "full"] = "none"
    """Rematerialisation of each block in the backward pass: `none` keeps all activations, `dots` keeps the results of
    matrix products, `full` keeps only the block's input."""

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def width_of_head(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.embed_dim // self.heads

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the vocabulary tables: vocabulary_size, rounded up to a multiple of VOCABULARY_MULTIPLE."""
        return -(-self.vocabulary_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


class CausalObjective(Section):
    """Next-token prediction."""

    kind: Literal["causal"] = "causal"
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the mean squared log-normaliser (PaLM, arXiv 2204.02311, section 5)."""
    logits_chunk: PositiveInt = 1024
    """Positions of each row whose logits exist at one time."""


class MaskedObjective(Section):
    """Masked language modelling (BERT, arXiv 1810.04805, section 3.1)."""

    kind: Literal["masked"]
    mask_share: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Share of the real tokens that are predicted."""
    replace_share: Share = 0.8
    """Share of the predicted tokens that are shown as the mask token."""
    random_share: Share = 0.1
    """Share of the predicted tokens that are shown as a random token; the rest are shown unchanged."""
    mask_id: NaturalInt | None = None
    """Id of the mask token; unset: the one that the dataset's tokenizer declares."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the mean squared log-normaliser."""
    logits_chunk: PositiveInt = 1024
    """Positions of each row whose logits exist at one time."""


def _objective_kind(value: Any) -> str:
    """Which objective a section describes: its `kind`, causal where it does not say."""
    return str(value.get("kind", "causal") if isinstance(value, dict) else getattr(value, "kind", None))


Objective = Annotated[
    Annotated[CausalObjective, Tag("causal")] | Annotated[MaskedObjective, Tag("masked")],
    Discriminator(_objective_kind),
]
