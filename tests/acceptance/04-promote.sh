#!/usr/bin/env bash
# Promotion, as it is typed: an honest full run is promoted, or refused for the machine's restlessness alone; each refusal that
# can be provoked from outside has its code; the launcher with one hash changed exits 5 and says which.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
trap '[ $? -eq 0 ] || tail -n 40 "$out"/*.txt; rm -rf "$out"' EXIT
cd "$out"

say() { echo "   $*"; }

base=eager:moe.gemm2
mine=sycl:moe.gemm2:topk_direct
full() { # full NAME: an honest full run of two kernels on the shipped capture
    b70-replay --route-jsonl qwen36-generated --route-layer-regex 'layers\.9\.' --max-cases 1 --stage moe.gemm2 \
        --kernel $base --kernel $mine --processes 5 -o "$1" >"$1.txt"
}
promote() { b70-replay promote "$@" --endpoint tiny-cpu; }

# A machine whose memory rate moves in mid-run must not be believed: such a refusal is told, any other is a failure. That a
# quiet machine's run is promoted is held by tests/endpoint on drawn times.
full run
code=0
promote run --kernel $mine -o "out" >"promote.txt" || code=$?
[ $code -eq 0 ] || [ $code -eq 3 ] || { cat "promote.txt"; exit 1; }
if grep -E '^  [a-z_]+: ' "promote.txt" | grep -vqE '^  (ceiling_drift|null_inconclusive|null_differed|foreign_process): '; then
    cat "promote.txt"
    exit 1
fi
run=run
if [ $code -eq 0 ]; then
    grep -q '^predicted: ' "promote.txt"
    say "honest run: $(head -1 "promote.txt")"
    say "$(sed -n 2p "promote.txt")"
else
    say "honest run REFUSED for the machine's sake: $(grep -oE '^  [a-z_]+' "promote.txt" | tr -d ' ' | sort -u | tr '\n' ' ')"
fi

refused() { # refused CODE EXIT ARGUMENTS…
    local word=$1 want=$2 code=0
    shift 2
    promote "$@" -o refused >refused.txt || code=$?
    [ $code -eq "$want" ] && grep -qE "^  $word: " refused.txt && [ ! -e refused ] || { cat refused.txt; exit 1; }
    say "refused: $word, exit $code"
}
one=(--route-jsonl qwen36-generated --route-layer-regex 'layers\.9\.' --max-cases 1)
b70-replay "${one[@]}" --stage moe.gemm2 --kernel $base --kernel $mine --quick -o quick >/dev/null
refused quick 3 quick --kernel $mine
refused kernel_not_in_run 3 "$run" --kernel sycl:moe.gemm2:rows
refused is_baseline 3 "$run" --kernel $base
cp -r "$run" edited
sed -i '0,/"grade":"BITWISE"/s//"grade":"BITWISE "/' edited/run.jsonl
refused edited_journal 5 edited --kernel $mine
cp -r "$run" edited2
sed -i 's/"span_ns":[0-9]/"span_ns":1/' edited2/run.jsonl
[ "$(cmp "$run"/run.jsonl edited2/run.jsonl | wc -l)" -eq 1 ] # an edit that changes nothing proves nothing
refused edited_journal 5 edited2 --kernel $mine

cp "$root/docs/add-a-kernel.md" page.md
sed -n '/^```python$/,/^```$/p' page.md | grep -v '^```' >mine.py
code=0
b70-replay "${one[@]}" --stage moe.quantize --load mine.py --quick -o wrong >/dev/null || code=$?
[ $code -eq 1 ]
refused red_case 1 wrong --kernel mine:moe.quantize:divide
grep -q 'reproduce: b70-replay run ' refused.txt
echo '# rebuilt' >>mine.py
code=0
promote wrong --kernel mine:moe.quantize:divide -o refused >refused.txt || code=$?
[ $code -eq 5 ] && grep -q '  rebuilt_kernel: sources\..*mine\.py' refused.txt
say "refused: rebuilt_kernel, exit $code"

if [ -d "out" ]; then
    shellcheck "out/launch.sh" "out/control.sh"
    "out/launch.sh" --dry-run | grep -q 'vllm.entrypoints.openai.api_server --model models/tiny'
    echo >>"out/engine.toml"
    code=0
    env -u PYTHONPATH "out/launch.sh" >launch.txt 2>&1 || code=$?
    [ $code -eq 5 ] && grep -q 'engine.toml: expected sha256' launch.txt || { cat launch.txt; exit 1; }
    say "launch: $(grep -o 'launch.sh: .*engine.toml' launch.txt | sed "s#$out/##"), exit $code"
fi
