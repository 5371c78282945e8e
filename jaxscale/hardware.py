"""GPUs and clusters: the table of `hardware.toml`, and additions in files of the same form.

h100-sxm:64x8     64 hosts with 8 GPUs each, with the network that such hosts usually have
tx-gain:128       128 hosts of a cluster of the table
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from jaxscale.config.errors import Refused
from jaxscale.config.section import Section
from jaxscale.config.types import PositiveInt

TABLE = Path(__file__).with_name("hardware.toml")
RESERVED_BYTES = 2 * 2**30
"""Memory of a GPU that no program gets: driver, CUDA context, and buffers of NCCL."""

LARGEST_HOST = 16
"""GPUs: a larger fast domain spans hosts."""
Positive = Field(gt=0)
Dtype = Literal["bfloat16", "float16", "float8", "tf32", "float32"]
OWN = ("like", "source", "device_kind")
"""Keys that an entry does not take from the one that it is like: it says itself what it is, and where that is from."""


class CompilerTarget(Section):
    """What XLA has to know of a GPU to compile for it."""

    compute_capability: tuple[int, int]
    fpus_per_core: PositiveInt
    threads_per_core: PositiveInt
    shared_memory_per_core: PositiveInt
    """Bytes."""
    shared_memory_per_block: PositiveInt
    """Bytes that a block can ask for."""
    l2_bytes: PositiveInt
    clock_ghz: float = Positive


class Calibration(Section):
    """What is measured rather than a peak. Nothing here belongs to a model."""

    matmul: float = Field(gt=0, le=1)
    """Share of the peak that the best large product in bfloat16 or float16 reaches."""
    matmul_float8: float | None = Field(default=None, gt=0, le=1)
    """The same of float8; None where the GPU has none."""
    memory: float = Field(gt=0, le=1)
    """Share of the memory's bandwidth that large element-wise kernels reach."""
    attention: float = Field(gt=0, le=1)
    """Share of the peak in fused attention, forward."""
    attention_backward: float = Field(gt=0, le=1)
    link: float = Field(gt=0, le=1)
    """Share of the links' bandwidth that large collectives reach."""
    network: float = Field(gt=0, le=1)
    """The same of the network."""
    link_latency: float = Field(default=3.4e-6, gt=0)
    """Seconds of a step of a ring over links (NCCL 2.2x, graph/tuning.cc: hwLat of NVLink, ring, simple)."""
    network_latency: float = Field(default=14e-6, gt=0)
    """Seconds of a step of a ring over the network (the same: hwLat of NET, ring, simple)."""
    base_latency: float = Field(default=8.4e-6, gt=0)
    """Seconds that any collective takes (the same: baseLat, ring, simple)."""
    kernel_seconds: float = Field(default=2e-6, gt=0)
    """Least time of a kernel: of one that touches a single element on an H100 (pytorch/ao, roofline_utils.py)."""
    source: str


class Gpu(Section):
    """A kind of GPU. Rates of links are those of one direction."""

    name: str
    device_kind: str | None = None
    """Part of `jax.Device.device_kind` that tells it apart; the longest that is contained counts."""
    peaks: Mapping[str, float]
    """Dense FLOP/s (no sparsity) by dtype, with float32 accumulation; what it has no units for is not there."""
    cores: PositiveInt
    """Streaming multiprocessors, or compute units."""
    memory_bytes: float = Positive
    memory_bandwidth: float = Positive
    link_bandwidth: float = Positive
    """Bytes/s of one GPU to the others of its fast domain."""
    link_domain: PositiveInt
    """GPUs that reach each other at that rate."""
    host_bandwidth: float = Positive
    """Bytes/s of one GPU to those of its host outside of its domain."""
    network_bandwidth: float = Positive
    """Bytes/s of the network for each GPU, in hosts as they are usually built."""
    power: float = Positive
    """Watts."""
    calibration: Calibration
    compiler: CompilerTarget | None = None
    """None: there is no compiler for it, and only the analytical path."""
    source: str

    @field_validator("peaks")
    @classmethod
    def _known_dtypes(cls, peaks: Mapping[str, float]) -> Mapping[str, float]:
        wrong = [dtype for dtype, peak in peaks.items() if dtype not in get_args(Dtype) or not peak > 0]
        if wrong or "float32" not in peaks:
            raise ValueError(
                f"must be FLOP/s above 0 of {', '.join(get_args(Dtype))}, of which float32 is always there"
                + (f", not of {wrong[0]}" if wrong else "")
            )
        return peaks


