"""What a step asks a device for, and how long the device is busy with it: one profiled run, told as figures."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_REPLAYS = ("cudaGraphLaunch",)
_LARGEST = 12  # kernels that are named


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Of a mean step: what the host asked for, by kind, and what the device did."""

    asked: dict[str, float]  # calls by kind; on a CPU operations on tensors
    kernels: float
    busy_ms: float
    largest: tuple[tuple[str, float, float], ...]  # name, launches and milliseconds of those that take most

    def figures(self) -> Iterator[tuple[str, float, str]]:
        """(name, value, unit)"""
        for kind, count in self.asked.items():
            yield kind, count, ""
        yield "kernels", self.kernels, ""
        yield "device busy", self.busy_ms, "ms"
        for name, count, milliseconds in self.largest:
            yield f"kernel {name}, {count:g} times", milliseconds, "ms"


def anatomy_of(run: Callable[[], int], device: torch.device) -> Anatomy:
    """Profile `run`, which returns how many steps it made."""
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities) as profiler:
        steps = run()
        if on_device:
            torch.cuda.synchronize(device)
    calls, kernels, seconds = Counter[str](), Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            name = event.name.split("(")[0][:80]
            kernels[name] += 1
            seconds[name] += event.device_time_total
        else:
            calls[event.name] += 1
    kinds = {"launches": _LAUNCHES, "copies": _COPIES, "graphs replayed": _REPLAYS, "waits": _WAITS}
    asked = {kind: sum(calls[name] for name in names) / steps for kind, names in kinds.items()}
    if not on_device:
        asked = {"operations": sum(count for name, count in calls.items() if name.startswith("aten::")) / steps}
    largest = tuple((name, kernels[name] / steps, us / steps / 1e3) for name, us in seconds.most_common(_LARGEST))
    return Anatomy(asked, kernels.total() / steps, sum(seconds.values()) / steps / 1e3, largest)
