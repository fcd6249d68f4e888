"""How fast route files are read with every check on: MB/s of one core and the memory it took, per form.

    python bench/self/read_routes.py [MEGABYTES]

Writes a synthetic file of each form (lab and v1, plain and .zst) into a temporary folder and reads it back.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from replay.captures.generate import RouterModel, draw_layer
from replay.captures.records import V1Record
from replay.captures.routes import read_batches

MOST_MB = 300
# The peak of that program alone: a child's rusage begins with its parent's.
PEAK = """
import re, sys
from pathlib import Path
from replay.cli import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def lab_line(ids: list[int], experts: int) -> bytes:
    """One record of the lab's form, as the lab's hook writes it."""
    counts = np.bincount(ids, minlength=experts).tolist()
    record = {
        "ts": 1781172626.6483183, "pid": 1239110, "rank": "", "local_rank": "0",
        "layer": "language_model.model.layers.9.mlp.experts", "stage": "quark_int8_apply", "call": 1,
        "shape": [1, len(ids)], "num_tokens": 1, "top_k": len(ids), "num_experts": experts, "assignments": len(ids),
        "nonzero_experts": len(ids), "max_rows_per_expert": 1, "counts": counts, "topk_ids": [ids],
    }  # fmt: skip
    return json.dumps(record, separators=(",", ":")).encode()


def v1_line(ids: list[int], weights: list[float], step: int, experts: int) -> bytes:
    """One record of form v1."""
    record = V1Record(
        v=1, layer="language_model.model.layers.9.mlp.experts", stage="router", step=step, phase="decode", num_tokens=1,
        top_k=len(ids), num_experts=experts, topk_ids=[ids], topk_weights=[weights],
        requests=["cmpl-000000-0-b914b870"], padding=[False], rank="0",
    )  # fmt: skip
    return msgspec.json.encode(record)


def main(megabytes: int) -> None:
    """Measure and print one line a form."""
    ids, weights = draw_layer(RouterModel(tokens=2048), 9, 256, 8)
    rounded = [[float(str(w)) for w in row] for row in weights]
    lines = {
        "lab": [lab_line(row, 256) for row in ids.tolist()],
        "v1": [v1_line(row, w, t, 256) for t, (row, w) in enumerate(zip(ids.tolist(), rounded, strict=True))],
    }
    with tempfile.TemporaryDirectory() as folder:
        for form, some in lines.items():
            block = b"\n".join(some) + b"\n"
            data = block * (megabytes * 1_000_000 // len(block) + 1)
            for suffix, content in (("", data), (".zst", zstandard.compress(data, 3))):
                path = Path(folder) / f"routes.jsonl{suffix}"
                path.write_bytes(content)
                begin = time.process_time()
                records = sum(len(batch.layers) for batch in read_batches(path))
                seconds = time.process_time() - begin
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                rates = f"{len(data) / seconds / 1e6:6.0f} MB/s  {records / seconds:9.0f} records/s"
                print(f"{form + suffix:<8} {rates}  peak {peak:.0f} MB")
            del data
        validated(Path(folder) / "routes.jsonl", block)


def validated(path: Path, block: bytes) -> None:
    """`capture validate` of a file of 1 GB, in a process of its own: seconds and peak memory; exit code 1 above ``MOST_MB``."""
    with path.open("wb") as out:
        while out.tell() < 1_000_000_000:
            out.write(block)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "capture", "validate", str(path)], check=True, capture_output=True, text=True
    )
    peak = int(done.stdout.splitlines()[-1]) / 1024
    print(f"validate of 1 GB: {time.monotonic() - begin:.0f} s, peak {peak:.0f} MB (at most {MOST_MB})")
    if peak > MOST_MB:
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