class Cluster(Section):
    """Hosts that are alike, and the network between them."""

    name: str
    gpu: Gpu
    hosts: PositiveInt
    gpus_a_host: PositiveInt
    network_bandwidth: float = Positive
    """Bytes/s, one direction, for each GPU."""
    source: str

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.hosts * self.gpus_a_host

    @property
    def link_domain(self) -> int:
        """GPUs in a row that reach each other over fast links: of a host, or of a rack where links join hosts."""
        across = self.gpu.link_domain > LARGEST_HOST
        return min(self.gpu.link_domain, self.gpus if across else self.gpus_a_host)


class _ClusterEntry(Section):
    """A cluster in a file."""

    gpu: str
    gpus_a_host: PositiveInt
    network_bandwidth: float | None = Field(default=None, gt=0)
    source: str = "a file of the user's"


class _Table(Section):
    """GPUs and clusters by name, as files have them."""

    gpu: dict[str, dict[str, Any]] = Field(default_factory=dict)
    cluster: dict[str, _ClusterEntry] = Field(default_factory=dict)


class Hardware(Section):
    """All GPUs and clusters that are known."""

    gpus: dict[str, Gpu]
    clusters: dict[str, _ClusterEntry]

    def gpu(self, name: str) -> Gpu:
        """The GPU of this name; raises Refused for an unknown one."""
        if name not in self.gpus:
            raise Refused(_unknown("GPU", name, self.gpus))
        return self.gpus[name]

    def cluster(self, text: str) -> Cluster:
        """The cluster that `GPU:HOSTSxGPUS` or `NAME:HOSTS` describes.

        Raises:
            Refused: there is no such GPU or cluster, or no such number.
        """
        name, _, size = text.partition(":")
        hosts, times, gpus = size.partition("x")
        counts = [part for part in (hosts, gpus) if part]
        if not size or not all(part.isdecimal() and int(part) for part in counts) or bool(times) != bool(gpus):
            raise Refused(f"--cluster {text}: must be GPU:HOSTSxGPUS, such as h100-sxm:64x8, or NAME:HOSTS")
        if not gpus:
            if name not in self.clusters:
                raise Refused(_unknown("cluster", name, self.clusters))
            entry = self.clusters[name]
            gpu, each, network, source = self.gpu(entry.gpu), entry.gpus_a_host, entry.network_bandwidth, entry.source
        else:
            gpu, each, network = self.gpu(name), int(gpus), None
            source = gpu.source
        _refuse_torn_domains(text, gpu, each)
        return Cluster(
            name=text,
            gpu=gpu,
            hosts=int(hosts),
            gpus_a_host=each,
            network_bandwidth=network or gpu.network_bandwidth,
            source=source,
        )


def hardware(additions: Path | None = None) -> Hardware:
    """The table, with the GPUs and clusters of a file of the same form added to it or in the place of its own.

    Raises:
        Refused: the file cannot be read, or an entry of it is wrong.
    """
    entries, clusters = dict[str, dict[str, Any]](), dict[str, _ClusterEntry]()
    gpus: dict[str, Gpu] = {}
    for path in (TABLE, *([additions] if additions else [])):
        table = _read(path)
        for name, entry in table.gpu.items():
            entries[name] = _like(path, name, entry, entries)
            try:
                gpus[name] = Gpu(name=name, **_tuples(entries[name]))
            except ValidationError as error:
                raise Refused("\n".join(_complaints(path, f"gpu.{name}", error))) from None
        clusters |= table.cluster
        for name, cluster in table.cluster.items():
            if cluster.gpu not in gpus:
                raise Refused(f"{path}: cluster.{name}.gpu: {_unknown('GPU', cluster.gpu, gpus)}")
    return Hardware(gpus=gpus, clusters=clusters)


