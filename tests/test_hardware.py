"""The table of GPUs and clusters: what it holds, how text and files name more, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxscale.config.errors import Refused
from jaxscale.hardware import hardware, known, peak_flops

ASKED_FOR = (
    "v100", "a100-40", "a100-80", "h100-sxm", "h100-sxm-96", "h100-nvl", "h100-pcie", "h200", "b200", "gb200", "l40s",
    "rtx-4090", "mi250x", "mi300x",
)  # fmt: skip


@pytest.mark.parametrize("name", ASKED_FOR)
def test_numbers_are_physically_consistent(name: str) -> None:
    """Of every GPU: narrower dtypes are not slower, links are slower than memory, and each number has a source."""
    gpu = known().gpu(name)
    half, single = gpu.peaks["float16"], gpu.peaks["float32"]
    assert half > single and gpu.peaks.get("bfloat16", half) == half
    assert gpu.peaks.get("float8", 2 * half) == pytest.approx(2 * half, rel=0.02)
    assert gpu.peaks.get("tf32", half / 2) == pytest.approx(half / 2, rel=0.02)
    assert gpu.memory_bandwidth > gpu.link_bandwidth >= gpu.host_bandwidth > 1e9
    assert (gpu.calibration.matmul_float8 is not None) == ("float8" in gpu.peaks)
    assert gpu.calibration.attention < gpu.calibration.matmul
    assert gpu.source and gpu.calibration.source


NOT_COMPILED_FOR = {"v100", "mi250x", "mi300x"}
"""CUDA 13 has left the V100 behind, and the plugin is NVIDIA's."""


@pytest.mark.parametrize("name", [name for name in ASKED_FOR if name not in NOT_COMPILED_FOR])
def test_the_compilers_cores_make_the_published_float32_peak(name: str) -> None:
    """Cores x units x 2 FLOPs x clock is the datasheet's float32 peak: two sources that must agree.

    The clock is the highest, a datasheet's is that of sustained boost, so up to 30 % may lie between.
    """
    gpu = known().gpu(name)
    assert gpu.compiler is not None
    units = gpu.cores * gpu.compiler.fpus_per_core
    peak = 2 * units * gpu.compiler.clock_ghz * 1e9
    assert gpu.peaks["float32"] * 0.95 < peak < gpu.peaks["float32"] * 1.3
    assert gpu.compiler.shared_memory_per_block <= gpu.compiler.shared_memory_per_core


@pytest.mark.parametrize("name", sorted(NOT_COMPILED_FOR))
def test_what_there_is_no_compiler_for(name: str) -> None:
    assert known().gpu(name).compiler is None


@pytest.mark.parametrize("name", known().clusters)
def test_named_clusters_can_be_built(name: str) -> None:
    cluster = known().cluster(f"{name}:64")
    assert cluster.gpus == 64 * cluster.gpus_a_host
    assert cluster.network_bandwidth < cluster.gpu.memory_bandwidth and cluster.source


@pytest.mark.parametrize(
    ("text", "gpus", "domain", "network"),
    [
        ("h100-sxm:64x8", 512, 8, 400e9 / 8),
        ("h100-sxm:2x4", 8, 4, 400e9 / 8),
        ("h100-sxm:1x16", 16, 8, 400e9 / 8),
        ("tx-gain:128", 256, 2, 25e9 / 8 / 2),
        ("dgx-h100:2", 16, 8, 400e9 / 8),
        ("dgx-a100:1", 8, 8, 200e9 / 8),
        ("dgx-1v:1", 8, 8, 4 * 100e9 / 8 / 8),
        ("jean-zay-a100:48", 384, 8, 4 * 100e9 / 8 / 8),
        ("gb200-nvl72:18", 72, 72, 400e9 / 8),
        ("gb200-nvl72:36", 144, 72, 400e9 / 8),
        ("gb200:2x4", 8, 8, 400e9 / 8),
    ],
)
def test_clusters_by_text(text: str, gpus: int, domain: int, network: float) -> None:
    """GPUs, fast domain, and bytes/s of the network for each GPU, by hand from what is published."""
    cluster = known().cluster(text)
    assert (cluster.name, cluster.gpus, cluster.link_domain) == (text, gpus, domain)
    assert cluster.network_bandwidth == network


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("h100:64x8", ("'h100'", "nearest: h100-nvl", "h100-sxm")),
        ("dgx-h10:64", ("'dgx-h10'", "nearest: dgx-h100", "tx-gain")),
        ("h100-sxm", ("GPU:HOSTSxGPUS",)),
        ("h100-sxm:0x8", ("GPU:HOSTSxGPUS",)),
        ("h100-sxm:8x", ("GPU:HOSTSxGPUS",)),
        ("h100-sxm:-1x8", ("GPU:HOSTSxGPUS",)),
        ("h100-sxm:2x12", ("12 h100-sxm", "join 8", "nearest: 8")),
        ("h100-nvl:2x3", ("3 h100-nvl", "join 2", "nearest: 2")),
        ("gb200:9x5", ("5 gb200", "join 72", "nearest: 4")),
        ("l40s:1x5000", ("5000 l40s", "nearest: 16")),
    ],
)
def test_clusters_that_cannot_be(text: str, told: tuple[str, ...]) -> None:
    with pytest.raises(Refused) as refused:
        known().cluster(text)
    assert all(part in str(refused.value) for part in told), refused.value


