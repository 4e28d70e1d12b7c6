"""Hardware that a model is trained on: accelerators with their published figures, nodes and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.errors import ConfigError

Precision = Literal["bf16", "fp16", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_MAX_DEVICES = 1 << 17
_MAX_GB, _MAX_BYTES_PER_S = 1e6, 1e15
# Figures of a cluster that are its device's, unless they are given.
_PUBLISHED = (
    "gpu_memory_gb", "reserved_gb", "efficiency", "intra_bytes_per_s", "inter_bytes_per_s", "host_bytes_per_s",
)  # fmt: skip
USUAL_HOST_GB_PER_DEVICE = 250.0  # NVIDIA DGX A100 640GB, H100, H200: 2 TB for 8 devices


@dataclass(frozen=True, slots=True)
class Device:
    """Published figures of one accelerator. Memory is in 10^9 bytes; rates of links are of one direction.

    `peak_flops_per_s`: dense rates (without sparsity) of matrix products, by precision. `efficiency`: the share of this
    rate that a layer's kernels reach; communication and bubbles are priced separately. `reserved_gb`: memory that the
    framework takes. `is_fused`: layers store what Korthikanti et al. 2022 count; layers of plain operators store
    more."""

    name: str
    peak_flops_per_s: Mapping[Precision, float]
    efficiency: float
    memory_gb: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    host_bytes_per_s: float
    reserved_gb: float
    is_fused: bool
    source: str
    has_host: bool = True  # a host has memory in addition to its own


def _make_peaks(sixteen: float, wide: float) -> Mapping[Precision, float]:
    return {"bf16": sixteen, "fp16": sixteen, "fp32": wide}


# Efficiencies: with this value step times on A100s agree with Korthikanti et al. 2022 (table 5) within 18 %
# (tests/bench/estimate.py). Newer devices have the lower share that published runs reach. Each GPU has one network
# adapter to other nodes: 200, 400 and 400 Gbit/s.
_A100 = Device(
    "a100", _make_peaks(312e12, 19.5e12), 0.6, 80.0, 2.039e12, 300e9, 25e9, 25e9, 2.0, True,
    "NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s both ways, PCIe 4 x16",
)  # fmt: skip
_H100 = Device(
    "h100", _make_peaks(989.4e12, 66.9e12), 0.5, 80.0, 3.35e12, 450e9, 50e9, 50e9, 2.0, True,
    "NVIDIA H100 SXM data sheet: 989.4 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s both ways, PCIe 5 x16",
)  # fmt: skip
_H200 = replace(
    _H100, name="h200", memory_gb=141.0, memory_bytes_per_s=4.8e12,
    source="NVIDIA H200 SXM data sheet: 989.4 TFLOP/s, 4.8 TB/s, NVLink 900 GB/s both ways, PCIe 5 x16",
)  # fmt: skip
_CPU = Device(
    "cpu", _make_peaks(50e9, 50e9), 1.0, 2.0, 10e9, 2e9, 1e9, 10e9, 0.0, False,
    "the order of magnitude of one core: measure this machine with dynapipe train or dynapipe profile", has_host=False,
)  # fmt: skip
DEVICES: Mapping[str, Device] = {device.name: device for device in (_A100, _H100, _H200, _CPU)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster of `nodes` x `gpus_per_node` devices. Memory is in 10^9 bytes. `reserved_gb` of each device is left to
    the framework (contexts, communicators, fragmentation). `host_memory_gb`: of one node; 0: unknown, 250 GB per device
    are assumed. Raises ConfigError for a figure outside of its range."""

    device: Device
    nodes: int
    gpus_per_node: int
    gpu_memory_gb: float
    reserved_gb: float
    efficiency: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    host_bytes_per_s: float
    host_memory_gb: float = 0.0
    intra_latency_ns: int = 5_000
    inter_latency_ns: int = 15_000

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            if not 1 <= getattr(self, name) <= 1 << 16:
                raise ConfigError(f"{name} is {getattr(self, name)} but must be 1 to 65,536: give the cluster's count")
        if self.world_size > _MAX_DEVICES:
            raise ConfigError(f"{self.nodes} x {self.gpus_per_node} devices are above {_MAX_DEVICES:,}: give fewer")
        for name in (*_PUBLISHED, "host_memory_gb"):
            value, max_value = getattr(self, name), _MAX_GB if name.endswith("_gb") else _MAX_BYTES_PER_S
            max_value = 1 if name == "efficiency" else max_value
            may_be_0 = name in ("reserved_gb", "host_memory_gb")
            if not 0 <= value <= max_value or not (value or may_be_0):
                bound = "at least 0" if may_be_0 else "above 0"
                raise ConfigError(f"{name} is {value:g} but must be {bound}, and at most {max_value:g}")
        if self.reserved_gb >= self.gpu_memory_gb:
            raise ConfigError(
                f"reserved_gb is {self.reserved_gb:g} of {self.gpu_memory_gb:g} GB of a device: give less than it has"
            )

    @classmethod
    def from_device(cls, device: Device, *, nodes: int = 1, gpus_per_node: int = 8, **changed: float | None) -> Cluster:
        """Return a cluster of this device, with its published figures unless `changed` gives a value."""
        figures = {name: getattr(device, "memory_gb" if name == "gpu_memory_gb" else name) for name in _PUBLISHED}
        figures |= {name: float(value) for name, value in changed.items() if value is not None}
        return cls(device=device, nodes=nodes, gpus_per_node=gpus_per_node, **figures)

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def usual_host_bytes(self) -> float:
        """Memory of one node's host in bytes; if it is unknown, 250 GB per device, as published systems have."""
        return 1e9 * (self.host_memory_gb or USUAL_HOST_GB_PER_DEVICE * self.gpus_per_node)

    @property
    def limit_bytes(self) -> int:
        """Bytes of one device that may be planned: its memory without the reserved part."""
        return round((self.gpu_memory_gb - self.reserved_gb) * 1e9)

    @property
    def links(self) -> Links:
        return Links(
            intra=Link(self.intra_latency_ns, self.intra_bytes_per_s),
            inter=Link(self.inter_latency_ns, self.inter_bytes_per_s),
            ranks_per_node=self.gpus_per_node,
        )

    def flops_per_s(self, precision: Precision) -> float:
        """Return the FLOP/s that one device reaches: its peak times its efficiency."""
        return self.device.peak_flops_per_s[precision] * self.efficiency

    def group_link(self, stride: int, size: int) -> Link:
        """Return the slowest link of a ring over `size` ranks `stride` apart, starting at a multiple of their span.

        >>> cluster = Cluster.from_device(DEVICES["a100"], nodes=2, gpus_per_node=8)
        >>> [cluster.group_link(s, n).bytes_per_s / 1e9 for s, n in ((1, 8), (4, 2), (8, 2), (1, 3))]
        [300.0, 300.0, 25.0, 25.0]
        """
        links = self.links
        return links.intra if self.nodes == 1 else links.find_group_link(stride, size)
