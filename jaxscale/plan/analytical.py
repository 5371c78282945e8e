"""Step time in any layout, by formulas, without a compiler: to prune a search, and for layouts that are not built yet.

The same costs of single operations as in a replay (`cost.py`) are added up for one block, one stage of the pipeline and
one update. What waits for what is said by rules:

* A pipeline runs 1F1B: the slowest stage sets the pace, and each of the others adds its turn once, divided by the
  number of interleaved parts (arXiv 2104.04473, section 2.2).
* `tensor`: two all-reduces a block and pass, or as many all-gathers and reduce-scatters. Forward nothing hides them;
  backward the gradients of the weights may (Megatron-LM, core/tensor_parallel/layers.py: allreduce_dgrad).
* `fsdp`: the parameters of a block are gathered while the one before it computes, so the longer of both counts.
* Copies of whole gradients travel during the backward pass of the last microstep, parameters during the first forward.
* NCCL's kernels take cores from the products that run meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from jaxscale.config.model import ModelConfig
from jaxscale.hardware import Cluster, Gpu
from jaxscale.plan.cost import attention_seconds, collective_seconds, matmul_seconds, memory_seconds
from jaxscale.plan.footprint import Memory, layer_parameters, memory_of
from jaxscale.plan.layout import Axis, Layout, refuse_impossible

CHANNELS = 16
"""Cores that a collective of NCCL takes: one for each of its channels (an assumption: NCCL chooses 8 to 32 of them)."""
ADAM_BYTES = 38
"""Moved for one parameter: the float32 copy and both moments, read and written (24), the gradient read for its norm and
the update and set to zero (12), and the copy in 16 bits written (2)."""
LOGIT_BYTES = 22
"""Moved for one logit: written in 16 bits (2), read and widened (6), read for maximum, sum and gradient (4 each), and
that narrowed (2)."""


@dataclass(frozen=True)
class Estimate:
    """An update in a layout."""

    step_seconds: float
    parts: dict[str, float]
    """Seconds that add up to the step: "matmul", "attention", "memory", "optimizer", "bubble", "exposed AXIS"."""
    memory: Memory
    tokens_per_second: float
    """Of all GPUs."""


Parts = defaultdict[str, float]
"""Seconds by kind."""


def estimate(model: ModelConfig, sequence_length: int, layout: Layout, cluster: Cluster) -> Estimate:
    """Time and memory of one update.

    Raises:
        Refused: the layout cannot be built on the cluster.
    """
    refuse_impossible(model, sequence_length, layout, cluster.gpus)
    forward, backward = _block(model, sequence_length, layout, cluster)
    logits = _logits(model, sequence_length, layout, cluster)
    layers = math.ceil(model.layers / layout.pipe)
    block = _sum(forward, backward)
    handover = _handover(model, sequence_length, layout, cluster)
    slowest = _sum(_times(block, layers), logits, handover)
    parts = _times(slowest, layout.microsteps)
    others = (layout.pipe - 1) * _seconds(_times(block, layers), handover)
    parts["bubble"] = others / layout.virtual_stages
    between = _between_shards(model, layout, cluster, layers, _seconds(forward), _seconds(backward))
    parts = _sum(parts, between)
    parts["optimizer"] = _optimizer(model, layout, cluster.gpu)
    step = _seconds(parts)
    tokens = layout.sequences * sequence_length
    return Estimate(step, dict(parts), memory_of(model, sequence_length, layout), tokens / step)


def _block(model: ModelConfig, length: int, layout: Layout, cluster: Cluster) -> tuple[Parts, Parts]:
    """Forward and backward of one block and microbatch."""
    gpu, tensor = cluster.gpu, layout.tensor
    tokens = layout.microbatch * length // layout.context
    head, embed = model.width_of_head, model.embed_dim
    heads, pairs = model.heads // tensor, max(1, model.key_value_heads // tensor)
    hidden, gated = model.mlp_dim // tensor, model.activation == "swiglu"
    shapes = [
        (embed, (heads + 2 * pairs) * head),
        (heads * head, embed),
        (embed, (1 + gated) * hidden),
        (hidden, embed),
    ]
    dtype = layout.dtype

    forward = _parts(matmul=sum(matmul_seconds(gpu, tokens, n, k, dtype) for k, n in shapes))
    inputs = sum(matmul_seconds(gpu, tokens, k, n, dtype) for k, n in shapes)
    weights = sum(matmul_seconds(gpu, k, n, tokens, dtype) for k, n in shapes)
    backward = _parts(matmul=inputs + weights)
    score_bytes = 0.0
    for parts, times in ((forward, 1), (backward, 2)):
        seconds, score_bytes = _attention(model, length, layout, gpu, times == 2)
        parts["attention"] += seconds
        parts["memory"] += _memory(gpu, score_bytes)

    spread = tensor if layout.sequence_parallel else 1
    dropped = 1 if model.dropout else 0
    # Two norms (read, write) and two residual sums (read twice, write once), in 16 bits.
    residual = (2 * (2 + 3) * 2 + 2 * dropped) * embed / spread
    turned = 4 * (heads + pairs) * head if model.positions == "rope" else 0
    activated = 2 * (3 if gated else 2) * hidden
    forward["memory"] += _memory(gpu, tokens * (residual + turned + activated))
    # A norm reads its input, too, and an activation what it was computed of.
    backward["memory"] += _memory(gpu, tokens * ((2 * (4 + 3) * 2 + 2 * dropped) * embed / spread + turned))
    backward["memory"] += _memory(gpu, tokens * 2 * (5 if gated else 3) * hidden)
    parameters = sum(k * n for k, n in shapes)
    if layout.microsteps > 1:  # the sum of gradients is read and written again
        backward["memory"] += _memory(gpu, 2.0 * layout.gradient_bytes * parameters)
    if dtype == "float8":  # operands are read, and written twice, since both products want them by rows
        forward["memory"] += _memory(gpu, 4.0 * (tokens * sum(k for k, _ in shapes) + parameters))
        backward["memory"] += _memory(gpu, 4.0 * tokens * sum(n for _, n in shapes))

    _exchange(forward, model, tokens, layout, cluster, hidden_by=0.0)
    _ring(forward, model, tokens, layout, cluster, 1)
    again = _sum(forward)
    _exchange(backward, model, tokens, layout, cluster, hidden_by=weights if layout.overlap_tensor else 0.0)
    _ring(backward, model, tokens, layout, cluster, 2)
    if layout.recompute == "full":
        backward = _sum(backward, again)
    elif layout.recompute == "selective" and not layout.fused_attention:
        backward["attention"] += forward["attention"]
    return forward, backward


def _attention(model: ModelConfig, length: int, layout: Layout, gpu: Gpu, backward: bool) -> tuple[float, float]:
    """Seconds of attention's products, and bytes of scores that are moved beside them."""
    heads, queries = model.heads // layout.tensor, length // layout.context
    rows, head = layout.microbatch, model.width_of_head
    dtype = "bfloat16" if layout.dtype == "float8" else layout.dtype
    if layout.fused_attention:
        seconds = attention_seconds(
            gpu, rows, heads, queries, length, head, causal=model.causal, dtype=dtype, backward=backward
        )
        return seconds, 0.0
    batch = rows * heads
    scores = matmul_seconds(gpu, queries, length, head, dtype, batch)
    values = matmul_seconds(gpu, queries, head, length, dtype, batch)
    # Forward the softmax reads and writes, and a dropout does and writes its mask; backward each reads once more.
    per_score = (6 + (5 if model.dropout else 0)) if backward else (4 + (5 if model.dropout else 0))
    return (2 if backward else 1) * (scores + values), float(per_score * batch * queries * length)


