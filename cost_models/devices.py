"""Accelerators by name: peak rates and memory from the makers' datasheets.

SI units: 1 TB/s is 1e12 bytes/s, 1 TFLOP/s is 1e12 FLOP/s. Rates are dense ones: where a datasheet gives the rate "with
sparsity", half of it stands here. float32 is the rate of ordinary float32 arithmetic, since PyTorch does not use TF32
for matrix products unless told to (https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from placemat.graph.errors import UnsupportedFeature

# Seconds that one more small kernel adds to a stream: no datasheet has it. A kernel of 2.9 us took 3.8 us per launch
# back to back, and 9.6 us with a synchronisation after each, on a V100:
# https://developer.nvidia.com/blog/cuda-graphs/. Between the two, since eager dispatch rarely keeps the queue full.
KERNEL_LAUNCH_S = 5e-6


@dataclass(frozen=True)
class DeviceSpec:
    """What a roofline needs to know of a device.

    Attributes:
        name: for people.
        peak_flops_per_s: dense multiply-add rate, 2 FLOPs each, by dtype ("float32", "bfloat16", ...).
        bandwidth_bytes_per_s: of the device's own memory, reads and writes together.
        launch_s: fixed seconds per op.
        memory_bytes: as sold; 0 where it was not looked up (host).
        source: where the figures come from.
        random_numbers_per_s: drawn by a dropout or another random op; infinite on GPUs, where traffic hides them.
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float
    launch_s: float
    memory_bytes: int
    source: str
    random_numbers_per_s: float = inf

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate in a dtype; the slowest listed one for dtypes that the table does not have."""
        return self.peak_flops_per_s.get(dtype, min(self.peak_flops_per_s.values()))


def _gpu(
    name: str,
    *,
    float64: float,
    float32: float,
    half: float,
    bandwidth_bytes_per_s: float,
    memory_bytes: float,
    source: str,
) -> DeviceSpec:
    rates = {"float64": float64, "float32": float32, "float16": half, "bfloat16": half}
    return DeviceSpec(
        name=name,
        peak_flops_per_s=rates,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        launch_s=KERNEL_LAUNCH_S,
        memory_bytes=int(memory_bytes),
        source=source,
    )


_DEVICES = (
    _gpu(
        "A100 80GB SXM",
        float64=19.5e12,  # tensor cores
        float32=19.5e12,
        half=312e12,
        bandwidth_bytes_per_s=2.039e12,
        memory_bytes=80e9,
        source="NVIDIA A100 80GB datasheet, https://www.nvidia.com/en-us/data-center/a100/",
    ),
    _gpu(
        "H100 SXM",
        float64=67e12,  # tensor cores
        float32=67e12,
        half=989.5e12,  # 1,979 with sparsity
        bandwidth_bytes_per_s=3.35e12,
        memory_bytes=80e9,
        source="NVIDIA H100 datasheet, https://www.nvidia.com/en-us/data-center/h100/",
    ),
    _gpu(
        "H200",
        float64=67e12,  # tensor cores
        float32=67e12,
        half=989.5e12,  # 1,979 with sparsity
        bandwidth_bytes_per_s=4.8e12,
        memory_bytes=141e9,
        source="NVIDIA H200 SXM datasheet, https://www.nvidia.com/en-us/data-center/h200/",
    ),
    _gpu(
        "B200",
        float64=37e12,
        float32=75e12,
        half=2.25e15,  # 4.5 PFLOP/s with sparsity
        bandwidth_bytes_per_s=8e12,
        memory_bytes=180e9,
        source="NVIDIA HGX B200 and DGX B200 datasheets, one of eight GPUs, https://www.nvidia.com/en-us/data-center/hgx/",
    ),
    _gpu(
        "L4",
        float64=0.47e12,  # 1/64 of float32
        float32=30.3e12,
        half=121e12,  # 242 with sparsity
        bandwidth_bytes_per_s=0.3e12,
        memory_bytes=24e9,
        source="NVIDIA L4 datasheet, https://www.nvidia.com/en-us/data-center/l4/",
    ),
    _gpu(
        "RTX 4090",
        float64=1.29e12,  # 1/64 of float32
        float32=82.6e12,
        half=165.2e12,  # accumulating in float32, as PyTorch does
        bandwidth_bytes_per_s=1.008e12,
        memory_bytes=24e9,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A, table 2",
    ),
    _gpu(
        "MI300X",
        float64=163.4e12,  # matrix cores
        float32=163.4e12,
        half=1307.4e12,
        bandwidth_bytes_per_s=5.3e12,
        memory_bytes=192e9,
        source="AMD Instinct MI300X data sheet, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
)

DEVICES: Mapping[str, DeviceSpec] = {device.name: device for device in _DEVICES}

# What `torch.cuda.get_device_name` says, by table entry. Exact: an A100 40GB or an H100 PCIe is another device.
_CUDA_NAMES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA L4": "L4",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X OAM": "MI300X",
}


def device_spec(name: str) -> DeviceSpec:
    """Look a device up by its name in the table or by what `torch.cuda.get_device_name` calls it.

    Raises:
        UnsupportedFeature: the name is in neither; the message lists the table.
    """
    entry = _CUDA_NAMES.get(name, name)
    if entry not in DEVICES:
        raise UnsupportedFeature(
            f"no figures for the device {name!r}. Known: {', '.join(DEVICES)}. For another one pass "
            "`cost_model=Roofline(DeviceSpec(...))` with its rates from the datasheet."
        )
    return DEVICES[entry]
