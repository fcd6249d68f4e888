#!/usr/bin/env bash
# Everything that is measured on a GPU: ceilings, our Triton kernels beside other people's, and every stage judged and timed by the
# tool itself, in graphs of cold calls: bash bench/self/gpu.sh DEVICE FOLDER [PYTHON]. VLLM_FUSED_MOE as moe_gpu_peers.py says.
# What was in FOLDER before stays until all of it has been measured.
set -euo pipefail
device=${1:?"usage: bash bench/self/gpu.sh DEVICE FOLDER [PYTHON]"} folder=${2:?"a folder for the results"} python=${3:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/found"
cp captures/qwen36-generated/routes.jsonl "$work/routes.jsonl" # away from its manifest, which says that it is of TP4

replay() { # replay NAME ARGUMENTS…
  local name=$1
  shift
  "$python" -m replay run "$@" --kernel 'triton:*' --kernel 'eager:*' --device "$device" --launch graph --quick --repeats 2 \
    --blocks 10 --max-cases 1 -o "$work/$name" >"$work/$name.txt" || [ $? -eq 1 ] # a red row is in the table
  sed "s#$work/##" "$work/$name.txt" | tee -a "$work/found/judged.txt"
  "$python" - "$work" "$work/$name/result.json" >>"$work/found/judged.jsonl" <<'PY'
import json, sys
print(json.dumps(json.load(open(sys.argv[2]))).replace(sys.argv[1] + "/", ""))
PY
}

"$python" bench/self/gpu.py "$device" "$work/found" | tee "$work/found/beside.txt"
"$python" -m replay calibrate --device "$device" | tee "$work/found/calibrate.txt"
for tp in 4 1; do
  replay "moe-tp$tp" --route-jsonl "$work/routes.jsonl" --model qwen36 --tp "$tp" --route-layer-regex 'layers\.9\.' \
    --stage 'moe.*' --route-window-size 1,4,16
done
replay gdn --state qwen36-tp1-states-generated --route-window-size 1,8,32
replay topk --logits qwen36-logits-generated --route-layer-regex lm_head --route-window-size 1,16 --mode k=50
replay topk-tp4 --logits qwen36-logits-generated --route-layer-regex lm_head --route-window-size 1,16 --mode k=50 --mode shard=0/4 \
  --stage topk.rows
mkdir -p "$folder"
cp "$work"/found/* "$folder"
