#!/usr/bin/env bash
# Recording: a server (a stand-in here; a real vLLM in `make test-endpoint`) recorded, killed, blocked and refused; the shipped
# recording of a real one checked, replayed to the bit and held against what the engine itself wrote.
set -euo pipefail
out=$(mktemp -d)
here=$(cd "$(dirname "$0")/../.." && pwd)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$out"

say() { echo "   $*"; }

b70-replay capture validate tiny-moe-256 >validate.txt
grep -qE 'valid: 1,827 records, 1,827 token rows, form v1, manifest tiny-moe-256 \(recorded\)' validate.txt
grep -qE 'valid: 2 layers, 130 rows, 18 with states' validate.txt
grep -qE 'valid: 1 file, 609 rows of 512 logits' validate.txt
[ "$(du -sb "$here/captures/tiny-moe-256" | cut -f1)" -le $((8 << 20)) ]
b70-replay capture agree tiny-moe-256 >agree.txt
[ "$(grep -c ' agrees' agree.txt)" -ge 2 ] && ! grep -q DISAGREES agree.txt
say "the recording of a real server is valid, and the oracle is within its budget of what the engine wrote"

few="--max-cases 1 --quick --blocks 5 --repeats 2"
# shellcheck disable=SC2086  # words of several options
{
  b70-replay run --capture tiny-moe-256 --stage moe.layer --kernel 'sycl:moe.layer:s*' --route-layer-regex 'layers\.1\.' $few -o moe >moe.txt
  b70-replay run --capture tiny-moe-256 --stage gdn.step --kernel 'sycl:*' --route-layer-regex 'layers\.0\.' $few -o gdn >gdn.txt
}
python - <<'PY'
import json
for run, kernel in (("moe", "sycl:moe.layer:staged"), ("gdn", "sycl:gdn.step:fused")):
    rows = [r for r in json.load(open(f"{run}/result.json"))["rows"] if r["kernel"] == kernel]
    assert rows and all(r["outcome"]["grade"] == "BITWISE" and r["outcome"]["timing"] for r in rows), rows
PY
say "recorded routes and states replay BITWISE"

port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
serve=(python -m tests.engine.stand_in serve model --port "$port")
printf 'one\ntwo\n' >prompts
export PYTHONPATH="$here"
b70-replay capture record -o good --prompts prompts --max-tokens 6 --concurrency 2 -- "${serve[@]}" >record.txt
grep -qE '^good: 12 steps, .* 0 dropped; ended: the prompts were answered' record.txt
b70-replay capture index good >index.txt && b70-replay capture export good -o lab.jsonl >export.txt
b70-replay capture validate lab.jsonl >lab.txt && grep -q 'form lab' lab.txt
b70-replay capture anonymise good -o shared >anonymous.txt && ! grep -rq cmpl- shared
for fault in empty:3 dies:5 silent:5; do
  code=0
  b70-replay capture record -o "${fault%:*}" --prompts prompts -- "${serve[@]}" --fault "${fault%:*}" >failed.txt 2>&1 || code=$?
  [ "$code" -eq "${fault#*:}" ]
done
if pgrep -f "stand_in serve model --port $port" >left.txt; then exit 1; fi
say "a server is recorded, closed and handed on; nothing recorded, a dead server and a missing plugin fail, and no process is left"
