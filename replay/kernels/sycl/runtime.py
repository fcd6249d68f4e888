"""Compile, cache and launch the SYCL sources of ``sycl/``.

The host shim is compiled once by g++ against the SYCL runtime that is installed; device sources are compiled at run
time by the runtime itself and kept as SYCLBIN. Both caches are keyed by everything that went into them.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from replay import cache
from replay.data import path as data_path
from replay.errors import EnvironmentRefused

# Contraction changes bits (semantics: Arithmetic). The second is for a GPU's backend; the CPU device ignores it.
NUMERIC_FLAGS = ("-ffp-contract=off",)
GPU_NUMERIC_FLAGS = ("-Xs", "-cl-fp32-correctly-rounded-divide-sqrt")


# Device binaries that this process was given, for the identity of a run.
binaries: list[Path] = []


def prefix() -> Path:
    """Where the SYCL runtime's ``include`` and ``lib`` are."""
    dist = distribution("intel-sycl-rt")
    header = next((f for f in dist.files or () if str(f).endswith("include/sycl/sycl.hpp")), None)
    if header is None:
        raise EnvironmentRefused("intel-sycl-rt: expected include/sycl/sycl.hpp in the distribution, got none")
    return Path(str(dist.locate_file(header))).resolve().parents[2]


@functools.cache
def library() -> ctypes.CDLL:
    """The shim, compiled when its source, the runtime or the compiler changed."""
    source = data_path("sycl", "shim.cpp")
    root = prefix()
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    key = _digest(source.read_bytes(), version("intel-sycl-rt"), compiler, str(root))
    built = cache.folder() / f"shim-{key}.so"
    if not built.exists():
        temporary = built.with_name(f".{built.name}.{os.getpid()}")
        command = [
            "g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{root}/include", str(source),
            "-o", str(temporary), f"-L{root}/lib", "-lsycl", f"-Wl,-rpath,{root}/lib",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentRefused(f"shim.cpp: g++ failed: {done.stderr.strip().splitlines()[-1]}")
        temporary.replace(built)
    # The wheel's own ICD files point nowhere: name the CPU driver before libsycl looks for devices.
    os.environ.setdefault("OCL_ICD_FILENAMES", str(root / "lib" / "libintelocl.so"))
    lib = ctypes.CDLL(str(built))
    for name in ("b70_queue", "b70_build", "b70_load", "b70_kernel", "b70_program"):
        getattr(lib, name).restype = ctypes.c_void_p
    lib.b70_error.restype = ctypes.c_char_p
    lib.b70_content.restype = ctypes.c_long
    lib.b70_program_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    lib.b70_program_free.argtypes = [ctypes.c_void_p]
    lib.b70_program_free.restype = None
    return lib


def _digest(*parts: bytes | str) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode() if isinstance(part, str) else part)
        h.update(b"\0")
    return h.hexdigest()[:24]


def _checked(result: Any, what: str) -> Any:
    if result is None or result == -1:
        raise RuntimeError(f"{what}: {library().b70_error().decode(errors='replace')}")
    return result


class Queue:
    """The queue kernels are submitted to: torch's own stream on a GPU, dpctl's in-order queue on the CPU device."""

    def __init__(self, kind: str) -> None:
        lib = library()
        self.kind = kind
        if kind == "xpu":
            import torch

            address = torch.xpu.current_stream().sycl_queue
            self.device_name = str(torch.xpu.get_device_name())
        else:
            import dpctl

            self._owner = dpctl.SyclQueue("opencl:cpu", property="in_order")
            address = self._owner.addressof_ref()
            self.device_name = f"{self._owner.sycl_device.name} {self._owner.sycl_device.driver_version}"
        self.handle = ctypes.c_void_p(_checked(lib.b70_queue(ctypes.c_void_p(address)), "queue"))


@functools.cache
def queue(kind: str) -> Queue:
    """One queue a process and device kind."""
    return Queue(kind)


def has_matrix_engine() -> bool:
    """Whether torch's XPU device has the matrix aspect."""
    import torch

    return torch.xpu.is_available() and bool(_checked(library().b70_has_matrix(queue("xpu").handle), "matrix aspect"))


def sources(name: str) -> list[Path]:
    """The files that a device source is made of: itself, and every header beside it."""
    folder = data_path("sycl")
    return [folder / f"{name}.cpp", *sorted(folder.glob("*.hpp"))]


def compile_source(source: bytes, options: Sequence[str], kind: str) -> ctypes.c_void_p:
    """A bundle compiled now, whatever is cached; RuntimeError with the compiler's log."""
    given = [*dict.fromkeys((*NUMERIC_FLAGS, *options))]
    array = (ctypes.c_char_p * len(given))(*(o.encode() for o in given))
    return ctypes.c_void_p(_checked(library().b70_build(queue(kind).handle, source, array, len(given)), "device code"))


@functools.cache
def bundle(name: str, kind: str) -> "Bundle":
    """The compiled kernels of ``sycl/NAME.cpp`` on a device kind."""
    return Bundle(name, queue(kind))


class Bundle:
    """Executable kernels of one source, from the cache or compiled now."""

    def __init__(self, name: str, on: Queue) -> None:
        lib = library()
        self.on = on
        self.flags = [*NUMERIC_FLAGS, *(GPU_NUMERIC_FLAGS if on.kind == "xpu" else ())]
        parts = [p.read_bytes() for p in sources(name)]
        key = _digest(name, *parts, *self.flags, version("intel-sycl-rt"), on.device_name)
        path = cache.folder() / f"{name}-{key}.syclbin"
        binaries.append(path)
        if path.exists():
            content = path.read_bytes()
            self.handle = ctypes.c_void_p(_checked(lib.b70_load(on.handle, content, ctypes.c_size_t(len(content))), name))
        else:
            source = data_path("sycl", f"{name}.cpp")
            self.handle = compile_source(source.read_bytes(), [*self.flags, f"-I{source.parent}"], on.kind)
            size = _checked(lib.b70_content(self.handle, None), name)
            content_buffer = ctypes.create_string_buffer(size)
            _checked(lib.b70_content(self.handle, content_buffer), name)
            cache.write(path, content_buffer.raw)
        self.kernels: dict[str, ctypes.c_void_p] = {}

    def kernel(self, name: str) -> ctypes.c_void_p:
        """One kernel by name."""
        if name not in self.kernels:
            found = library().b70_kernel(self.handle, name.encode())
            self.kernels[name] = ctypes.c_void_p(_checked(found, name))
        return self.kernels[name]


Argument = Any  # a tensor's name, a ctypes value or structure, a range of local bytes, or None


class Program:
    """Launches recorded once and run many times.

    An argument is a tensor's name (its pointer is read at each run), a tensor of the program's own, a ctypes value, a
    range (local memory of that many bytes), or None (a null pointer). On the CPU device a run waits, as torch's own
    CPU operations do.
    """

    def __init__(self, kind: str) -> None:
        self._lib = library()
        self._queue = queue(kind)
        self._handle = ctypes.c_void_p(_checked(self._lib.b70_program(self._queue.handle), "program"))
        self._slots: list[str | int] = []  # a tensor's name, or the address of a buffer that is the program's own
        self._wait = 1 if kind == "cpu" else 0
        self._keep: list[Any] = []
        self.launches = 0

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._lib.b70_program_free(handle)

    def add(self, source: str, kernel: str, size: Sequence[int], group: Sequence[int], *args: Argument) -> "Program":
        """Record one launch of ``kernel`` over ``size`` work-items in groups of ``group``."""
        handle = bundle(source, self._queue.kind).kernel(kernel)
        n, dims = len(args), len(size)
        kinds = bytearray()
        numbers, values = (ctypes.c_size_t * n)(), (ctypes.c_void_p * n)()
        for i, arg in enumerate(args):
            kind, numbers[i], value = self._argument(arg)
            kinds += kind
            values[i] = ctypes.addressof(value) if value is not None else None
            self._keep.append(value)
        shape, local = (ctypes.c_size_t * dims)(*size), (ctypes.c_size_t * dims)(*group)
        added = self._lib.b70_program_add(self._handle, handle, dims, shape, local, n, bytes(kinds), numbers, values)
        _checked(added, kernel)
        self.launches += 1
        return self

    def _argument(self, arg: Argument) -> tuple[bytes, int, Any]:
        if isinstance(arg, range):
            return b"l", len(arg), None
        if isinstance(arg, ctypes._SimpleCData | ctypes.Structure):
            return b"v", ctypes.sizeof(arg), arg
        if hasattr(arg, "data_ptr"):
            self._keep.append(arg)
            arg = arg.data_ptr()
        slot = 0 if arg is None else arg
        if slot not in self._slots:
            self._slots.append(slot)
        return b"p", self._slots.index(slot), None

    def run(self, tensors: Mapping[str, Any]) -> None:
        """Submit the launches on these tensors."""
        pointers = (ctypes.c_void_p * len(self._slots))(
            *[slot if slot.__class__ is int else tensors[slot].data_ptr() for slot in self._slots]  # type: ignore[index]  # a name, if no int
        )
        if self._lib.b70_program_run(self._handle, pointers, self._wait) != 0:
            _checked(-1, "run")
