"""The page of a plan."""

from __future__ import annotations

from typing import Any

from jaxscale.plan.collectives import Collective
from jaxscale.plan.page import page

FACTS: dict[str, Any] = {
    "devices": 16_384,
    "device_kind": "NVIDIA H100 80GB HBM3",
    "mesh": {"pipe": 1, "replica": 32, "fsdp": 64, "expert": 1, "context": 1, "tensor": 8},
    "microsteps": 4,
    "parameters": 405_853_388_800,
    "tokens_an_update": 16_777_216,
    "flops_an_update": 4.4e19,
    "compile_seconds": 17.3,
    "memory": {
        "arguments": 9_510_000_000,
        "outputs": 9_510_000_400,
        "aliased": 9_510_000_000,
        "temporaries": 41_200_000_000,
        "peak": 50_710_000_400,
    },
    "collectives": [
        one.as_dict()
        for one in (
            Collective("all-gather", ("fsdp",), 64, "bf16", 1008, 640 * 10**9),
            Collective("all-reduce", ("replica", "fsdp", "tensor"), 16_384, "f32", 1, 4, at_least=True),
            Collective("all-reduce", ("tensor",), 8, "bf16", 504, 900 * 10**9),
            Collective("reduce-scatter", ("fsdp",), 64, "bf16+f32", 504, 320 * 10**9),
        )
    ],
}


def test_page() -> None:
    """It fits a terminal; sizes can be read; parts of axes that send most come first, and all are summed up."""
    lines = page(FACTS).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "devices 16,384 x NVIDIA H100 80GB HBM3\nmesh replica 32 x fsdp 64 x tensor 8" in text
    assert "work of an update 44.0 EFLOP" in text
    assert "temporaries 41.2 GB\ntogether 50.7 GB" in text
    order = ["tensor: groups of 8", "fsdp: groups of 64", "replica x fsdp x tensor: groups of 16,384"]
    assert [text.index(heading) for heading in order] == sorted(text.index(heading) for heading in order)
    assert "fsdp: groups of 64\nall-gather bf16 1,008 640.0 GB 630.0 GB\nreduce-scatter bf16+f32 504 320.0 GB" in text
    assert "all-reduce f32 >= 1 4 bytes 8 bytes" in text and ">=: inside a loop" in text
    assert "together 2.5 TB" in text  # 1,575 + 630 + 315 GB
    assert "CPU" not in text


def test_page_of_one_device() -> None:
    """Nothing is exchanged, and the figures are a CPU compiler's."""
    text = page({**FACTS, "device_kind": "cpu", "devices": 1, "mesh": {"fsdp": 1}, "collectives": []})
    assert "No collectives" in text and "Compiled for CPU devices" in text