def test_a_users_own_file(tmp_path: Path) -> None:
    """An entry differs from the one it is like only in what it says; nothing of the source is taken over."""
    path = tmp_path / "ours.toml"
    path.write_text(
        """
        [gpu.ours]
        like = "h100-sxm"
        power = 500
        source = "our contract"
        [gpu.ours.calibration]
        matmul = 0.7
        source = "measured here"
        [cluster.basement]
        gpu = "ours"
        gpus_a_host = 4
        network_bandwidth = 3e9
        """
    )
    found = hardware(path)
    ours, base = found.gpu("ours"), known().gpu("h100-sxm")
    same = {"power": base.power, "source": base.source, "name": base.name, "device_kind": base.device_kind}
    calibration = ours.calibration.model_copy(
        update={"matmul": base.calibration.matmul, "source": base.calibration.source}
    )
    assert (ours.power, ours.source, ours.device_kind) == (500, "our contract", None)
    assert (ours.calibration.matmul, ours.calibration.source) == (0.7, "measured here")
    assert ours.model_copy(update={**same, "calibration": calibration}) == base
    cluster = found.cluster("basement:3")
    assert (cluster.gpu, cluster.gpus, cluster.network_bandwidth) == (ours, 12, 3e9)
    assert "ours" not in known().gpus


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[gpu.a]\nlike = "h100-sxm"', ("gpu.a.source", "is missing")),
        ('[gpu.a]\nlike = "h100-sxm"\nsource = ""\npowr = 3', ("gpu.a.powr", "nearest: power")),
        ('[gpu.a]\nlike = "h100-sxm"\nsource = ""\npower = -3', ("gpu.a.power = -3", "greater than 0")),
        ('[gpu.a]\nlike = "h100-sxm"\nsource = ""\npower = "3"', ("gpu.a.power = '3'", "must be a valid number")),
        ('[gpu.a]\nlike = "h100-sxm"\nsource = ""\npower = inf', ("gpu.a.power", "finite")),
        ('[gpu.a]\nlike = "h100-sxm"\nsource = ""\n[gpu.a.peaks]\nbf16 = 1e12', ("gpu.a.peaks", "not of bf16")),
        ('[gpu.a]\nlike = "h100-sxm"\nsource = ""\n[gpu.a.calibration]\nmatmul = 0.7', ("calibration.source",)),
        (
            '[gpu.a]\nlike = "h100-sxm"\nsource = ""\n[gpu.a.calibration]\nsource = ""\nmatmul = 70',
            ("gpu.a.calibration.matmul = 70", "less than or equal to 1"),
        ),
        ('[gpu.a]\nlike = "h100-sx"\nsource = ""', ("gpu.a.like", "nearest: h100-sxm")),
        ('[cluster.a]\ngpu = "h200x"\ngpus_a_host = 8', ("cluster.a.gpu", "nearest: h200")),
        ('[cluster.a]\ngpu = "h200"\ngpus_a_host = 8.5', ("cluster.a.gpus_a_host = 8.5", "integer")),
        ("[gpus.a]\npower = 1", ("gpus", "nearest: gpu")),
        ("[gpu]\na = 3", ("gpu.a = 3", "must be a table")),
        ("power =", ("cannot be read",)),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, told: tuple[str, ...]) -> None:
    """The message names the file, the key, its value and what is allowed."""
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(Refused) as refused:
        hardware(path)
    assert all(part in str(refused.value) for part in (str(path), *told)), refused.value


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"nothing\.toml"):
        hardware(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_devices_are_told_apart(kind: str, name: str) -> None:
    """The most specific entry counts, whatever the order of the table."""
    assert peak_flops(kind, "bfloat16") == known().gpu(name).peaks["bfloat16"]
    assert peak_flops(kind, "float64") is None
