"""The device mesh: which device stands where, fast links inside and slow links outside."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxscale.config.devices import resolve_mesh
from jaxscale.config.schema import MeshConfig

OUTER_TO_INNER = ("pipe", "replica", "fsdp", "expert", "context", "tensor")
"""Axes by the bandwidth that they need, least first: the last one varies fastest over the devices of a host."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a config on these devices; every axis exists, also those of size 1.

    Devices are taken host by host, so neighbours on the inner axes share a host as far as the sizes allow.

    Raises:
        Refused: the axes do not multiply to the number of devices.
    """
    sizes = resolve_mesh(config, len(devices))
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered).reshape([sizes[axis] for axis in OUTER_TO_INNER])
    return Mesh(grid, OUTER_TO_INNER, axis_types=(AxisType.Auto,) * len(OUTER_TO_INNER))
