"""How a training step is laid out over GPUs, for the formulas of `analytical.py` and `footprint.py`.

It says more than a config can today (pipelines, context, ZeRO 1 and 2, float8), so that a search and published runs can
be reckoned with before jaxscale builds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxscale.config.errors import Refused
from jaxscale.config.model import ModelConfig
from jaxscale.plan.cost import BYTES, Group

Axis = Literal["pipe", "replica", "fsdp", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipe", "replica", "fsdp", "context", "tensor")
"""From slow links to fast ones, as the mesh has them."""


@dataclass(frozen=True)
class Layout:
    """Mesh, batch and what is kept where. The default is one GPU and one sequence."""

    replica: int = 1
    """Groups of GPUs that hold copies and average their gradients."""
    fsdp: int = 1
    """GPUs over which `shard` is spread."""
    tensor: int = 1
    context: int = 1
    """GPUs that share the positions of a row."""
    pipe: int = 1
    """Stages of the pipeline, run as 1F1B (arXiv 2104.04473, section 2.2)."""
    sequence_parallel: bool = False
    """Norms and residuals are spread over `tensor`, too (arXiv 2205.05198, section 4.2.2)."""
    shard: Literal["nothing", "optimizer", "gradients", "parameters"] = "nothing"
    """What is spread over `fsdp`: ZeRO 0 to 3 (arXiv 1910.02054). Each takes those before it along."""
    virtual_stages: int = 1
    """Parts of the model that each stage has, interleaved."""
    microbatch: int = 1
    """Sequences of a data shard and microstep."""
    microsteps: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: nothing, the scores of attention, or each block."""
    dtype: Literal["bfloat16", "float16", "float8"] = "bfloat16"
    """Of the products of the blocks."""
    gradient_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """In which gradients are added up and travel."""
    fused_attention: bool = True
    """Scores are never written (arXiv 2205.14135)."""
    overlap: bool = True
    """Gradients and parameters travel between data shards while layers compute."""
    overlap_tensor: bool = True
    """Backward, sums over `tensor` travel while gradients of weights are computed."""
    logits_chunk: int | None = None
    """Positions of each row whose logits exist at one time; None: all."""
    eager: bool = False
    """Operations are kernels of their own, without a compiler: a gated activation keeps both of its factors, logits are
    put together on every GPU of `tensor`, and what `sequence_parallel` gathers for a product is kept."""
    fused_norm: bool = True
    """A norm keeps what it reads, not what it computes on the way."""

    @property
    def gpus(self) -> int:
        """GPUs that it takes."""
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def sequences(self) -> int:
        """Of an update, on all GPUs."""
        return self.microbatch * self.microsteps * self.replica * self.fsdp

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient."""
        return BYTES[self.gradient_dtype]

    def size(self, axis: Axis) -> int:
        """GPUs along an axis."""
        size = getattr(self, axis)
        assert isinstance(size, int)
        return size

    def group(self, link_domain: int, *axes: Axis) -> Group:
        """The members of a collective along neighbouring axes, on GPUs in a row of which so many share fast links."""
        stride = math.prod(self.size(axis) for axis in AXES[AXES.index(axes[-1]) + 1 :])
        size = math.prod(self.size(axis) for axis in axes)
        return Group(size, max(1, min(size, link_domain // stride)))


def refuse_impossible(model: ModelConfig, sequence_length: int, layout: Layout, gpus: int) -> None:
    """Refuse a layout that cannot be built.

    Raises:
        Refused: it needs another number of GPUs, or an axis does not divide what it is to spread.
    """
    if layout.gpus != gpus:
        product = " x ".join(f"{axis} {layout.size(axis)}" for axis in AXES)
        raise Refused(f"the layout {product} takes {layout.gpus} GPUs; the cluster has {gpus}")
    for axis, what, size in (
        ("tensor", "heads", model.heads),
        ("tensor", "mlp_dim", model.mlp_dim),
        ("context", "sequence_length", sequence_length),
    ):
        count = getattr(layout, axis)
        if size % count:
            fitting = [number for number in range(1, size + 1) if size % number == 0]
            nearest = min(fitting, key=lambda number: abs(number - count))
            raise Refused(f"{axis} = {count} does not divide {what} = {size}; nearest that does: {nearest}")
    parts = layout.pipe * layout.virtual_stages
    if parts > model.layers:
        raise Refused(f"pipe x virtual_stages = {parts}: must be at most the {model.layers} layers of the model")