def _refuse_torn_domains(text: str, gpu: Gpu, gpus_a_host: int) -> None:
    """Refuse hosts that would tear a fast domain: devices are numbered host by host, and domains one after another."""
    domain = gpu.link_domain
    if domain > LARGEST_HOST:
        fitting = [size for size in range(1, LARGEST_HOST + 1) if domain % size == 0]
    else:
        fitting = [size for size in range(1, LARGEST_HOST + 1) if size < domain or size % domain == 0]
    if gpus_a_host not in fitting:
        nearest = min(fitting, key=lambda size: abs(size - gpus_a_host))
        raise Refused(
            f"--cluster {text}: a host cannot have {gpus_a_host} {gpu.name}, whose fast links join {domain}; it can "
            f"have {', '.join(map(str, fitting))}; nearest: {nearest}"
        )


@cache
def known() -> Hardware:
    """The table without additions."""
    return hardware()


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense peak in FLOPs a second of one device for products in a dtype such as "bfloat16"; None: not known.

    `device_kind` is what jax says, such as "NVIDIA H100 80GB HBM3" (the SXM part).
    """
    gpu = find_kind(device_kind)
    return None if gpu is None else gpu.peaks.get(dtype)


def find_kind(device_kind: str) -> Gpu | None:
    """The GPU that jax calls so; None where the table has none."""
    fitting = [
        gpu for gpu in known().gpus.values() if gpu.device_kind and gpu.device_kind.lower() in device_kind.lower()
    ]
    return max(fitting, key=lambda gpu: len(gpu.device_kind or ""), default=None)


def _read(path: Path) -> _Table:
    """The tables of a file."""
    try:
        return _Table.model_validate(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"{path}: cannot be read as hardware: {error}") from None
    except ValidationError as error:
        raise Refused("\n".join(_complaints(path, "", error))) from None


def _like(path: Path, name: str, entry: Mapping[str, Any], entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """An entry laid over the one that it is like; tables in it key by key, but peaks as a whole."""
    base = entry.get("like")
    if base is None:
        return dict(entry)
    if base not in entries:
        raise Refused(f"{path}: gpu.{name}.like: {_unknown('GPU', str(base), entries)}")
    whole = {key: value for key, value in entries[base].items() if key not in OWN}
    for key, value in entry.items():
        merges = key in ("calibration", "compiler") and isinstance(value, dict) and isinstance(whole.get(key), dict)
        inherited = {k: v for k, v in whole[key].items() if k not in OWN} if merges else {}
        whole[key] = {**inherited, **value} if merges else value
    return {key: value for key, value in whole.items() if key != "like"}


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    """TOML's lists as tuples, which the strict sections want."""
    return {
        key: tuple(value) if isinstance(value, list) else _tuples(value) if isinstance(value, dict) else value
        for key, value in entry.items()
    }


def _complaints(path: Path, prefix: str, error: ValidationError) -> list[str]:
    """A line for each wrong value of an entry."""
    found = []
    for one in error.errors():
        key = ".".join(str(part) for part in (prefix, *one["loc"]) if part != "")
        shown = "" if isinstance(one["input"], dict) else f" = {one['input']!r}"
        match one["type"]:
            case "extra_forbidden":
                shown, what = "", f"there is no such key; nearest: {_nearest_key(str(one['loc'][-1]))}"
            case "missing":
                what = "is missing"
            case "dict_type":
                what = f"must be a table, [{key}]"
            case _:
                what = one["msg"].replace("Input should", "must").replace("Value error, ", "")
        found.append(f"{path}: {key}{shown}: {what}")
    return found


def _nearest_key(key: str) -> str:
    """The key of any table of a file that is spelt most alike."""
    sections = (_Table, _ClusterEntry, Gpu, Calibration, CompilerTarget)
    return difflib.get_close_matches(key, {name for one in sections for name in one.model_fields}, 1, 0.0)[0]


def _unknown(what: str, name: str, names: Mapping[str, Any]) -> str:
    """That there is no GPU or cluster of a name, which there are, and which is nearest."""
    begun_alike = sorted(known for known in names if known.startswith(name) or name.startswith(known))
    nearest = [*begun_alike, *difflib.get_close_matches(name, names, 1, 0.0)][0]
    return f"there is no {what} {name!r}; nearest: {nearest}; there are {', '.join(sorted(names))}"
