"""The law *account*: FLOPs follow the written formula, derived again by hand; the ledger adds up to the wall clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jaxscale.config.load import load
from jaxscale.config.model import ModelConfig
from jaxscale.flops import flops_per_token, parameter_count
from jaxscale.hardware import known, peak_flops
from jaxscale.runtime.ledger import read_attempts, read_totals
from tests.command import Workplace

CONFIGS = Path(__file__).parents[2] / "configs"


def product(rows: int, inner: int, columns: int) -> int:
    """Operations of [rows, inner] x [inner, columns]: a multiplication and an addition for each term."""
    return 2 * rows * inner * columns


def forward(model: ModelConfig, s: int) -> int:
    """Operations of the forward pass of one row of `s` tokens, product by product."""
    d, h, kv = model.embed_dim, model.heads, model.kv_heads or model.heads
    w = model.head_dim or d // h
    layer = product(s, d, h * w) + 2 * product(s, d, kv * w) + product(s, h * w, d)
    layer += sum(product(s, d, model.mlp_dim) for _ in range(2 if model.activation == "swiglu" else 1))
    layer += product(s, model.mlp_dim, d)
    for position in range(s):
        attended = position + 1 if model.causal else s
        layer += h * (product(1, w, attended) + product(1, attended, w))
    head = product(s, d, d) if model.head_transform else 0
    return model.layers * layer + head + product(s, d, model.vocabulary_size)


@pytest.mark.parametrize("name", ["tiny/decoder", "tiny/encoder", "qwen3/0.6b", "llama3/8b", "gpt2/124m", "bert/base"])
def test_flops_by_hand(name: str) -> None:
    """The backward pass repeats each product twice, so a token costs three times its share of the forward pass."""
    model = load(CONFIGS / f"{name}.toml").model
    for s in (1, 7, 256):
        assert flops_per_token(model, s) * s == 3 * forward(model, s)


def test_flops_leave_out_rematerialisation_and_dropout() -> None:
    """What is computed again is not progress."""
    file = CONFIGS / "tiny" / "decoder.toml"
    plain, other = load(file), load(file, ["model.remat=full", "model.dropout=0.1"])
    assert flops_per_token(plain.model, 256) == flops_per_token(other.model, 256)


def test_parameters_by_hand() -> None:
    """Llama-3-8B, matrix by matrix."""
    d, vocabulary, mlp, kv = 4096, 128_256, 14_336, 8 * 128
    layer = d * d + d * kv + d * kv + d * d + 3 * d * mlp + 2 * d
    expected = vocabulary * d + 32 * layer + d + d * vocabulary
    assert parameter_count(load(CONFIGS / "llama3" / "8b.toml").model) == expected == 8_030_261_248


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 NVL", "bfloat16", 835.5e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_peaks(kind: str, dtype: str, peak: float | None) -> None:
    """Devices are told apart by what jax calls them; what is not known is None, never a guess."""
    assert peak_flops(kind, dtype) == peak
    assert all(gpu.source and gpu.calibration.source for gpu in known().gpus.values())


def test_ledger_of_a_run_adds_up_to_the_wall_clock(tmp_path: Path) -> None:
    """From the birth of the process to the closing of the ledger, phases miss less than 1 %; the exit follows."""
    place = Workplace(tmp_path)
    for attempt in range(2):
        begin = time.time()
        place.train("run", f"train.steps={4 * (attempt + 1)}", "checkpoint.every_steps=2")
        end = time.time()
        ledger = place.run_dir("run") / "ledger.jsonl"
        phases = read_attempts(ledger)[attempt]
        total = sum(phases.values())
        closed = ledger.stat().st_mtime
        assert abs(total - (closed - begin)) < 0.01 * (closed - begin) + 0.05  # 0.05: starting a process is not ours
        assert end - closed < 3
        assert {"start", "compile", "train", "data", "checkpoint", "report"} <= phases.keys()
    assert sum(read_totals(ledger).values()) == pytest.approx(
        sum(sum(attempt.values()) for attempt in read_attempts(ledger))
    )
