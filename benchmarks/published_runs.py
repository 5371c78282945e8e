"""Published training runs: rows of `published/throughput.csv`, as configs and clusters of jaxscale.

What a row does not say in our words is translated here, once: its network, what is computed again, and how parameters
are sharded.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxscale.config.schema import Config
from jaxscale.hardware import Cluster, known

PUBLISHED = Path(__file__).with_name("published")
GPUS = {
    ("A100-SXM", "40"): "a100-40",
    ("A100-SXM", "80"): "a100-80",
    ("H100-SXM", "80"): "h100-sxm",
    ("H100-SXM-96GB-HBM2e", "96"): "h100-sxm-96",
    ("H200-SXM", "141"): "h200",
    ("B200-SXM", "180"): "b200",
    ("GB200", "186"): "gb200",
    ("V100-SXM2", "32"): "v100",
}
"""Our names of the GPUs, by the columns `gpu` and `gpu_mem_gb`."""
REMAT = {"none": "none", "selective (attention core)": "none", "full": "full", "full (every layer)": "full"}
"""What is computed again. Fused attention never keeps the scores that `selective` would compute again."""
MINIMAL = "minimal_with_context (keeps matmul and attention outputs)"


@dataclass(frozen=True)
class Row:
    """One published result."""

    columns: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.columns[name]

    def number(self, name: str, otherwise: int = 1) -> int:
        """An integer column."""
        return int(float(self.columns[name])) if self.columns[name] else otherwise

    @property
    def framework(self) -> str:
        """Its name without version and remarks."""
        return re.sub(r"\s+(\(|\d).*$", "", self["framework"])

    @property
    def step_seconds(self) -> float | None:
        """Of an update, as published or from tokens/s; None where neither is there."""
        if self["step_time_s"]:
            return float(self["step_time_s"])
        if not self["tokens_per_s_per_gpu"] or not self["global_batch_tokens"]:
            return None
        return float(self["global_batch_tokens"]) / float(self["tokens_per_s_per_gpu"]) / self.number("n_gpus")


def runs() -> list[Row]:
    """All published runs."""
    with open(PUBLISHED / "throughput.csv", newline="") as file:
        return [Row(columns) for columns in csv.DictReader(file)]


def why_not_compiled(row: Row) -> str | None:
    """What jaxscale cannot build of a run today; None if it can."""
    if row["moe_experts"]:
        return "experts"
    if row.number("pp") > 1:
        return "pipeline"
    if row.number("cp") > 1:
        return "context"
    if "fp8" in row["precision"].lower():
        return "float8"
    if re.search(r"zero[12]|zero2|no reshard|distributed optimizer", row["dp_kind"]):
        return "sharding of the optimizer state alone"
    if (row["gpu"], row["gpu_mem_gb"]) not in GPUS or known().gpus[
        GPUS[row["gpu"], row["gpu_mem_gb"]]
    ].compiler is None:
        return "GPU"
    if row["recompute"] not in (*REMAT, MINIMAL):
        return f"recomputation: {row['recompute']}"
    if row["arch_kind"] != "decoder" or not row["micro_batch_per_gpu"] or not row["layers"]:
        return "its shape"
    return None


def cluster_of(row: Row) -> Cluster:
    """What it ran on."""
    gpu = known().gpus[GPUS[row["gpu"], row["gpu_mem_gb"]]]
    each = min(row.number("n_gpus"), row.number("gpus_per_node", 8))
    a_gpu = re.search(r"(\d+) Gb/s (?:per|a) GPU", row["inter_node"])
    a_node = re.search(r"(\d+) Gb/s per node", row["inter_node"])
    gigabits = float(a_gpu[1]) if a_gpu else float(a_node[1]) / row.number("gpus_per_node", 8) if a_node else None
    return Cluster(
        name=f"{row['gpu']} of {row['id']}",
        gpu=gpu,
        hosts=-(-row.number("n_gpus") // each),
        gpus_a_host=each,
        network_bandwidth=gigabits * 1e9 / 8 if gigabits else gpu.network_bandwidth,
        source=row["source"],
    )


def config_of(row: Row) -> Config:
    """The run as a config: shape of the model, batch, mesh; plain causal attention, as published runs have it."""
    data, tensor = row.number("dp"), row.number("tp")
    sharded = "zero3" in row["dp_kind"] or "fsdp" in row["dp_kind"].lower()
    fsdp = row.number("fsdp_shard_degree", data) if sharded else 1
    microbatch, microsteps = row.number("micro_batch_per_gpu"), row.number("grad_accum")
    values: dict[str, Any] = {
        "name": "published",
        "model": {
            "vocabulary_size": row.number("vocab"),
            "embed_dim": row.number("d_model"),
            "layers": row.number("layers"),
            "heads": row.number("n_heads"),
            "kv_heads": row.number("n_kv_heads", row.number("n_heads")),
            "head_dim": row.number("head_dim", row.number("d_model") // row.number("n_heads")),
            "mlp_dim": row.number("d_ff"),
            "activation": "swiglu" if row["gated_mlp"] == "1" else "gelu_tanh",
            "tied_embeddings": row["tied_embeddings"] == "1",
            "remat": "dots" if row["recompute"] == MINIMAL else REMAT[row["recompute"]],
        },
        "data": {
            "train": "none",
            "sequence_length": row.number("seq_len"),
            "attend_across_documents": True,
        },
        "batch": {"global_size": microbatch * microsteps * data, "microbatch": microbatch},
        "train": {"steps": 1},
        "mesh": {"replica": data // fsdp, "fsdp": fsdp, "tensor": tensor},
    }
    return Config.model_validate(values)
