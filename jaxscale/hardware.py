"""The one table of GPUs: dense peaks of matrix products, by what jax calls the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU and its dense peaks (no sparsity) in FLOPs a second, with float32 accumulation."""

    device_kind: str
    """Part of `jax.Device.device_kind` that tells it apart; the first entry of the table that is contained counts."""
    bfloat16: float | None
    """None where the GPU has no such units."""
    float32: float
    """Plain float32 units, without TF32."""
    source: str
    """Where the numbers are published."""


GPUS = (
    Gpu("H100 NVL", 835.5e12, 60e12, "NVIDIA H100 product page, NVL column (sparse / 2)"),
    Gpu("H100 PCIe", 756e12, 51e12, "NVIDIA H100 PCIe datasheet"),
    Gpu("H100", 989e12, 67e12, "NVIDIA H100 product page, SXM column (sparse / 2)"),
    Gpu("H200", 989e12, 67e12, "NVIDIA H200 product page, SXM"),
    Gpu("GB200", 2500e12, 80e12, "NVIDIA GB200 NVL72 product page, per GPU"),
    Gpu("B200", 2250e12, 80e12, "NVIDIA HGX B200 datasheet"),
    Gpu("A100", 312e12, 19.5e12, "NVIDIA A100 datasheet"),
    Gpu("V100", None, 15.7e12, "NVIDIA V100 datasheet, SXM2"),
    Gpu("L40S", 362e12, 91.6e12, "NVIDIA L40S datasheet"),
    Gpu("RTX 4090", 165.2e12, 82.6e12, "NVIDIA Ada GPU architecture whitepaper, float32 accumulation"),
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense peak in FLOPs a second of one device for "bfloat16" or "float32" products; None where it is not known.

    `device_kind` is what jax says, such as "NVIDIA H100 80GB HBM3" (the SXM part).
    """
    gpu = next((gpu for gpu in GPUS if gpu.device_kind.lower() in device_kind.lower()), None)
    if gpu is None:
        return None
    return {"bfloat16": gpu.bfloat16, "float32": gpu.float32}.get(dtype)
