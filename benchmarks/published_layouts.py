"""Published training runs as layouts: what the analytical path of the planner reckons with, pipelines and all."""

from __future__ import annotations

import csv
import re
from typing import Literal

from benchmarks.published_runs import GPUS, PUBLISHED, Row, cluster_of
from jaxscale.config.model import ModelConfig
from jaxscale.hardware import Cluster, known
from jaxscale.plan.layout import Layout

Shard = Literal["nothing", "optimizer", "gradients", "parameters"]
OLDER_ATTENTION = {
    ("A100", r"FlashAttention 1|triton"): (0.40, 0.30),
    ("H100", r"triton|SDPA flash|FlashAttention-2|FlashAttention$"): (0.35, 0.30),
}
"""Shares of the peak, forward and backward, of attention kernels that are older than those of the table, by GPU:
FlashAttention 1 reaches 30 to 50 % and 25 to 35 % on an A100 (arXiv 2307.08691, section 1); FlashAttention 2 35 % on an
H100 (arXiv 2407.08608, abstract; backward lowered as that of FlashAttention 2 is on an A100)."""


def cluster_with_kernels(row: Row) -> Cluster:
    """What a run ran on, with the attention kernel that it had."""
    cluster = cluster_of(row)
    for (gpu, kernel), (forward, backward) in OLDER_ATTENTION.items():
        if row["gpu"].startswith(gpu) and re.search(kernel, row["attention_kernel"]):
            shares = {"attention": forward, "attention_backward": backward}
            calibration = cluster.gpu.calibration.model_copy(update=shares)
            return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"calibration": calibration})})
    return cluster


def memory_runs() -> list[Row]:
    """The runs of the layout study with an outcome."""
    with open(PUBLISHED / "memory_outcomes.csv", newline="") as file:
        return [Row(columns) for columns in csv.DictReader(file)]


def why_not_estimated(row: Row) -> str | None:
    """What the formulas do not know of a run; None if they know all."""
    if row["moe_experts"]:
        return "experts"
    if (row["gpu"], row["gpu_mem_gb"]) not in GPUS or GPUS[row["gpu"], row["gpu_mem_gb"]] not in known().gpus:
        return "GPU"
    if "tf32" in row["precision"] or ("fp8" in row["precision"] and row["gpu"].startswith("A100")):
        return f"precision: {row['precision']}"
    if not row["micro_batch_per_gpu"] or not row["layers"]:
        return "its shape"
    if "not stated" in row["recompute"] and "none in" not in row["recompute"]:
        return "recomputation is not stated"
    return None


def model_of(row: Row) -> ModelConfig:
    """The shape of a run's model."""
    heads = row.number("n_heads")
    return ModelConfig(
        vocabulary_size=row.number("vocab"),
        embed_dim=row.number("d_model"),
        layers=row.number("layers"),
        heads=heads,
        kv_heads=row.number("n_kv_heads", heads),
        head_dim=row.number("head_dim", row.number("d_model") // heads),
        mlp_dim=row.number("d_ff"),
        activation="swiglu" if row["gated_mlp"] == "1" else "gelu_tanh",
        tied_embeddings=row["tied_embeddings"] == "1",
        causal=row["arch_kind"] == "decoder",
    )


def layout_of(row: Row) -> Layout:
    """How a run was laid out."""
    kind, data = row["dp_kind"].lower(), row.number("dp")
    shard = _shard(kind)
    fsdp = row.number("fsdp_shard_degree", data) if shard == "parameters" else data
    context = row.number("cp")
    # Sharding over more than the data shards goes over the context, too; to the formulas it is one axis.
    fsdp = min(fsdp, data)
    precision = row["precision"].lower()
    aleph = row.framework.startswith("Aleph Alpha")
    return Layout(
        replica=data // fsdp,
        fsdp=fsdp,
        tensor=row.number("tp"),
        context=context,
        pipe=row.number("pp"),
        sequence_parallel=row["sp"] == "1",
        shard=shard,
        virtual_stages=row.number("vpp"),
        microbatch=row.number("micro_batch_per_gpu"),
        microsteps=row.number("grad_accum"),
        recompute="full" if row["recompute"].startswith("full") else _selective(row),
        dtype="float8" if "fp8" in precision else "float16" if precision.startswith("fp16") else "bfloat16",
        # DeepSpeed and Scaling add up and send what they compute in; the others widen it first.
        gradient_dtype="bfloat16" if "all-bf16" in precision or aleph or "fp16" in precision else "float32",
        fused_attention=bool(re.search(r"flash|dot-product|flex", row["attention_kernel"].lower()))
        and "no flash" not in row["attention_kernel"],
        overlap=shard == "parameters" or "overlapped" in kind or kind in ("ddp", "zero2"),
        # Megatron-LM has it since 2022 (core/tensor_parallel/layers.py); Scaling and DTensor wait for each sum.
        overlap_tensor=bool(re.match(r"Megatron-(Bridge|Core)|NeMo|MegaScale", row.framework))
        or "2205.05198" in row["source"],
        # Scaling's public code: lm_head.py and losses/cross_entropy.py, mlp.py, norm/rms_norm.py in src/scaling.
        eager=aleph,
        fused_norm=not aleph or "fused RMSNorm" in row["attention_kernel"],
    )


def _selective(row: Row) -> Literal["none", "selective"]:
    """What is computed again short of everything."""
    return "selective" if row["recompute"].startswith("selective") else "none"


def _shard(kind: str) -> Shard:
    """What is spread over the data shards."""
    if re.search(r"zero2|no reshard", kind):
        return "gradients"
    if "zero3" in kind or "fsdp" in kind:
        return "parameters"
    return "optimizer" if "zero1" in kind else "nothing"
