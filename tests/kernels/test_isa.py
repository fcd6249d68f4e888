"""The machine-code table: our kernels are clean, and each planted fault turns it red."""

import os
from pathlib import Path

import msgspec
import pytest

from replay.data import path as data_path
from replay.errors import EnvironmentRefused
from replay.kernels.sycl import isa
from tests.conftest import ROOT

GIVEN = ROOT.parent / "shared" / "tools" / "ocloc"
OCLOC = os.environ.get("OCLOC") or (str(GIVEN) if GIVEN.is_file() else None)
needs_ocloc = pytest.mark.skipif(OCLOC is None, reason="no ocloc with bmg-g31 support in $OCLOC or beside the checkout")

HEAD = '#include "common.hpp"\n'
SPILL = (
    HEAD
    + """
KERNEL(1) SUB_GROUP(16) void spilling_gpu(const float *x, float *y, int n) {
  int i = int(this_item::get_nd_item<1>().get_global_linear_id());
  float v[240];
#pragma unroll
  for (int j = 0; j < 240; j++) v[j] = x[i + j * 64];
  for (int k = 0; k < n; k++)
#pragma unroll
    for (int j = 0; j < 240; j++) v[j] = v[j] * v[(j * 7 + 1) % 240] + 1.0f;
#pragma unroll
  for (int j = 0; j < 240; j++) y[i + j * 64] = v[j];
}
"""
)
DIVIDES = (
    HEAD
    + """
KERNEL(1) void dividing_gpu(const float *x, float *y) {
  int i = int(this_item::get_nd_item<1>().get_global_linear_id());
  y[i] = x[i] / y[i];
}
"""
)


def rows_of(text: str, folder: Path, *, exact: bool = True) -> list[isa.Isa]:
    """The table of a planted source."""
    source = folder / "planted.cpp"
    source.write_text(text)
    assert OCLOC is not None
    return isa.inspect(source, data_path("sycl"), OCLOC, exact=exact)


@needs_ocloc
def test_a_spill_is_red(tmp_path: Path) -> None:
    """240 live floats a work-item do not fit 128 registers."""
    rows = rows_of(SPILL, tmp_path)
    assert [r.kernel for r in rows] == ["spilling_gpu"]
    assert rows[0].spill > 0
    assert any("spilling_gpu: spills" in line for line in isa.faults(rows))


@needs_ocloc
def test_an_inexact_division_is_red(tmp_path: Path) -> None:
    """Without the numeric flag `/` is a reciprocal; with it the same source is clean."""
    inexact = rows_of(DIVIDES, tmp_path, exact=False)
    assert any("math.inv, declares 0" in line for line in isa.faults(inexact))
    assert isa.faults(rows_of(DIVIDES, tmp_path)) == []


@needs_ocloc
def test_a_lost_matrix_instruction_is_red(tmp_path: Path) -> None:
    """The matrix kernel has its dpas; with the multiply taken out the table says that it lost it."""
    source = data_path("sycl", "moe_matrix.cpp").read_text()
    whole = rows_of(source, tmp_path)
    assert whole[0].dpas > 0
    assert isa.faults(whole) == []
    assert "mx::joint_matrix_mad(lanes, acc, x, y, acc);" in source
    lost = rows_of(source.replace("mx::joint_matrix_mad(lanes, acc, x, y, acc);", ""), tmp_path)
    assert "gemm_matrix_gpu: no dpas, which it promises" in isa.faults(lost)


@needs_ocloc
def test_contraction_is_red(tmp_path: Path) -> None:
    """An f32 mad that nobody declared is a contraction."""
    text = DIVIDES.replace("x[i] / y[i]", "sycl::fma(x[i], y[i], x[i])")
    assert any("f32 mad, declares 0" in line for line in isa.faults(rows_of(text, tmp_path)))


@needs_ocloc
def test_what_does_not_compile_is_refused(tmp_path: Path) -> None:
    """One line with the compiler's last words."""
    with pytest.raises(EnvironmentRefused, match=r"planted\.cpp: does not compile"):
        rows_of(HEAD + "KERNEL(1) void broken_gpu(int *x) { nonsense }\n", tmp_path)


def test_faults_are_judged_without_a_compiler() -> None:
    """Each limit by itself; what a kernel declares is allowed, one more is not."""
    clean = isa.Isa(
        kernel="k", simd=16, grf=128, spill=0, private=0, slm=0, barriers=0, dpas=0, inv=0, sqt=0, mad=0, loads="", instructions=1
    )
    assert isa.faults([clean]) == []
    for field in ("spill", "inv", "sqt", "mad"):
        assert len(isa.faults([msgspec.structs.replace(clean, **{field: 1})])) == 1
    assert isa.faults([msgspec.structs.replace(clean, mad=1)], {"k": (1, 0, "why")}) == []
    assert isa.faults([clean], dpas=frozenset({"k"})) == ["k: no dpas, which it promises"]


def test_every_source_and_kernel_is_looked_for() -> None:
    """What must have machine code is read from the sources, so a kernel cannot drop out of the table unseen."""
    folder = data_path("sycl")
    names = [name for source in folder.glob("*.cpp") for name in isa.expected(source)]
    assert {"gemm_matrix_gpu", "layer_gpu", "quantize_rows_gpu", "route_prefix", "read_lines"} <= set(names)
    assert set(isa.DECLARED) | isa.PROMISED_DPAS <= set(names)
    assert len(names) == len(set(names)) == 43


def test_no_ocloc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the PATH nor named."""
    monkeypatch.delenv("OCLOC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentRefused, match="package intel-ocloc"):
        isa.find_ocloc()
