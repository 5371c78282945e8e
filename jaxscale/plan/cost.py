"""Seconds of one operation on one GPU, by written formulas and the calibration of `hardware.toml`; nothing is fitted.

**Matrix products** follow the roofline (Williams, Waterman and Patterson, "Roofline", 2009): the larger of the time to
compute and the time to move the operands. Computing is done in tiles of the result, and the tiles in waves over the
cores of the GPU; what sticks out of a tile or of the last wave is computed for nothing (NVIDIA, "Matrix Multiplication
Background User's Guide", sections 3 and 4). Each tile has a begin and an end in which no products run, which a deep
product makes up for.

**Collectives** follow the latency-bandwidth model (Thakur, Rabenseifner and Gropp, 2005, doi 10.1177/1094342005051521):
rings for large messages (Patarasuk and Yuan, 2009, doi 10.1016/j.jpdc.2008.09.002), double binary trees for small
all-reduces over many (Sanders, Speck and Traeff, 2009), and where a group spans several domains of fast links, one step
inside them and one between them, in which each GPU of a domain sends its part through its own share of the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxscale.hardware import Cluster, Gpu

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the result that a block of threads computes, as cuBLAS and CUTLASS offer them."""
TILE_REUSE = {256 * 128: 1.0, 128 * 128: 0.97, 128 * 64: 0.85, 64 * 64: 0.70}
"""What a tile reaches of the largest one's rate, by its elements: a small one loads more operands for each product
(NVIDIA's guide, section 4.1)."""
RAMP = 128
"""Depth of a product whose time the begin and the end of a tile take."""
ATTENTION_KEYS, ATTENTION_RAMP = 8192, 380
"""Length of the rows that the shares of attention are measured with, and what begin and end of a row cost, in keys:
cuDNN on an H100 reaches 315, 410, 484 and 539 TFLOP/s with 512, 1k, 2k and 16k keys (arXiv 2407.08608, figure 5), which
this gives within 4 %."""
BYTES = {"float8": 1, "bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4}


@dataclass(frozen=True)
class Group:
    """The members of a collective."""

    size: int
    """How many."""
    in_domain: int
    """How many of them share a domain of fast links, where most do."""


def matmul_seconds(gpu: Gpu, rows: int, columns: int, depth: int, dtype: str, batch: int = 1) -> float:
    """`batch` products `[rows, depth] x [depth, columns]` in a dtype ("bfloat16", "float8", "float32", ...).

    A dtype that the GPU has no units for runs in float32 (bfloat16 on a V100: in float16, which is as large).
    """
    if not min(rows, columns, depth, batch):
        return 0.0
    peak, share = _peak(gpu, dtype)
    size = BYTES.get(dtype, 4)
    moved = size * batch * (rows * depth + depth * columns + rows * columns)
    computing = math.inf
    for tile_rows, tile_columns in TILES:
        tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        waves = math.ceil(tiles / gpu.cores)
        # The last wave may leave cores idle, but then each of the others has the memory and the clock to itself.
        work = 2.0 * waves * gpu.cores * tile_rows * tile_columns * (depth + RAMP)
        computing = min(computing, work / (peak * share * TILE_REUSE[tile_rows * tile_columns]))
    return max(computing, memory_seconds(gpu, moved)) + gpu.calibration.kernel_seconds


def attention_seconds(
    gpu: Gpu,
    rows: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    *,
    causal: bool,
    dtype: str,
    backward: bool,
) -> float:
    """Fused attention: two products a score forward, five backward (arXiv 2205.14135, section 3.1); of a causal mask
    half of the scores are computed. Short rows reach less of the peak."""
    products = 5 if backward else 2
    flops = 2.0 * products * rows * heads * queries * keys * head_dim * (0.5 if causal else 1.0)
    peak, _ = _peak(gpu, "bfloat16" if dtype == "float8" else dtype)
    share = gpu.calibration.attention_backward if backward else gpu.calibration.attention
    share *= (1 + ATTENTION_RAMP / ATTENTION_KEYS) / (1 + ATTENTION_RAMP / keys)
    return flops / (peak * share) + gpu.calibration.kernel_seconds


def memory_seconds(gpu: Gpu, moved: float) -> float:
    """A kernel that reads and writes so many bytes and computes little."""
    return max(moved / (gpu.memory_bandwidth * gpu.calibration.memory), gpu.calibration.kernel_seconds)


def collective_seconds(cluster: Cluster, kind: str, payload: float, group: Group) -> float:
    """A collective of HLO's `kind` whose largest buffer on one GPU has `payload` bytes (see `Collective`)."""
    if group.size <= 1 or not payload:
        return 0.0
    inside = min(group.in_domain, group.size)
    domains = math.ceil(group.size / inside)
    gpu, calibration = cluster.gpu, cluster.gpu.calibration
    link, network = gpu.link_bandwidth * calibration.link, cluster.network_bandwidth * calibration.network
    if kind in ("collective-permute", "collective-broadcast"):
        bandwidth, latency = (
            (link, calibration.link_latency) if domains == 1 else (network, calibration.network_latency)
        )
        return calibration.base_latency + latency + payload / bandwidth
    if kind in ("all-to-all", "ragged-all-to-all"):
        # A GPU keeps its own part; what goes to other domains goes through its own share of the network.
        out = payload * (group.size - inside) / group.size
        within = payload * (inside - 1) / group.size
        latency = (inside - 1) * calibration.link_latency + (domains - 1) * calibration.network_latency
        return calibration.base_latency + latency + max(out / network, within / link)
    rounds = 2 if kind == "all-reduce" else 1
    steps = (inside - 1) * calibration.link_latency + (domains - 1) * calibration.network_latency
    # A flat ring enters and leaves each domain once, a ring for each GPU of the domain, so all parts of the network
    # carry their share at the same time as the links.
    within = payload * (group.size - 1) / group.size / link if inside > 1 else 0.0
    between = payload * (domains - 1) / domains / (network * inside) if domains > 1 else 0.0
    ring = rounds * (steps + max(within, between))
    if kind != "all-reduce":
        return calibration.base_latency + ring
    depth = (inside - 1) * calibration.link_latency + math.ceil(math.log2(domains)) * calibration.network_latency
    tree = 2 * (depth + max(payload * (inside - 1) / inside / link, payload / (network * inside) if domains > 1 else 0))
    return calibration.base_latency + min(ring, tree)


def _peak(gpu: Gpu, dtype: str) -> tuple[float, float]:
    """FLOP/s of the units that multiply a dtype, and the share of it that large products reach."""
    calibration = gpu.calibration
    if dtype == "float8" and "float8" in gpu.peaks and calibration.matmul_float8 is not None:
        return gpu.peaks["float8"], calibration.matmul_float8
    if dtype == "bfloat16" and "bfloat16" not in gpu.peaks:
        dtype = "float16"
    return gpu.peaks.get(dtype, gpu.peaks["float32"]), calibration.matmul
