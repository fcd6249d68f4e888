#!/usr/bin/env bash
# Exactness that cannot be fooled, as its users meet it: one run in which a kernel crashes, one hangs and one lies, and four
# honest ones get their verdicts all the same; a device that can say whether it computes; a case that is an edge, tagged so.
set -euo pipefail
out=$(mktemp -d)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$out"

say() { echo "   $*"; }

cat >seven.py <<'PY'
import os
import time

from replay.kernels.eager import prepare_combine as honest
from replay.model import Kernel


def crashing(problem, weights):
    return lambda t: os.kill(os.getpid(), 11)


def hanging(problem, weights):
    return lambda t: time.sleep(600)


def lying(problem, weights):
    right = honest(problem, weights)

    def run(t):
        right(t)
        t["out"][0, 5] *= -1

    return run


KERNELS = [
    Kernel(id=f"mine:moe.combine:{name}", prepare=f":{prepare}")
    for name, prepare in (("one", "honest"), ("crashing", "crashing"), ("two", "honest"), ("hanging", "hanging"), ("lying", "lying"))
]
PY
code=0
b70-replay run --capture qwen36-generated --route-layer-regex 'layers\.9\.' --max-cases 1 --stage moe.combine --load seven.py \
    --timeout 4 --quick --blocks 10 -o run >table.txt || code=$?
[ $code -eq 1 ] || { cat table.txt; exit 1; }
for honest in eager:moe.combine sycl:moe.combine:rows mine:moe.combine:one mine:moe.combine:two; do
    grep -E "^$honest +BITWISE +[0-9.]+ \[.*(BASELINE|FASTER|SLOWER|SAME|INCONCLUSIVE|INVALID)" table.txt >/dev/null || { cat table.txt; exit 1; }
done
grep -qE '^mine:moe.combine:crashing +CRASHED .*signal SIGSEGV' table.txt
grep -qE '^mine:moe.combine:hanging +TIMEOUT .*silent for 4 s' table.txt
grep -qE '^mine:moe.combine:lying +FAIL .*row 0 \(token 0, experts .*\) of out: 1 flips' table.txt
[ "$(grep -c 'reproduce: b70-replay run ' table.txt)" -eq 3 ]
say "a crash, a hang and a lie beside four honest kernels: each its own status, four verdicts"

b70-replay doctor --selftest >selftest.txt
[ "$(grep -c ' right, ' selftest.txt)" -eq 6 ]
say "self-test: $(grep -c ' right, ' selftest.txt) right"

# A token without experts is an edge that may leave outputs where they are: it passes, and the line says that there is one.
record() { # record IDS PADDING
    echo '{"v":1,"layer":"model.layers.9.mlp.experts","stage":"router","step":3,"phase":"decode","num_tokens":1,"top_k":8,' \
        "\"num_experts\":256,\"topk_ids\":[$1],\"topk_weights\":null,\"requests\":[\"a\"],\"padding\":[$2],\"rank\":\"0\"}"
}
record '[3,1,4,15,9,2,6,5]' false >edge.jsonl
record '[-1,-1,-1,-1,-1,-1,-1,-1]' false >>edge.jsonl
b70-replay --route-jsonl edge.jsonl --stage moe.combine --kernel 'eager:*' --kernel 'sycl:*' --quick --blocks 5 --require exact \
    -o edge >edge.txt
grep -q '2 cases (1 degenerate)' edge.txt || { cat edge.txt; exit 1; }
say "a token without experts: $(grep -o '2 cases (1 degenerate)' edge.txt), BITWISE"
