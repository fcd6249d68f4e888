#!/usr/bin/env bash
# Times that may be believed: ceilings; a run that is full by default and a look that says it is one; two runs side by side; a page.
# Injected faults and several shapes are in tests/timing, tests/session and tests/adversarial.
set -euo pipefail
out=$(mktemp -d)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$out"

say() { echo "   $*"; }

b70-replay calibrate >calibrate.txt
for ceiling in read copy "in place" "from cache" "int8 product" "bf16 product" "empty launch"; do
  [ "$(grep -cE "^$ceiling .*\[[0-9., ]+\].*\[[0-9., ]+\].*(torch\.|sycl )" calibrate.txt)" -eq 1 ]
done
[ "$(grep -cE '^[0-9]+ MiB ' calibrate.txt)" -eq 5 ]
grep -q '^the clock steps by' calibrate.txt
say "calibrate: seven ceilings, each twice with its interval"

one=(--route-jsonl qwen36-generated --route-layer-regex 'layers\.9\.' --max-cases 1 --stage moe.remap --repeats 2)
b70-replay run --help | grep -q 'Fresh processes to time in. \[8\]'
b70-replay "${one[@]}" --processes 5 -o full >full.txt
[ "$(grep -c QUICK full.txt)" -eq 0 ]
python - <<'PY'
import json
result = json.load(open("full/result.json"))
assert (result["processes"], result["quick"]) == (5, False), result["processes"]
row = next(r for r in result["rows"] if r["kernel"] == "sycl:moe.remap:rows")
assert row["outcome"]["timing"]["samples"] >= 5 * 30 and row["floor_impl_us"] >= row["floor"]["us"]
assert row["comparison"]["null"] is not None and row["comparison"]["effect"]["processes"] >= 5
assert result["machine"] is not None and result["ceilings"]["int8_gops"]["mid"] > 0
PY
grep -q '^telemetry: ' full.txt
say "run: 8 processes of 30 blocks unless told otherwise; 5 are not QUICK; with a null arm"

b70-replay "${one[@]}" --quick -o quick >quick.txt
grep -q 'QUICK: 1 process' quick.txt && grep -q 'QUICK: 1 process' quick/result.md
b70-replay compare full quick >compared.txt
grep -q 'sycl:moe.remap:rows' compared.txt && grep -q 'differs: processes: 5 → 1' compared.txt && grep -q 'quick is QUICK' compared.txt
say "--quick says so in every output; compare puts two runs side by side"

b70-replay report quick >report.txt
python - <<'PY'
import json, re
page = open("quick/report.html").read()
rows = [r for r in json.load(open("quick/result.json"))["rows"] if r["outcome"].get("timing")]
assert len(set(re.findall(r'id="(mark-[^"]+)"', page))) == len(rows) == 2, "a mark a row and kernel"
assert "QUICK" in page and "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace("http://creativecommons.org", "")
PY
say "report: one page, a mark for every row"
