"""``make fuzz-exact``: random cases a stage through every kernel, strata counted and asserted.

python -m tests.fuzz.fuzz_exact [CASES]
"""

import sys
from collections import Counter

import numpy as np

from replay.devices import Device
from replay.model import Exact
from replay.session.arms import Arms
from tests.fuzz import gdn_strata, strata, topk_strata
from tests.fuzz.gdn_strata import GDN
from tests.fuzz.strata import MOE, Random, check, kernels_of
from tests.fuzz.topk_strata import TOPK


def main(cases: int) -> int:
    """Run and print one line a stage; 1 where a kernel was wrong or a stratum was missed."""
    bad = 0
    for number, stage in enumerate((*MOE, *GDN, *TOPK)):
        family = {"moe": strata, "gdn": gdn_strata, "topk": topk_strata}[stage.partition(".")[0]]
        choices = Random(np.random.Generator(np.random.Philox(key=[cases, number])))
        seen: Counter[str] = Counter()
        kernels = kernels_of(stage)
        for index in range(cases):
            if index % 100 == 0:
                arms = Arms(Device("cpu"))  # tables of a hundred geometries are enough to keep
            drawn = family.draw(choices, stage)
            seen.update(drawn.strata)
            for kernel in kernels:
                outcome = check(arms, kernel, drawn, family.special)
                if not isinstance(outcome, Exact):
                    bad += 1
                    print(f"RED {kernel.id} {drawn.case.id} ({drawn.values}): {outcome.detail}")
        lacking = [name for name in family.wanted(stage) if seen[name] < max(cases // 50, 1)]
        bad += len(lacking)
        counts = ", ".join(f"{name} {seen[name]}" for name in sorted(seen) if not name[0].isdigit() or "expert" in name)
        print(
            f"{stage}: {cases} cases × {len(kernels)} kernels; {counts}" + (f"; MISSED {lacking}" if lacking else ""), flush=True
        )
    print(f"{bad} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
