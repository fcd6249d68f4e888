#!/usr/bin/env bash
# Selection over captured logits: a capture made from its seed, ties counted; greedy and top-k exact by every kernel of ours,
# torch's own refused on edges; one rank's columns; what logits do not have refused in one line.
# Planted faults are in tests/exactness/test_topk_faults.py, ten thousand rows a dtype in tests/kernels/test_topk.py, reports from the
# field in tests/field/test_topk_field.py.
set -euo pipefail
out=$(mktemp -d)
here=$(cd "$(dirname "$0")/../.." && pwd)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$out"

say() { echo "   $*"; }

b70-replay capture validate qwen36-logits-generated >validate.txt
grep -q 'valid: 2 files, 80 rows of 248,320 logits, form b70-logits/1' validate.txt
b70-replay capture inspect qwen3-next-logits-generated >inspect.txt
grep -qE '^lm_head +bf16 +\[64, 151936\]' inspect.txt
say "a logit capture is made from its seed, checked, and its ties told"

b70-replay --logits qwen36-logits-generated --route-layer-regex lm_head --route-start-indices 5 --mode shard=1/4 \
  --load "$here/bench/self/topk_peers.py" --quick --repeats 2 --blocks 5 -o run >run.txt || [ $? -eq 1 ]
python - <<'PY'
import json
rows = {r["kernel"]: r["outcome"] for r in json.load(open("run/result.json"))["rows"]}
for kernel in ("sycl:topk.greedy:single_pass", "sycl:topk.rows:select", "eager:topk.greedy"):
    assert rows[kernel]["grade"] == "BITWISE" and rows[kernel]["timing"], rows[kernel]
told = {"BITWISE": "lowest index first", "TIE_EQUIVALENT": "not the lowest index first in"}
eager = rows["eager:topk.rows"]
assert told[eager["grade"]] in eager["detail"], eager
for kernel in ("torch:topk.greedy:argmax", "torch:topk.rows:topk"):
    assert rows[kernel]["status"] == "FAIL" and rows[kernel]["detail"].startswith("on edges: row"), rows[kernel]
PY
grep -qE '^topk.rows · .*shard=1/4' run.txt
say "greedy over 248,320 logits, top-k over a rank's 62,080: ours BITWISE and timed, torch's own red on edges"

for wrong in "--stage gdn.conv" "--mode k=4096" "--mode shard=4/4" "--mode shard=00/4" "--mode next_n=3" "--route-stage-regex router"; do
  code=0
  # shellcheck disable=SC2086  # words of one option
  b70-replay --logits qwen36-logits-generated $wrong --route-layer-regex lm_head --route-window-size 4 --quick >refused.txt 2>&1 || code=$?
  { [ "$code" -eq 2 ] && [ "$(wc -l <refused.txt)" -eq 1 ]; } || exit 1
done
say "what logits do not have is refused in one line"
