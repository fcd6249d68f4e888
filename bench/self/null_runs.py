"""A kernel against itself under another name, many full runs: how often is a difference claimed that cannot be?

``python bench/self/null_runs.py ROUTES [RUNS]`` with a route JSONL of at least 16 rows in layer 9. Beside the verdict stands what
the interval says alone, which ceilings that moved and busy neighbours keep from becoming one. Exit code 1 where more than one
run in ten claims FASTER or SLOWER, in the verdict or by the interval.
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from replay.results.build import Result
from replay.verdict import label_of

KERNEL = "moe.gemm1"
ITSELF = Path(__file__).with_name("itself.py")
FALSE = ("FASTER", "SLOWER")


def one(routes: str, folder: Path) -> tuple[str, str, str]:
    """(verdict of the line, what its interval says alone, the rest of what is to be told) of one full run."""
    command = [
        sys.executable, "-m", "replay", "run", "--route-jsonl", routes, "--route-layer-regex", r"layers\.9\.", "--stage", KERNEL,
        "--kernel", f"eager:{KERNEL}", "--load", str(ITSELF), "--kernel", f"itself:{KERNEL}", "-o", str(folder),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    result = msgspec.json.decode((folder / "result.json").read_bytes(), type=Result)
    line = next(g for g in result.groups if g.kernel == f"itself:{KERNEL}")
    assert line.comparison is not None
    assert line.verdict is not None
    ratio = line.comparison.effect.ratio
    reasons = ", ".join(dict.fromkeys(r.partition(":")[0] for r in line.verdict.reasons))
    told = f"{line.cases} cases, {result.processes} processes: {ratio.mid:+.2%} [{ratio.lo:+.2%}, {ratio.hi:+.2%}] {reasons}"
    return line.verdict.label, label_of(line.comparison.effect, 0.01), told


def main(routes: str, runs: int = 10) -> int:
    """Print a line a run, as it ends, and the counts."""
    verdicts: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            begin = time.monotonic()
            verdict, by_interval, told = one(routes, Path(folder) / str(number))
            verdicts[verdict] += 1
            alone[by_interval] += 1
            print(
                f"run {number + 1:2} {time.monotonic() - begin:4.0f} s  {verdict:<13} by interval {by_interval:<13} {told}",
                flush=True,
            )
    wrong, by_interval_wrong = (sum(counted[name] for name in FALSE) for counted in (verdicts, alone))
    print(
        f"{wrong} false verdicts in {runs} full runs ({dict(verdicts)}); by intervals alone {by_interval_wrong} ({dict(alone)})"
    )
    return int(max(wrong, by_interval_wrong) > runs / 10)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
