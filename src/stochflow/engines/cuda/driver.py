"""CUDA C++ compiled where it runs, by the NVRTC library that comes with PyTorch's CUDA builds: no compiler needs to be installed."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def compiled(
    names: tuple[str, ...],
    kernel: str,
    defines: tuple[tuple[str, int], ...],
    shared: int,
    capability: tuple[int, int],
    device: int | None,
) -> Any:
    """A kernel of these files of this package, for the current device, to be called with grid, block and arguments; None where it cannot be had."""
    try:
        from torch.cuda._utils import _cuda_load_module

        made: Any = _cuda_load_module(_binary(names, defines, capability), [kernel])
        made[kernel].set_shared_memory_config(shared)
        return made[kernel]
    except (ImportError, OSError, AttributeError, RuntimeError):
        return None


@cache
def _binary(names: tuple[str, ...], defines: tuple[tuple[str, int], ...], capability: tuple[int, int]) -> bytes:
    """All kernels of the files."""
    from torch.cuda._utils import _get_nvrtc_library

    texts = [f"#define {name} ({value})\n" for name, value in defines] + [
        files("stochflow.engines.cuda").joinpath(name).read_text() for name in names
    ]
    return _compile(_get_nvrtc_library(), "".join(texts), capability)


def _compile(nvrtc: Any, source: str, capability: tuple[int, int]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def must(code: int) -> None:
        if code:
            raise RuntimeError(f"NVRTC answered {code}")

    must(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
    if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
        must(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode(errors="replace"))
    must(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    binary = ctypes.create_string_buffer(size.value)
    must(nvrtc.nvrtcGetCUBIN(program, binary))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw
