"""The machine that runs this process, in words: what a measurement depends on, and is filed under."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch


@functools.cache
def _processor() -> str:
    """The processor's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_key(device: str = "cpu") -> str:
    """Processor, PyTorch and, for the CPU, intra-op threads; for "cuda" the current device and CUDA's version."""
    if device == "cuda":
        version = torch.version.cuda or torch.version.hip
        return f"{torch.cuda.get_device_name()}, CUDA {version}, torch {torch.__version__}, {_processor()}"
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{_processor()} x{os.cpu_count()}, {capability}, torch {torch.__version__}, {threads} threads"


def settings_key(device: str) -> str:
    """PyTorch's switches that choose between kernels."""
    switches: dict[str, object] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device == "cuda":
        switches["cudnn"] = torch.backends.cudnn.enabled
        switches["cudnn.benchmark"] = torch.backends.cudnn.benchmark
        switches["cudnn.allow_tf32"] = torch.backends.cudnn.allow_tf32
    else:
        switches["mkldnn"] = torch.backends.mkldnn.enabled
    return ", ".join(f"{name} {value}" for name, value in switches.items())
