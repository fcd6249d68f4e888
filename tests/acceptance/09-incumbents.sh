#!/usr/bin/env bash
# The incumbents and Triton: every operation of the library unavailable here with its reason, a kernel in Triton judged by the tool
# itself, interpreted. The fakes that judge each adapter green and refuse every perturbed argument are in
# tests/kernels/test_xpu_kernels.py, Triton's bits in tests/kernels/test_triton.py; the H200 table is in docs/gpu.md.
set -euo pipefail
out=$(mktemp -d)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$out"

say() { echo "   $*"; }

b70-replay doctor >doctor.txt
wanted=$(python -c 'from replay.kernels.adapters import BINDINGS; print(len(BINDINGS))')
[ "$(grep -cE '^xpu_kernels:.* unavailable: no op _[a-zA-Z_]+::[a-z0-9_]+ \(no Python module vllm_xpu_kernels\); runs on xpu$' doctor.txt)" -eq "$wanted" ]
say "doctor: $wanted operations of the library, each unavailable with its reason"

code=0
b70-replay --logits qwen36-logits-generated --stage topk.rows --kernel xpu_kernels:topk.rows:top_k_per_row_decode --quick -o none \
  >none.txt 2>&1 || code=$?
[ "$code" -eq 5 ]
say "named exactly it is refused, exit 5"

TRITON_INTERPRET=1 b70-replay --logits qwen36-logits-generated --route-layer-regex lm_head --max-cases 1 --stage topk.router \
  --quick --repeats 2 --blocks 5 -o run >run.txt
python - <<'PY'
import json
rows = {r["kernel"]: r["outcome"] for r in json.load(open("run/result.json"))["rows"]}
assert rows["triton:topk.router:rows"]["grade"] == rows["eager:topk.router"]["grade"] == "BITWISE", rows
PY
grep -qE '^unavailable: xpu_kernels:topk.router:topk_softmax \(runs on xpu, not on cpu\)' run.txt
say "a router's kernel in Triton, interpreted: BITWISE beside the eager one"
