"""Kernels compiled where they run: NVRTC makes the machine code, the CUDA driver loads and launches it, both through ctypes.

No compiler has to be installed: NVRTC comes with PyTorch's CUDA builds, the driver with the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_size_t, c_uint, c_void_p
from ctypes.util import find_library
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.engines.base import Compile

MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAJORS = (13, 12, 11)  # versions of NVRTC to look for
LEAST_CAPABILITY = (8, 0)  # asynchronous copies, TF32 products, warp-wide maxima

# Parameters of each C function; all return a status of type int, 0 = success.
NVRTC: dict[str, list[Any]] = {
    "nvrtcCreateProgram": [POINTER(c_void_p), c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p)],
    "nvrtcCompileProgram": [c_void_p, c_int, POINTER(c_char_p)],
    "nvrtcGetProgramLogSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetProgramLog": [c_void_p, c_char_p],
    "nvrtcGetCUBINSize": [c_void_p, POINTER(c_size_t)],
    "nvrtcGetCUBIN": [c_void_p, c_char_p],
    "nvrtcDestroyProgram": [POINTER(c_void_p)],
}
DRIVER: dict[str, list[Any]] = {
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuCtxGetDevice": [POINTER(c_int)],
    "cuCtxSetCurrent": [c_void_p],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
}


class Source(NamedTuple):
    """A kernel of a file of this folder, with the numbers that it is compiled for."""

    file: str
    name: str
    defines: tuple[tuple[str, int], ...]

    def text(self) -> str:
        """Of all kernels of the file; the compiler's messages have the file's own line numbers."""
        parts = [f"#define {name} ({value})\n" for name, value in self.defines]
        for name in ("common.cuh", self.file):
            parts += [f'#line 1 "{name}"\n', files("stochflow.engines.cuda").joinpath(name).read_text()]
        return "".join(parts)


class Kernel:
    """A loaded kernel, called with grid, block and arguments: tensors, ints (C int) and floats (C double)."""

    def __init__(self, driver: Any, binary: bytes, name: str, shared: int, device: int):
        self.driver, self.shared, self.device = driver, shared, device
        self.module, self.function = c_void_p(), c_void_p()  # the module lives as long as the process
        torch.cuda.init()
        with torch.cuda.device(device):
            self._enter()
            _check(driver, driver.cuModuleLoadData(byref(self.module), binary))
            _check(driver, driver.cuModuleGetFunction(byref(self.function), self.module, name.encode()))
            _check(driver, driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE, shared))

    def __call__(self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any]) -> None:
        """Launch on torch's current stream; also while a CUDA graph is captured."""
        values = [self._value(argument) for argument in arguments]  # alive until the launch has copied them
        places = (c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        with torch.cuda.device(self.device):
            self._enter()
            stream = torch.cuda.current_stream(self.device).cuda_stream
            size = (*grid, threads, 1, 1, self.shared)
            _check(self.driver, self.driver.cuLaunchKernel(self.function, *size, stream, places, None))

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            if argument.get_device() != self.device or not argument.is_contiguous():
                raise ValueError(
                    f"a kernel on cuda:{self.device} was given a tensor on {argument.device} of shape {tuple(argument.shape)} "
                    f"and strides {argument.stride()}: it must be contiguous and on that device"
                )
            return c_void_p(argument.data_ptr())
        if isinstance(argument, int):
            return c_int(argument)
        if isinstance(argument, float):
            return c_double(argument)
        raise TypeError(f"a kernel takes tensors, ints and floats, not {type(argument).__name__}")

    def _enter(self) -> None:
        """Make the device's primary context, which torch uses, current: a thread that has not used CUDA yet has none."""
        here, wanted, context = c_int(), c_int(), c_void_p()
        if self.driver.cuCtxGetDevice(byref(here)) == 0 and here.value == self.device:
            return
        _check(self.driver, self.driver.cuDeviceGet(byref(wanted), self.device))
        _check(self.driver, self.driver.cuDevicePrimaryCtxRetain(byref(context), wanted))
        _check(self.driver, self.driver.cuCtxSetCurrent(context))


def kernel(file: str, name: str, defines: dict[str, int], shared: int, device: torch.device) -> Kernel:
    """Compiled and loaded once per process; `Compile` where the compiler refuses."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _loaded(Source(file, name, tuple((key, int(value)) for key, value in defines.items())), shared, index)


@cache
def _loaded(source: Source, shared: int, device: int) -> Kernel:
    binary = _binary(source._replace(name=""), torch.cuda.get_device_capability(device))
    return Kernel(driver(), binary, source.name, shared, device)


@cache
def _binary(source: Source, capability: tuple[int, int]) -> bytes:
    return compiled(nvrtc(), source.text(), source.file, capability)


def compiled(library: Any, text: str, file: str, capability: tuple[int, int]) -> bytes:
    """The machine code of a source; `Compile` with the compiler's log where there is none."""
    program, size = c_void_p(), c_size_t()
    _check(library, library.nvrtcCreateProgram(byref(program), text.encode(), file.encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
        code = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
        if code:
            _check(library, library.nvrtcGetProgramLogSize(program, byref(size)))
            log = ctypes.create_string_buffer(max(1, size.value))
            _check(library, library.nvrtcGetProgramLog(program, log))
            raise Compile(log.value.decode(errors="replace").strip() or _words(library, code))
        _check(library, library.nvrtcGetCUBINSize(program, byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, binary))
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 48 * 1024)


def unavailable() -> str | None:
    """Why no kernel can be compiled on this machine; None: one can."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "torch sees no CUDA device"
    try:
        nvrtc()
        driver()
    except (OSError, AttributeError) as error:
        return str(error)
    found = torch.cuda.get_device_capability()
    if found < LEAST_CAPABILITY:
        least, found_words = (".".join(map(str, x)) for x in (LEAST_CAPABILITY, found))
        return f"cuda needs a device of compute capability {least} or more, and this one has {found_words}"
    return None


# the two libraries ----------------------------------------------------------------------------------------------------


@cache
def nvrtc() -> Any:
    tried = []
    for name in _places():
        try:
            library = _declared(ctypes.CDLL(name), NVRTC)
        except OSError as error:
            tried.append(str(error))
            continue
        library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = [c_int], c_char_p
        return library
    raise OSError(f"NVRTC cannot be loaded: {tried[0] if tried else 'it was not found'}")


def _places() -> Iterator[str]:
    """Where NVRTC may be: in the loader's paths or in the wheels beside torch; the version torch was built for comes first."""
    own = int((torch.version.cuda or "0").split(".")[0])
    packages = Path(torch.__file__).parents[1]
    names = [f"libnvrtc.so.{major}" for major in sorted(MAJORS, key=lambda major: (major != own, -major))]
    for name in [*names, "libnvrtc.so"]:
        yield name
        for pattern in (f"nvidia/*/lib/{name}*", f"torch/lib/{name}*"):
            yield from (str(path) for path in sorted(packages.glob(pattern)))
    found = find_library("nvrtc")
    if found is not None:
        yield found


@cache
def driver() -> Any:
    try:
        return _declared(ctypes.CDLL("libcuda.so.1"), DRIVER)
    except OSError as error:
        raise OSError(f"the CUDA driver cannot be loaded: {error}") from error


def _declared(library: Any, functions: dict[str, list[Any]]) -> Any:
    for name, parameters in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = parameters, c_int
    return library


def _check(library: Any, code: int) -> None:
    if code:
        raise RuntimeError(_words(library, code))


def _words(library: Any, code: int) -> str:
    """What a status means, in the library's words."""
    if hasattr(library, "cuGetErrorString"):
        found = c_char_p()
        known = library.cuGetErrorString(code, byref(found)) == 0 and found.value is not None
        return f"CUDA error {code}: {(found.value or b'').decode() if known else 'unknown'}"
    return f"NVRTC error {code}: {(library.nvrtcGetErrorString(code) or b'unknown').decode()}"
