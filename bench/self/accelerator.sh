#!/usr/bin/env bash
# The eager MoE stages on an accelerator: ceilings, then timed as calls by events, then as graphs replayed, each kernel against
# itself under another name as well: bash bench/self/accelerator.sh DEVICE FOLDER [CASES [PROCESSES [calls|graph]]]
set -euo pipefail
device=$1 folder=$2 cases=${3:-2} processes=${4:-8}
work=$(mktemp -d)
cp "$(dirname "$0")/itself.py" "$work/itself.py"
mkdir -p "$folder"
python3 -m replay calibrate --device "$device" | tee "$folder/calibrate.txt"
for launch in ${5:-calls graph}; do
  python3 -m replay run --capture qwen36-generated --route-layer-regex 'layers\.9\.' --max-cases "$cases" --stage 'moe.*' \
    --kernel 'eager:*' --load "$work/itself.py" --kernel 'itself:*' --device "$device" --launch "$launch" \
    --processes "$processes" --repeats 4 -o "$work/$launch" | sed "s#$work/##" | tee "$folder/$launch.txt"
  sed "s#$work/##g" "$work/$launch/result.json" > "$folder/$launch.json"
done
rm -rf "$work"
