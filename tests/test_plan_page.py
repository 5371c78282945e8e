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
    "cluster": "h100-sxm:2048x8",
    "platform": "gpu",
    "memory": {
        "parameters": 3_170_000_000,
        "optimizer": 6_340_000_000,
        "batch": 0,
        "other_state": 28,
        "outputs": 400,
        "temporaries": 41_200_000_000,
        "peak": 50_710_000_428,
        "capacity": 40_000_000_000,
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
    "time": {
        "step_seconds": 12.5,
        "tokens_per_second": 1_342_177.0,
        "tokens_per_second_a_gpu": 81.9,
        "mfu": 0.4321,
        "parts": {"matmul": 8.0, "attention": 2.0, "memory": 1.0, "exposed tensor": 1.25, "optimizer": 0.25},
        "communication": {"tensor": 2.0, "fsdp": 3.0},
        "hidden": {"tensor": 0.75, "fsdp": 3.0},
        "kernels": 10_000,
    },
    "money": {
        "days": 160.0,
        "gpu_hours": 62_914_560.0,
        "kilowatt_hours": 66_060_288.0,
        "cost": 123_456_789.0,
        "failures": 1_241.4,
        "hours_between_failures": 3.09,
        "checkpoint_seconds": 333.6,
        "checkpoint_updates": 27,
        "ettr": 0.8987,
        "days_with_failures": 178.0,
    },
    "advice": ["a piece of advice that is long enough to need a second line of a page for terminals of 80 columns"],
}


def test_page() -> None:
    """It fits a terminal; sizes can be read; parts of axes that send most come first, and all are summed up."""
    lines = page(FACTS).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "devices 16,384 x NVIDIA H100 80GB HBM3\nmesh replica 32 x fsdp 64 x tensor 8" in text
    assert "work of an update 44.0 EFLOP" in text
    assert "other temporaries 41.2 GB\ntogether 50.7 GB\nof 40.0 GB\nit does not fit, by 10.7 GB" in text
    order = ["tensor: groups of 8", "fsdp: groups of 64", "replica x fsdp x tensor: groups of 16,384"]
    assert [text.index(heading) for heading in order] == sorted(text.index(heading) for heading in order)
    assert "fsdp: groups of 64\nall-gather bf16 1,008 640.0 GB 630.0 GB\nreduce-scatter bf16+f32 504 320.0 GB" in text
    assert "all-reduce f32 >= 1 4 bytes 8 bytes" in text and ">=: inside a loop" in text
    assert "together 2.5 TB" in text  # 1,575 + 630 + 315 GB
    assert "CPU" not in text
    assert "tokens/s a GPU 82\nMFU 43.2%\nmatrix products 8.000 s 64.0%" in text
    assert "waiting for tensor 1.250 s 10.0%" in text
    assert "communication over fsdp behind computation 3.000 s" in text
    assert "failures to be expected 1,241.4, one in 3.1 h\nbest interval of checkpoints 27 updates (6 min)" in text
    assert "with failures 178.00 days (ETTR 89.9%)\ncost 123,456,789" in text
    assert lines[-2:] == [
        "  - a piece of advice that is long enough to need a second line of a",
        "    page for terminals of 80 columns",
    ]


def test_page_of_one_device() -> None:
    """Nothing is exchanged, and the figures are a CPU compiler's; of a cluster it says what is left out."""
    unknown = {"platform": "cpu", "time": None, "money": None, "advice": None}
    alone = {"device_kind": "cpu", "devices": 1, "mesh": {"fsdp": 1}, "collectives": [], "cluster": None}
    text = page({**FACTS, **unknown, **alone})
    assert "No collectives" in text and "Compiled for CPU devices" in text and "Time" not in text
    assert "jaxscale[plan]" not in text and "jaxscale[plan]" in page({**FACTS, **unknown})
