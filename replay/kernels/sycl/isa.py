"""Hold our SYCL kernels to the B70's own machine code, without a B70.

Each source is compiled at run time with its SPIR-V dumped, the SPIR-V by Intel's offline compiler for bmg-g31, and the
disassembly is counted. ``python -m replay.kernels.sycl.isa`` prints the table and fails on: not compiling, a spill, no
``dpas`` where it is promised, or more inexact ``math.inv``, ``math.sqt`` and f32 ``mad`` than a kernel declares.
Load widths and code size are told, not judged: they follow the compiler's version.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tabulate import tabulate

from replay import cache
from replay.data import path as data_path
from replay.errors import EnvironmentRefused
from replay.kernels.sycl.runtime import GPU_NUMERIC_FLAGS, NUMERIC_FLAGS
from replay.model import Value

DEVICE = "bmg-g31"
HOST = "shim.cpp"  # every other source in sycl/ is device code
PROMISED_DPAS = frozenset({"gemm_matrix_gpu"})
# kernel → how many f32 mad and math.inv its code may hold, each with its source.
_EXP = "the device's f64 exp holds one f32 mad a place where it is inlined"
_GATES = "four f64 exp of the gates (and the conv's), an f64 log and an f64 log1p, each with one inexact start"
DECLARED: Mapping[str, tuple[int, int, str]] = {
    "activate_gpu": (1, 0, _EXP),
    "wide_first_gpu": (1, 0, _EXP),
    "act_quant_gpu": (6, 0, _EXP),
    "middle_gpu": (1, 0, _EXP),
    "layer_gpu": (1, 0, _EXP),
    "shared_gate_gpu": (1, 0, _EXP),
    "gate": (1, 0, _EXP),
    "combine_gpu": (1, 0, "combine_fma=chain asks for it"),
    "conv_gpu": (1, 0, _EXP),
    **{f"recurrent_{dim}_gpu": (4, 2, _GATES) for dim in (64, 128, 256)},
    **{f"step_{dim}_gpu": (5, 2, _GATES) for dim in (64, 128, 256)},
}

_INSTRUCTION = re.compile(r"^\s*(?:\([^)]*\)\s*)?[a-z][\w.]*\s+\(\w+", re.MULTILINE)
_BUILD = """
import sys
from replay.kernels.sycl import runtime
runtime.compile_source(open(sys.argv[1], "rb").read(), [f"-I{sys.argv[2]}"], "cpu")
"""


class Isa(Value, frozen=True, kw_only=True):
    """What the machine code of one kernel says. Sizes in bytes; ``loads`` counts load messages by width."""

    kernel: str
    simd: int
    grf: int
    spill: int
    private: int
    slm: int
    barriers: int
    dpas: int
    inv: int
    sqt: int
    mad: int
    loads: str
    instructions: int


def find_ocloc() -> str:
    """``$OCLOC``, else ``ocloc`` on the PATH; EnvironmentRefused says what to install."""
    import shutil

    found = os.environ.get("OCLOC") or shutil.which("ocloc")
    if not found:
        raise EnvironmentRefused(
            "ocloc: expected Intel's offline compiler on the PATH or in $OCLOC (package intel-ocloc), got none"
        )
    return found


def version(ocloc: str) -> str:
    """The compiler's own version line."""
    out = subprocess.run(
        [ocloc, "query", "OCL_DRIVER_VERSION"], capture_output=True, text=True, check=False, cwd=tempfile.gettempdir()
    )
    return (out.stdout + out.stderr).strip().splitlines()[-1] if out.stdout + out.stderr else "unknown"


def dump_spirv(source: Path, include: Path, folder: Path) -> list[Path]:
    """Compile one source and collect its SPIR-V, one file a kernel. EnvironmentRefused with the compiler's last words."""
    env = os.environ | {"SYCL_DUMP_IMAGES": "1", "SYCL_DUMP_IMAGES_PREFIX": f"{folder}/x"}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(source), str(include)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentRefused(f"{source.name}: does not compile: {done.stderr.strip().splitlines()[-1]}")
    return sorted(folder.glob("x*.spv"))