def _exchange(
    parts: Parts, model: ModelConfig, tokens: int, layout: Layout, cluster: Cluster, hidden_by: float
) -> None:
    """Add the two sums over `tensor` of one pass through a block."""
    if layout.tensor == 1:
        return
    group, payload = layout.group(cluster.link_domain, "tensor"), 2.0 * tokens * model.embed_dim
    kinds = ("all-gather", "reduce-scatter") if layout.sequence_parallel else ("all-reduce",)
    seconds = 2 * sum(collective_seconds(cluster, kind, payload, group) for kind in kinds)
    parts["exposed tensor"] += max(0.0, seconds - hidden_by)
    parts["matmul"] += min(seconds, hidden_by) * CHANNELS / cluster.gpu.cores


def _ring(parts: Parts, model: ModelConfig, tokens: int, layout: Layout, cluster: Cluster, times: int) -> None:
    """Add the exchange of keys and values over `context`, behind the attention to those that are there."""
    if layout.context == 1:
        return
    pairs = max(1, model.key_value_heads // layout.tensor)
    payload = 4.0 * pairs * model.width_of_head * tokens * layout.context
    seconds = times * collective_seconds(cluster, "all-gather", payload, layout.group(cluster.link_domain, "context"))
    parts["exposed context"] += max(0.0, seconds - parts["attention"])


def _logits(model: ModelConfig, length: int, layout: Layout, cluster: Cluster) -> Parts:
    """Output matrix and loss of one microbatch, forward and backward, on the last stage."""
    gpu, tokens = cluster.gpu, layout.microbatch * length // layout.context
    vocabulary, embed = model.padded_vocabulary // layout.tensor, model.embed_dim
    dtype = "bfloat16" if layout.dtype == "float8" else layout.dtype
    shapes = ((tokens, vocabulary, embed), (tokens, embed, vocabulary), (embed, vocabulary, tokens))
    parts = _parts(matmul=sum(matmul_seconds(gpu, *shape, dtype) for shape in shapes))
    parts["memory"] = memory_seconds(gpu, float(LOGIT_BYTES) * tokens * vocabulary)
    if layout.tensor > 1:
        payload = 2.0 * tokens * embed
        group = layout.group(cluster.link_domain, "tensor")
        parts["exposed tensor"] = collective_seconds(cluster, "all-reduce", payload, group)
    return parts


def _handover(model: ModelConfig, length: int, layout: Layout, cluster: Cluster) -> Parts:
    """Activations and their gradients of one microbatch, to the next stage and the one before."""
    if layout.pipe == 1:
        return _parts()
    tokens = layout.microbatch * length / layout.context
    # Each GPU of a `tensor` group sends its part, and fast links put them together (arXiv 2104.04473, section 4.1).
    payload = 2.0 * tokens * model.embed_dim / layout.tensor
    group = layout.group(cluster.link_domain, "pipe")
    once = collective_seconds(cluster, "collective-permute", payload, group)
    return _parts(**{"exposed pipe": 2 * layout.virtual_stages * once})


def _between_shards(
    model: ModelConfig, layout: Layout, cluster: Cluster, layers: int, forward: float, backward: float
) -> Parts:
    """What waits for parameters and gradients of the data shards; `forward` and `backward` are seconds of a block."""
    parts = _parts()
    vocabulary = 2.0 * model.padded_vocabulary * model.embed_dim / layout.tensor / layout.pipe
    block = layer_parameters(model) / layout.tensor

    def travel(kind: str, size: float, *axes: Axis) -> float:
        return collective_seconds(cluster, kind, size, layout.group(cluster.link_domain, *axes))

    def meanwhile(axis: str, seconds: float, computing: float) -> None:
        hidden = min(seconds, computing) if layout.overlap else 0.0
        parts[f"exposed {axis}"] += seconds - hidden
        parts["matmul"] += hidden * CHANNELS / cluster.gpu.cores

    if layout.shard == "parameters" and layout.fsdp > 1:
        gather = travel("all-gather", 2 * block, "fsdp")
        scatter = travel("reduce-scatter", layout.gradient_bytes * block, "fsdp")
        tables = travel("all-gather", 2 * vocabulary, "fsdp")
        tables += travel("reduce-scatter", layout.gradient_bytes * vocabulary, "fsdp")
        meanwhile("fsdp", gather * layers * layout.microsteps, forward * layers * layout.microsteps)
        meanwhile("fsdp", (gather + scatter) * layers * layout.microsteps, backward * layers * layout.microsteps)
        parts["exposed fsdp"] += layout.microsteps * (gather + scatter + tables)  # the first and the last
        held = (layers * block + vocabulary) / layout.fsdp
        if layout.replica > 1:
            meanwhile("replica", travel("all-reduce", layout.gradient_bytes * held, "replica"), backward * layers)
        return parts
    held = layers * block + vocabulary
    data: tuple[Axis, ...] = ("replica", "fsdp")
    if layout.replica * layout.fsdp == 1:
        return parts
    if layout.shard == "nothing":
        meanwhile("data", travel("all-reduce", layout.gradient_bytes * held, *data), backward * layers)
        return parts
    scatters = layout.microsteps if layout.shard == "gradients" else 1
    scatter = travel("reduce-scatter", layout.gradient_bytes * held, *data)
    meanwhile("data", scatters * scatter, scatters * backward * layers)
    meanwhile("data", travel("all-gather", 2 * held, *data), forward * layers)
    return parts


def _optimizer(model: ModelConfig, layout: Layout, gpu: Gpu) -> float:
    """Seconds of the update of what one GPU holds."""
    tables = 2.0 * model.padded_vocabulary * model.embed_dim / layout.pipe
    held = (math.ceil(model.layers / layout.pipe) * layer_parameters(model) + tables) / layout.tensor
    return memory_seconds(gpu, ADAM_BYTES * held / (1 if layout.shard == "nothing" else layout.fsdp))


def _memory(gpu: Gpu, moved: float) -> float:
    """Seconds of moving so much, none where nothing is."""
    return memory_seconds(gpu, moved) if moved else 0.0


def _times(parts: Parts, count: int) -> Parts:
    """Parts, so many times."""
    return _parts(**{name: seconds * count for name, seconds in parts.items()})


def _parts(**seconds: float) -> Parts:
    """These, and none of what is not named."""
    return defaultdict(float, seconds)


def _sum(*several: Parts) -> Parts:
    """All of several, in a new one."""
    found = _parts()
    for parts in several:
        for name, seconds in parts.items():
            found[name] += seconds
    return found


def _seconds(*several: Parts) -> float:
    """Of all of several."""
    return math.fsum(seconds for parts in several for seconds in parts.values())
