"""Costs of single operations: what always holds, and times worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.hardware import Cluster, Gpu, known
from jaxscale.plan.cost import Group, attention_seconds, collective_seconds, matmul_seconds, memory_seconds

GPU = known().gpus["h100-sxm"]
CLUSTER = known().cluster("h100-sxm:8x8")
KINDS = st.sampled_from(["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"])
SIZES = st.integers(1, 1 << 14)
BYTES = st.floats(1, 1e11)
GROUPS = st.sampled_from([Group(size, inside) for size in (2, 4, 8, 16, 64) for inside in (1, 2, 8) if inside <= size])
FASTER = st.floats(1, 8)


def gpu_with(**changes: float) -> Gpu:
    return GPU.model_copy(update=changes)


def cluster_with(links: float, network: float) -> Cluster:
    gpu = gpu_with(link_bandwidth=GPU.link_bandwidth * links)
    return CLUSTER.model_copy(update={"gpu": gpu, "network_bandwidth": CLUSTER.network_bandwidth * network})


@given(SIZES, SIZES, SIZES, FASTER)
def test_products_gain_by_bandwidth_and_peak(rows: int, columns: int, depth: int, factor: float) -> None:
    """A faster GPU is never slower."""
    peaks = {dtype: peak * factor for dtype, peak in GPU.peaks.items()}
    before = matmul_seconds(GPU, rows, columns, depth, "bfloat16")
    more_memory = gpu_with(memory_bandwidth=GPU.memory_bandwidth * factor)
    assert matmul_seconds(more_memory, rows, columns, depth, "bfloat16") <= before
    assert matmul_seconds(GPU.model_copy(update={"peaks": peaks}), rows, columns, depth, "bfloat16") <= before


@given(SIZES, SIZES, SIZES, st.integers(0, 4096))
def test_larger_products_take_longer(rows: int, columns: int, depth: int, more: int) -> None:
    """In each dimension; and none is faster than the peak."""
    seconds = matmul_seconds(GPU, rows, columns, depth, "bfloat16")
    assert seconds >= 2 * rows * columns * depth / GPU.peaks["bfloat16"]
    assert matmul_seconds(GPU, rows + more, columns, depth, "bfloat16") >= seconds
    assert matmul_seconds(GPU, rows, columns + more, depth, "bfloat16") >= seconds
    assert matmul_seconds(GPU, rows, columns, depth + more, "bfloat16") >= seconds


def test_one_tile_too_many_costs_a_wave() -> None:
    """132 cores compute 12 x 11 tiles at once; one row more makes 13 x 11, or more of smaller ones (NVIDIA's guide,
    section 4.2)."""
    full, more = (matmul_seconds(GPU, 256 * 12 + row, 128 * 11, 8192, "bfloat16") for row in (0, 1))
    assert more > 1.2 * full


def test_a_thin_product_waits_for_memory() -> None:
    """One row: the matrix is read once, at the bandwidth that kernels reach."""
    matrix = 2 * 16384 * 16384
    seconds = matmul_seconds(GPU, 1, 16384, 16384, "bfloat16")
    assert seconds == pytest.approx(matrix / (GPU.memory_bandwidth * GPU.calibration.memory), rel=0.02)


@given(KINDS, BYTES, GROUPS, FASTER, FASTER, FASTER)
def test_collectives_gain_by_bandwidth(
    kind: str, payload: float, group: Group, links: float, network: float, more: float
) -> None:
    """Faster links and networks are never slower, more bytes never faster."""
    before = collective_seconds(CLUSTER, kind, payload, group)
    assert collective_seconds(cluster_with(links, network), kind, payload, group) <= before * (1 + 1e-12)
    assert collective_seconds(CLUSTER, kind, payload * more, group) >= before * (1 - 1e-12)


@given(KINDS, BYTES)
def test_a_group_of_one_is_free(kind: str, payload: float) -> None:
    assert collective_seconds(CLUSTER, kind, payload, Group(1, 1)) == 0


def test_bus_bandwidth_of_a_ring() -> None:
    """nccl-tests, doc/PERFORMANCE.md: busbw = payload / seconds x 2 (n - 1) / n for an all-reduce."""
    payload = 8 * 2**30
    seconds = collective_seconds(CLUSTER, "all-reduce", payload, Group(8, 8))
    assert payload / seconds * 2 * 7 / 8 == pytest.approx(GPU.link_bandwidth * GPU.calibration.link, rel=0.02)


def test_each_member_of_a_domain_has_its_share_of_the_network() -> None:
    """Groups with one member in each host share its network with seven others; a group with eight has it all."""
    alone = collective_seconds(CLUSTER, "all-gather", 1e11, Group(8, 1))
    together = collective_seconds(CLUSTER, "all-gather", 1e11, Group(64, 8))
    assert 4 < alone / together <= 8.1


@given(st.integers(1, 8), st.sampled_from([512, 2048, 8192]), st.booleans())
def test_attention_is_below_the_peak(rows: int, length: int, backward: bool) -> None:
    """A causal mask halves it, and the backward pass takes longer."""
    whole, half = (
        attention_seconds(GPU, rows, 32, length, length, 128, causal=causal, dtype="bfloat16", backward=backward)
        for causal in (False, True)
    )
    products = 5 if backward else 2
    assert whole > 2 * products * rows * 32 * length * length * 128 / GPU.peaks["bfloat16"]
    assert half < whole < 2.001 * half


def test_a_kernel_has_a_least_time() -> None:
    assert memory_seconds(GPU, 1) == GPU.calibration.kernel_seconds