def compile_for_card(ocloc: str, spirv: Path, folder: Path, *, exact: bool = True) -> list[Isa]:
    """The rows of one image's kernels, without cpu bodies, which the card never runs, and the runtime's own kernels."""
    options = ["-options", GPU_NUMERIC_FLAGS[1]] if exact else []
    command = [
        ocloc,
        "compile",
        "-file",
        str(spirv),
        "-spirv_input",
        "-device",
        DEVICE,
        *options,
        "-out_dir",
        str(folder),
        "-output",
        "k",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    binary = next(iter(folder.glob("k_*.bin")), None)
    if done.returncode or binary is None:
        raise EnvironmentRefused(f"{spirv.name}: ocloc failed: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    dis = folder / "dis"
    dis.mkdir()
    subprocess.run(
        [ocloc, "disasm", "-file", str(binary), "-dump", str(dis), "-device", DEVICE], capture_output=True, check=True, cwd=folder
    )
    prefix, suffix = ".text.__sycl_kernel_", ".asm"
    info = (dis / ".ze_info").read_text()
    codes = {p.name.removeprefix(prefix).removesuffix(suffix): p.read_text() for p in dis.glob(f"{prefix}*{suffix}")}
    return [_row(name, info, code) for name, code in codes.items() if not name.endswith("_cpu")]


def _row(name: str, info: str, code: str) -> Isa:
    """Read one kernel's section of .ze_info, and count its instructions by destination type."""
    section = next(part for part in re.split(r"\n  - name: +", info) if part.startswith(f"__sycl_kernel_{name}\n"))

    def field(key: str) -> int:
        found = re.search(rf"\b{key}: +(\d+)", section)
        return int(found[1]) if found else 0

    def count(opcode: str) -> int:
        """Instructions whose destination (the first operand) is f32."""
        return len(re.findall(rf"^\s*(?:\([^)]*\)\s*)?{opcode}\s*\([^)]*\)\s*(?:\([^)]*\)\s*)?\S+:f\b", code, re.MULTILINE))

    loads: dict[str, int] = {}
    for width in re.findall(r"\bload(?:_block2d)?\.\w+\.(d\d+\w*)", code):
        loads[width] = loads.get(width, 0) + 1
    return Isa(
        kernel=name, simd=field("simd_size"), grf=field("grf_count"), spill=field("spill_size") or _scratch(section, "spill"),
        private=field("private_size") or _scratch(section, "private"), slm=field("slm_size"), barriers=field("barrier_count"),
        dpas=len(re.findall(r"\bdpas\.", code)), inv=count(r"math\.inv"), sqt=count(r"math\.sqt"), mad=count("mad"),
        loads=" ".join(f"{w}×{n}" for w, n in sorted(loads.items())), instructions=len(_INSTRUCTION.findall(code)),
    )  # fmt: skip


def _scratch(section: str, usage: str) -> int:
    """Bytes of per-thread memory of one usage (spill_fill_space or private_space)."""
    blocks = re.findall(r"- type: +\w+\n\s+usage: +(\w+)\n\s+size: +(\d+)", section)
    return sum(int(size) for what, size in blocks if what.startswith(usage))


def inspect(source: Path, include: Path, ocloc: str, *, exact: bool = True) -> list[Isa]:
    """The rows of every kernel in one source that the card can run; ``exact=False`` leaves the numeric flag out."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, spirv in enumerate(dump_spirv(source, include, Path(folder))):
            out = Path(folder) / f"out{number}"
            out.mkdir()
            rows += compile_for_card(ocloc, spirv, out, exact=exact)
    return sorted(rows, key=lambda r: r.kernel)


def expected(source: Path) -> list[str]:
    """The kernels that a source defines for the card: every KERNEL that is no cpu body."""
    found = re.findall(r"^KERNEL\(\d\)(?: SUB_GROUP\(\d+\))? void (\w+)\(", source.read_text(), re.MULTILINE)
    return [name for name in found if not name.endswith("_cpu")]


def faults(
    rows: Iterable[Isa], declared: Mapping[str, tuple[int, int, str]] = DECLARED, dpas: frozenset[str] = PROMISED_DPAS
) -> list[str]:
    """Why the table is red: one line a fault."""
    found = []
    for row in rows:
        mad, inv, _ = declared.get(row.kernel, (0, 0, ""))
        if row.spill:
            found.append(f"{row.kernel}: spills {row.spill} bytes")
        if row.kernel in dpas and not row.dpas:
            found.append(f"{row.kernel}: no dpas, which it promises")
        for name, have, allowed in (("f32 mad", row.mad, mad), ("math.inv", row.inv, inv), ("math.sqt", row.sqt, 0)):
            if have > allowed:
                found.append(f"{row.kernel}: {have} {name}, declares {allowed}")
    return found


def table_path() -> Path:
    """Where the table of these very sources is kept, so that a run's identity can carry it."""
    folder = data_path("sycl")
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.glob("*.?pp")))).hexdigest()[:16]
    return cache.folder() / f"isa-{digest}.json"


def table() -> dict[str, Any]:
    """The rows by kernel as plain values; empty where `make isa` has not been run on these sources."""
    path = table_path()
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    return found


def main() -> int:
    """Print compiler, flags and table; 1 where something is red."""
    ocloc = find_ocloc()
    print(f"compiler: {version(ocloc)} for {DEVICE}; flags {' '.join((*NUMERIC_FLAGS, *GPU_NUMERIC_FLAGS))}")
    folder = data_path("sycl")
    rows, lost = [], []
    for source in sorted(folder.glob("*.cpp")):
        if source.name != HOST:
            found = inspect(source, folder, ocloc)
            rows += found
            lost += [f"{name}: no machine code" for name in expected(source) if name not in {row.kernel for row in found}]
    print(tabulate([list(_fields(row)) for row in rows], list(Isa.__struct_fields__), tablefmt="github", disable_numparse=True))
    table_path().write_bytes(msgspec.json.encode({row.kernel: row for row in rows}))
    red = [*lost, *faults(rows)]
    for line in red:
        print(f"RED {line}", file=sys.stderr)
    print(f"{len(rows)} kernels, {len(red)} faults")
    return 1 if red else 0


def _fields(row: Isa) -> Iterable[str]:
    return (str(getattr(row, name)) for name in Isa.__struct_fields__)


if __name__ == "__main__":
    from replay.errors import ReplayError

    try:
        sys.exit(main())
    except ReplayError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
