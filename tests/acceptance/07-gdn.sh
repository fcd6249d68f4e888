#!/usr/bin/env bash
# GDN over captured states: what is in a capture; conv, recurrence and step bitwise by every kernel of ours; timed with cold states.
# Planted faults are in tests/exactness/test_gdn_faults.py, reports from the field in tests/field/test_gdn_field.py.
set -euo pipefail
out=$(mktemp -d)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$out"

say() { echo "   $*"; }

b70-replay capture validate qwen36-states-generated >validate.txt
grep -q 'valid: 2 layers, 512 rows, 64 with states, form b70-state/1' validate.txt
b70-replay capture inspect qwen36-states-generated >inspect.txt
[ "$(grep -c 'ssm_state .*\[32, 8, 128, 128\] by \[131072, 16384, 128, 1\] + 0' inspect.txt)" -eq 2 ]
say "a state capture is made from its seed, checked, and told with shape and stride"

b70-replay --state qwen36-states-generated --route-layer-regex 'layers\.0\.' --max-cases 1 --route-window-size 1 \
  --quick --repeats 2 --blocks 5 -o run >run.txt
python - <<'PY'
import json
rows = {r["kernel"]: r for r in json.load(open("run/result.json"))["rows"]}
ours = {k for k in rows if k.startswith(("sycl:", "eager:"))}
assert {k.split(":")[1] for k in ours} == {"gdn.conv", "gdn.recurrent", "gdn.step"} and len(ours) == 7, ours
assert all(r["outcome"]["grade"] == "BITWISE" and r["outcome"]["timing"] for k, r in rows.items() if k in ours)
work = rows["sycl:gdn.recurrent:heads"]["floor"]["work"]
assert work["read_bytes"] == work["write_bytes"] == 8 * 128 * 128 * 4, work
PY
say "conv, recurrence and step: seven kernels BITWISE and timed, floors of the states that they read and write"

# A thousand steps of the recurrence, states fed back.
b70-replay chain --state qwen36-states-generated --route-layer-regex 'layers\.0\.' --stage gdn.recurrent --kernel 'sycl:*' \
  --steps 1000 -o chain >chain.txt
grep -qE '^sycl:gdn.recurrent:heads +BITWISE .* BOUNDED$' chain.txt
grep -qE '^the contract .* BOUNDED$' chain.txt
grep -q 'inputs of 8 captured, the others drawn' chain.txt
say "a chain of 1000 steps: bits kept, bounded against f64"

for wrong in "--route-stage-regex router" "--stage moe.gemm1" "--mode l2norm=none"; do
  code=0
  # shellcheck disable=SC2086  # words of one option
  b70-replay --state qwen36-states-generated $wrong --quick >refused.txt 2>&1 || code=$?
  { [ "$code" -eq 2 ] && [ "$(wc -l <refused.txt)" -eq 1 ]; } || exit 1
done
say "what states do not have is refused in one line"
