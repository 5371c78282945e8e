"""Memory of one GPU in any layout, by formulas; for layouts that jaxscale builds the compiler's own sum is better.

Activations are those of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4),
with grouped queries, gated MLPs and fused attention. A pipeline runs 1F1B: its first stage holds the activations of as
many microbatches as there are stages, its last one those of a single one, beside the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxscale.config.model import ModelConfig
from jaxscale.flops import parameter_count
from jaxscale.hardware import RESERVED_BYTES, Gpu
from jaxscale.plan.layout import Layout

OPTIMIZER_BYTES = 12
"""Of one parameter: Adam's two moments and the float32 copy that is updated (arXiv 1910.02054, section 3.1)."""
LOGIT_BYTES, EAGER_LOGIT_BYTES = 10, 16
"""Of one logit: in 16 bits, in float32, and the gradient of that. Eagerly, in PyTorch: in 16 bits (2), its logarithm
after the softmax (4), the gradients before and behind that (4 each), and in 16 bits (2)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that needs most."""

    parameters: float
    """As the products read them, in 16 bits."""
    optimizer: float
    gradients: float
    activations: float
    """Saved for the backward pass."""
    logits: float
    temporaries: float
    """Parameters of the two layers that are gathered at a time, and what a backward pass needs beyond the logits, which
    are gone by then."""

    @property
    def total(self) -> float:
        """All of it."""
        parts = self.parameters, self.optimizer, self.gradients, self.activations, self.logits, self.temporaries
        return math.fsum(parts)


def fits(memory: Memory, gpu: Gpu) -> bool:
    """Whether a GPU has so much."""
    return memory.total <= gpu.memory_bytes - RESERVED_BYTES


def memory_of(model: ModelConfig, sequence_length: int, layout: Layout) -> Memory:
    """What the fullest stage of the pipeline holds."""
    return max((_stage(model, sequence_length, layout, at) for at in {0, layout.pipe - 1}), key=lambda one: one.total)


def layer_parameters(model: ModelConfig) -> float:
    """Parameters of one block."""
    one, two = (parameter_count(model.model_copy(update={"layers": layers})) for layers in (1, 2))
    return two - one


def activation_bytes(model: ModelConfig, sequence_length: int, layout: Layout) -> tuple[float, float]:
    """Of one block and microbatch: what is kept until its backward pass, and what that needs while it runs."""
    tokens = layout.microbatch * sequence_length / layout.context
    spread = layout.tensor if layout.sequence_parallel else 1
    heads, pairs = model.heads / layout.tensor, max(1.0, model.key_value_heads / layout.tensor)
    projected = (2 * heads + 2 * pairs) * model.width_of_head
    gated = 4 if layout.eager else 3
    hidden = (gated if model.activation == "swiglu" else 2) * model.mlp_dim / layout.tensor
    # Norms keep what they read and the products behind them what they write; a dropout keeps its mask, of a byte.
    residual: float = (8 + (2 if model.dropout else 0) + (0 if layout.fused_norm else 4)) * model.embed_dim / spread
    if layout.eager:
        residual += 4 * model.embed_dim * (1 - 1 / spread)
    whole = tokens * (residual + 2 * projected + 2 * hidden)
    # Softmax, its dropped copy, and the mask (arXiv 2205.05198, equation 2).
    scores = 0.0 if layout.fused_attention else (5 if model.dropout else 2) * heads * tokens * sequence_length
    if layout.recompute == "full":
        return 2 * tokens * model.embed_dim / spread, whole + scores
    return whole + (scores if layout.recompute == "none" else 0.0), scores


def _stage(model: ModelConfig, sequence_length: int, layout: Layout, at: int) -> Memory:
    """What a GPU of one stage of the pipeline holds."""
    layers = math.ceil(model.layers / layout.pipe)
    last = at == layout.pipe - 1
    vocabulary = model.padded_vocabulary * model.embed_dim / layout.tensor
    tables = (at == 0) + (last and not (model.tied_embeddings and layout.pipe == 1))
    block = layer_parameters(model) / layout.tensor
    held = layers * block + tables * vocabulary
    shards = {kind: layout.fsdp if kept else 1 for kind, kept in _sharded(layout).items()}
    kept, working = activation_bytes(model, sequence_length, layout)
    in_flight: float = min(layout.pipe - at, layout.microsteps)
    if layout.virtual_stages > 1:
        in_flight *= 1 + (layout.pipe - 1) / (layout.pipe * layout.virtual_stages)
    positions = min(sequence_length / layout.context, layout.logits_chunk or math.inf)
    logits = layout.microbatch * positions * model.padded_vocabulary if last else 0.0
    logits *= EAGER_LOGIT_BYTES if layout.eager else LOGIT_BYTES / layout.tensor
    gathered = 2 * (2 + layout.gradient_bytes) * block if layout.shard == "parameters" and layout.fsdp > 1 else 0.0
    return Memory(
        parameters=2 * held / shards["parameters"],
        optimizer=OPTIMIZER_BYTES * held / shards["optimizer"],
        gradients=layout.gradient_bytes * held / shards["gradients"],
        activations=in_flight * layers * kept,
        logits=logits,
        temporaries=max(0.0, working - logits) + gathered,
    )


def _sharded(layout: Layout) -> dict[str, bool]:
    """What is spread over `fsdp`."""
    order = ("nothing", "optimizer", "gradients", "parameters")
    return {kind: order.index(kind) <= order.index(layout.shard) for kind in order[1:]}
