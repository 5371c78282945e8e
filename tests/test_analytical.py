"""The formulas of layouts: against numbers by hand, against published memory, and what always holds."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.config.errors import Refused
from jaxscale.config.model import ModelConfig
from jaxscale.flops import parameter_count
from jaxscale.hardware import Cluster, known
from jaxscale.plan.analytical import estimate
from jaxscale.plan.footprint import activation_bytes, fits, layer_parameters, memory_of
from jaxscale.plan.layout import Layout

GPT = ModelConfig(
    vocabulary_size=51200,
    embed_dim=12288,
    layers=96,
    heads=96,
    mlp_dim=4 * 12288,
    activation="gelu_tanh",
    dropout=0.1,
)
"""GPT-3 as in arXiv 2205.05198, table 3."""
SMALL = ModelConfig(vocabulary_size=32000, embed_dim=1024, layers=16, heads=16, kv_heads=8, mlp_dim=4096)
LAYOUTS = st.builds(
    Layout,
    replica=st.sampled_from([1, 2]),
    fsdp=st.sampled_from([1, 4]),
    tensor=st.sampled_from([1, 2, 8]),
    context=st.sampled_from([1, 2]),
    pipe=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    shard=st.sampled_from(["nothing", "optimizer", "gradients", "parameters"]),
    virtual_stages=st.sampled_from([1, 2]),
    microbatch=st.integers(1, 4),
    microsteps=st.integers(1, 8),
    recompute=st.sampled_from(["none", "selective", "full"]),
    dtype=st.sampled_from(["bfloat16", "float8"]),
    fused_attention=st.booleans(),
    overlap=st.booleans(),
)


def cluster_for(layout: Layout) -> Cluster:
    gpus = min(8, layout.gpus)
    return known().cluster(f"h100-sxm:{layout.gpus // gpus}x{gpus}")


@pytest.mark.parametrize(("recompute", "scores"), [("none", 5), ("selective", 0)])
def test_activations_of_a_block(recompute: str, scores: int) -> None:
    """arXiv 2205.05198, equations 3 and 5 and table 2: sbh (10 + 24/t + 5as/ht), and with sequences parallel
    sbh/t (34 + 5as/h); selective recomputation takes the last term away."""
    length, tensor = 2048, 8
    sbh = length * GPT.embed_dim
    term = scores * GPT.heads * length / GPT.embed_dim
    layout = Layout(tensor=tensor, recompute=recompute, fused_attention=False)  # type: ignore[arg-type]
    assert activation_bytes(GPT, length, layout)[0] == pytest.approx(sbh * (10 + 24 / tensor + term / tensor))
    spread = dataclasses.replace(layout, sequence_parallel=True)
    assert activation_bytes(GPT, length, spread)[0] == pytest.approx(sbh / tensor * (34 + term))


def test_states_of_zero() -> None:
    """arXiv 1910.02054, figure 1: 7.5B parameters on 64 GPUs with K = 12 need 120, 31.4, 16.6 and 1.9 GB."""
    model = ModelConfig(vocabulary_size=50304, embed_dim=4096, layers=36, heads=32, mlp_dim=16384, activation="gelu")
    scale = 7.5e9 / parameter_count(model)
    for shard, published in (("nothing", 120), ("optimizer", 31.4), ("gradients", 16.6), ("parameters", 1.9)):
        memory = memory_of(model, 1, Layout(fsdp=64, shard=shard, gradient_dtype="bfloat16"))  # type: ignore[arg-type]
        states = memory.parameters + memory.optimizer + memory.gradients
        assert states * scale / 1e9 == pytest.approx(published, rel=0.03)


def test_parameters_of_a_block() -> None:
    """Queries, keys, values, output and three matrices of the MLP, and two norms."""
    assert layer_parameters(SMALL) == 1024 * (2 * 1024 + 2 * 512 + 3 * 4096) + 2 * 1024


def test_the_bubble() -> None:
    """(p - 1) / (v m) of the time of the microsteps (arXiv 2104.04473, section 2.2), where all stages are alike."""
    model = SMALL.model_copy(update={"vocabulary_size": 128})
    for virtual in (1, 2):
        layout = Layout(pipe=4, microsteps=8, virtual_stages=virtual)
        parts = estimate(model, 4096, layout, cluster_for(layout)).parts
        busy = sum(seconds for name, seconds in parts.items() if name not in ("bubble", "optimizer", "exposed pipe"))
        assert parts["bubble"] / busy == pytest.approx(3 / (8 * virtual), rel=0.05)


@settings(deadline=None)
@given(LAYOUTS)
def test_what_always_holds(layout: Layout) -> None:
    """Parts add up; nothing is faster than the peak, negative or without number; more bandwidth is never slower."""
    cluster = cluster_for(layout)
    found = estimate(SMALL, 2048, layout, cluster)
    assert found.step_seconds == pytest.approx(math.fsum(found.parts.values()))
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert all(size >= 0 and math.isfinite(size) for size in dataclasses.astuple(found.memory))
    multiplied = layer_parameters(SMALL) - 2 * SMALL.embed_dim  # all but the norms
    flops = 6 * multiplied * SMALL.layers * layout.sequences * 2048 / layout.gpus
    assert found.step_seconds > flops / cluster.gpu.peaks[layout.dtype]
    network = cluster.model_copy(update={"network_bandwidth": 4 * cluster.network_bandwidth})
    assert estimate(SMALL, 2048, layout, network).step_seconds <= found.step_seconds * (1 + 1e-9)


@settings(deadline=None)
@given(LAYOUTS)
def test_memory_that_is_spread_or_computed_again_is_less(layout: Layout) -> None:
    """Each kind of sharding holds no more than the one before, and more recomputation keeps no more."""
    states = []
    for shard in ("nothing", "optimizer", "gradients", "parameters"):
        memory = memory_of(SMALL, 2048, dataclasses.replace(layout, shard=shard))
        states.append(memory.parameters + memory.optimizer + memory.gradients)
    assert states == sorted(states, reverse=True)
    kept = [
        memory_of(SMALL, 2048, dataclasses.replace(layout, recompute=recompute)).activations
        for recompute in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)


def test_what_fits() -> None:
    """8B parameters with all of their states fit a GPU of 80 GB when spread over 8, and not when copied."""
    model = ModelConfig(vocabulary_size=128256, embed_dim=4096, layers=32, heads=32, kv_heads=8, mlp_dim=14336)
    gpu = known().gpus["h100-sxm"]
    spread = Layout(fsdp=8, shard="parameters", recompute="full", logits_chunk=1024)
    assert fits(memory_of(model, 8192, spread), gpu)
    assert not fits(memory_of(model, 8192, dataclasses.replace(spread, shard="nothing")), gpu)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(tensor=3), "tensor = 3 does not divide heads = 16; nearest that does: 2"),
        (Layout(context=3), "context = 3 does not divide sequence_length = 2048; nearest that does: 2"),
        (Layout(pipe=16, virtual_stages=2), "pipe x virtual_stages = 32: must be at most the 16 layers"),
    ],
)
def test_layouts_that_cannot_be(layout: Layout, said: str) -> None:
    cluster = known().cluster(f"h100-sxm:{layout.gpus}x1")
    with pytest.raises(Refused, match=said):
        estimate(SMALL, 2048, layout, cluster)


def test_another_number_of_gpus_is_refused() -> None:
    with pytest.raises(Refused, match="takes 4 GPUs; the cluster has 8"):
        estimate(SMALL, 2048, Layout(fsdp=4), known().cluster("h100-sxm:1x8"))
