#!/usr/bin/env bash
# Our SYCL kernels: all stages green on random cases, the machine code clean, packagers' builds refused clearly.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$root"

say() { echo "   $*"; }

# Random cases of every stage, a short form of `make fuzz-exact`, strata counted.
python -m tests.fuzz.fuzz_exact 24 >"$out/fuzz.txt"
grep -q '^0 faults$' "$out/fuzz.txt"
[ "$(grep -c ' cases × ' "$out/fuzz.txt")" -eq 16 ]
say "fuzz: $(grep -c ' cases × ' "$out/fuzz.txt") stages, 24 cases each, 0 faults"

# The lab's rows through every kernel of the composites, a window of a verifier; the stages' own are in tests/field.
lab=../shared/captures/lab/qwen36-routecapture6-rank0-layers9-14.jsonl
if [ -f "$lab" ]; then
    b70-replay --route-jsonl "$lab" --route-layer-regex 'layers\.9\.' --route-window-size 16 --max-cases 1 --blocks 5 --repeats 4 --quick --require exact \
        --stage moe.middle --stage moe.layer --kernel 'sycl:*' -o "$out/lab" >"$out/lab.txt"
    [ "$(grep -c '^sycl:.* BITWISE ' "$out/lab.txt")" -eq 6 ]
    say "lab windows: $(grep -c ' BITWISE ' "$out/lab.txt") lines BITWISE"
else
    say "lab windows: SKIPPED, not beside this checkout"
fi

# The extension's host code is valid C++, and where there is no oneAPI cmake says so; the shim builds.
torch=$(python -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "include")')
sycl=$(python -c 'from replay.kernels.sycl.runtime import prefix; print(prefix())')
g++ -std=c++20 -fsyntax-only "-I$sycl/include" "-I$torch" "-I$torch/torch/csrc/api/include" cmake/extension.cpp
if command -v cmake >/dev/null; then
    if cmake -S cmake -B "$out/extension" -DB70_EXTENSION=ON >"$out/cmake.txt" 2>&1; then
        command -v icpx >/dev/null || { echo "configured without icpx"; exit 1; }
    else
        grep -q 'expected icpx' "$out/cmake.txt"
    fi
    cmake -S cmake -B "$out/shim" "-DSYCL_ROOT=$sycl" >/dev/null
    cmake --build "$out/shim" >/dev/null
    say "cmake: extension refused without icpx, shim built"
else
    say "cmake: SKIPPED, no cmake"
fi
