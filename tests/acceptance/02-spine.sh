#!/usr/bin/env bash
# The spine, as its users type it: two cases of the shipped capture and, where it is beside the checkout, two of the lab's,
# instead of sixteen, so that the whole stays short; the full commands end within three minutes too.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$root"

say() { echo "   $*"; }

# make bench-moe ends within 3 minutes, every line BITWISE, with times and floors; it is replaying within 3 s.
begin=$SECONDS
make -s bench-moe ARGS="--max-cases 1 --repeats 2 --blocks 10 -o $out/moe" >"$out/moe.txt" &
run=$!
until grep -qs '"record":"judged"' "$out/moe/run.jsonl" || ! kill -0 $run 2>/dev/null; do sleep 0.1; done
first=$((SECONDS - begin))
wait $run
[ $((SECONDS - begin)) -le 180 ]
[ "$first" -le 3 ] || { echo "first outcome after $first s"; exit 1; }
lines=$(grep -cE '^(eager|sycl):' "$out/moe.txt")
[ "$lines" -ge 10 ]
[ "$(grep -cE '^(eager|sycl):.* BITWISE +[0-9.]+ \[' "$out/moe.txt")" -eq "$lines" ]
[ "$(grep -cE '^floor [0-9.]+ µs = (bytes|launch)' "$out/moe.txt")" -ge 9 ]
say "bench-moe: $lines lines BITWISE in $((SECONDS - begin)) s, replaying after $first s"

lab=../shared/captures/lab/qwen36-routecapture6-rank0-layers9-14.jsonl
if [ -f "$lab" ]; then
    begin=$SECONDS
    b70-replay --route-jsonl "$lab" --route-layer-regex 'layers\.9\.' --route-start-indices 0:64:32 --stage moe.route \
        --stage moe.layer --repeats 2 --quick --blocks 5 -o "$out/lab" >"$out/lab.txt"
    [ $((SECONDS - begin)) -le 180 ]
    lines=$(grep -cE '^(eager|sycl):' "$out/lab.txt")
    [ "$lines" -ge 9 ]
    [ "$(grep -cE '^(eager|sycl):.* BITWISE +[0-9.]+ \[' "$out/lab.txt")" -eq "$lines" ]
    grep -q '1 token · 2 cases' "$out/lab.txt"
    say "lab routes, first and last stage: $lines lines BITWISE in $((SECONDS - begin)) s"
else
    say "lab routes: SKIPPED, not beside this checkout"
fi

# One line and exit 2 for bad input, nothing written.
cd "$out"
mkdir empty && cd empty
set +e
b70-replay --route-jsonl missing.jsonl 2>err.txt
[ $? -eq 2 ] && [ "$(wc -l <err.txt)" -eq 1 ] && [ ! -e runs ] || exit 1
say "bad input: $(cat err.txt)"
