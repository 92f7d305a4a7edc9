"""How much memory a rank has used."""

from pathlib import Path

import torch


def peak_memory_mib(device: torch.device) -> float:
    """Memory of the device at its highest so far, or of this process where the device is the CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes
