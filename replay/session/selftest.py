"""Does this device compute as every bitwise claim supposes? Its answers are held against the oracle's, to the bit."""

from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from replay.devices import Device
from replay.kernels.registry import lacking, registered
from replay.kernels.sycl import NEEDS
from replay.kernels.sycl.runtime import has_matrix_engine
from replay.kernels.sycl.selftest import Array, answer
from replay.model import Case, CaseId, Finding, Geometry, Routes, Source
from replay.oracle.arith import bf16_to_f32, rn_bf16, silu
from replay.session.arms import Arms
from replay.session.child import Done, Tested, begin, judged_calls, log_to
from replay.stages import STAGES, problem_for

ITEMS = 1 << 18
GROUP = 64


def _floats(seed: int) -> NDArray[np.float32]:
    """f32 of every size: random bits, infinities and NaN left out."""
    bits = np.random.Generator(np.random.Philox(key=seed)).integers(0, 1 << 32, ITEMS, np.uint32)
    values = bits.view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(1))


def _wrong(want: Array, got: Array) -> int:
    """Elements whose bits differ; a NaN is a NaN."""
    same = want.tobytes() == got.tobytes()
    if same:
        return 0
    nan = np.isnan(want) & np.isnan(got) if want.dtype.kind == "f" else np.zeros(len(want), bool)
    word = np.dtype(f"u{want.dtype.itemsize}")
    return int(((want.view(word) != got.view(word)) & ~nan).sum())


def _divide(device: Device) -> Finding:
    a, b = _floats(1), np.where(_floats(2) == 0, np.float32(1), _floats(2))
    with np.errstate(all="ignore"):
        want = a / b
    return Finding(
        "division", "division rounds correctly", ITEMS, _wrong(want, answer(device, "divide", (a, b), {"out": "float32"})["out"])
    )


def _square_root(device: Device) -> Finding:
    a = np.abs(_floats(3))
    got = answer(device, "square_root", (a,), {"out": "float32"})["out"]
    return Finding("square_root", "square root rounds correctly", ITEMS, _wrong(np.sqrt(a), got))


def _contraction(device: Device) -> Finding:
    rng = np.random.Generator(np.random.Philox(key=4))
    a, b, c = (rng.standard_normal(ITEMS, np.float32) for _ in range(3))
    got = answer(device, "multiply_add", (a, b, c), {"out": "float32"})["out"]
    return Finding("contraction", "a·b + c rounds twice", ITEMS, _wrong(a * b + c, got))


def _bf16(device: Device) -> Finding:
    every = bf16_to_f32(np.arange(1 << 16, dtype=np.uint16))
    a = np.concatenate([every, _floats(5)])
    got = answer(device, "to_bf16", (a,), {"out": "uint16"})["out"]
    return Finding("bf16", "bf16 round trip", len(a), _wrong(rn_bf16(a), got))


def _gates(device: Device) -> Finding:
    gates = np.arange(1 << 16, dtype=np.uint16)
    got = answer(device, "gate", (gates,), {"out": "uint16"})["out"]
    return Finding("gates", "act_quant gate table", len(gates), _wrong(rn_bf16(silu(bf16_to_f32(gates))), got))


def _sub_groups(device: Device) -> Finding:
    a = np.random.Generator(np.random.Philox(key=6)).integers(-1000, 1000, ITEMS, np.int32)
    got = answer(device, "sub_group", (a,), {"sum": "int32", "largest": "int32", "owner": "int32"}, GROUP)
    _, owner = np.unique(got["owner"], return_inverse=True)
    sums = np.bincount(owner, a).astype(np.int32)
    largest = np.full(len(sums), np.iinfo(np.int32).min, np.int32)
    np.maximum.at(largest, owner, a)
    wrong = (sums[owner] != got["sum"]) | (largest[owner] != got["largest"])
    return Finding("sub_groups", f"sub-group reduction (of {ITEMS // len(sums)})", ITEMS, int(wrong.sum()))


# One expert's int8 rows, more than one tile of them, and a depth of several instructions.
_TILES = Geometry.parse("qwen36:tp4:hidden=96,experts=1,top_k=1,inter=24")
_ROWS = 20


def _matrix(device: Device, kernel: str = "sycl:moe.gemm1:matrix") -> Finding:
    """Products of int8 summed in int32, through the kernel that uses the engine."""
    name = "matrix engine"
    if kernel.endswith(":matrix") and not (device.kind == "xpu" and has_matrix_engine()):
        return Finding("matrix", name, 0, 0)
    stage = STAGES["moe.gemm1"]
    problem = problem_for(stage, _TILES, _ROWS, {})
    case = Case(CaseId(problem, Source("selftest", "L0", 0, _ROWS), 8), Routes(((0,),) * _ROWS))
    arms = Arms(device)
    inputs = arms.begin(case)
    want, got = stage.oracle(problem, inputs), judged_calls(arms, registered()[kernel], case, 0, [inputs]).repeats[0].outputs
    return Finding("matrix", name, want["gate_up"].size, _wrong(want["gate_up"].ravel(), got["gate_up"].ravel()))


TESTS: tuple[Callable[[Device], Finding], ...] = (_divide, _square_root, _contraction, _bf16, _gates, _sub_groups, _matrix)


def unasked(device: str) -> str | None:
    """Why a device cannot be asked, or None: the tests are SYCL kernels."""
    return f"no SYCL kernels on {device}" if device.startswith("cuda") else next(lacking(NEEDS), None)


def selftest(device: Device) -> tuple[Finding, ...]:
    """Every self-test on a device that runs SYCL."""
    return tuple(test(device) for test in TESTS)


def selftest_main(pipe: Connection, device: str, log: str) -> None:
    """The self-tests in a child process."""
    log_to(log)
    begin(())
    pipe.send(Tested(selftest(Device(device))))
    pipe.send(Done())
