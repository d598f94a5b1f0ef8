"""One training iteration, replayed: eager on the CPU, a CUDA graph on the GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

WARM_UP = 3  # iterations that let cuBLAS, autograd and the allocator settle before recording


class Captured:
    """`fn()` without arguments on static tensors. On CUDA it is recorded once and then replayed.

    What `fn` returns is static memory: the next replay overwrites it.
    """

    def __init__(self, fn: Callable[[], Any]):
        self.fn = fn
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def record(self, pool: Any = None) -> Any:
        """Record `fn` on the GPU (nothing runs); the memory pool it used."""
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # an older graph collected while this one is recorded takes memory with it, and the replay crashes
        try:
            with torch.cuda.graph(graph, pool=pool, stream=side_stream(torch.cuda.current_device())):
                self.result = self.fn()
        finally:
            gc.enable()
        self.graph = graph
        return graph.pool()

    def __call__(self) -> Any:
        if self.graph is None:
            return self.fn()
        self.graph.replay()
        return self.result


@cache
def side_stream(index: int) -> torch.cuda.Stream:
    """One stream for warming up and recording: each stream that multiplies matrices takes a workspace of its own, 32 MiB on a Hopper chip."""
    return torch.cuda.Stream(index)


def recordable(device: torch.device) -> bool:
    """Whether what runs there can be recorded."""
    return device.type == "cuda"


def recording() -> bool:
    """Whether what runs now is being recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def aside(fn: Callable[[], Any], device: torch.device, times: int = 1) -> None:
    """Run `fn` so many times, where it can be recorded on the side stream: a recording needs some runs before it, and the
    caller restores what they changed."""
    if not recordable(device):
        for _ in range(times):
            fn()
        return
    stream = side_stream(torch.cuda.current_device() if device.index is None else device.index)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(times):
            fn()
    torch.cuda.current_stream(device).wait_stream(stream)
