"""The table a run prints, and the same in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from tabulate import tabulate

from replay.model import HELD, Ceilings, Interval, Verdict
from replay.results.build import Group, Result
from replay.timing.telemetry import Machine

HEADERS = ["kernel", "exact", "time µs [95 %]", "host µs", "×floor", "vs base", "verdict"]


def heads(result: Result) -> list[str]:
    """The columns of a result's tables; the host's time has one where it is another than the device's."""
    apart = any(g.host_us is not None for g in result.groups)
    return [head for head in HEADERS if apart or head != "host µs"]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float) -> str:
    """A share with its sign."""
    return (
        f"{value:+.0%}".replace("%", " %").replace("-", "−")
        if abs(value) >= 0.1
        else f"{value:+.1%}".replace("%", " %").replace("-", "−")
    )


def interval_text(i: Interval) -> str:
    """``231 [228, 235]``."""
    return f"{_number(i.mid)} [{_number(i.lo)}, {_number(i.hi)}]"


def _ratio(i: Interval) -> str:
    return f"{percent(i.mid)} [{percent(i.lo).removesuffix(' %')}, {percent(i.hi).removesuffix(' %')}]"


def _verdict(verdict: Verdict | None, result: Result) -> str:
    """The label, marked where it is only a look."""
    if verdict is None:
        return ""
    return verdict.label + (" (QUICK)" if result.quick and verdict.label != "BASELINE" else "")


def _told(verdict: Verdict, result: Result) -> str:
    """The label and the codes behind it."""
    codes = ", ".join(dict.fromkeys(reason.partition(":")[0] for reason in verdict.reasons))
    return ": ".join(part for part in (_verdict(verdict, result), codes) if part)


def cells(group: Group, result: Result) -> list[str]:
    """One line of the table."""
    verdict = _verdict(group.verdict, result)
    values = [
        group.kernel,
        group.exact,
        interval_text(group.us) if group.us else "–",
        _number(group.host_us) if group.host_us else "–",
        _number(group.times_floor) if group.times_floor else "–",
        _ratio(group.comparison.effect.ratio) if group.comparison else "–",
        ": ".join(part for part in (verdict, group.detail) if part),
    ]
    return [value for head, value in zip(HEADERS, values, strict=True) if head in heads(result)]


def shape_of(group: Group) -> tuple[str, str, str, int, str]:
    """What the lines of one table share."""
    return group.stage, group.geometry, group.capture, group.tokens, group.modes


def tables(result: Result) -> Iterator[tuple[list[Group], list[Group]]]:
    """(all lines of a table, those of kernels that could run), one table a shape."""
    for _, members in groupby(result.groups, key=shape_of):
        lines = list(members)
        yield lines, [g for g in lines if g.exact != "UNAVAILABLE"]


def title(first: Group, lines: Sequence[Group], result: Result) -> str:
    """What a table is about."""
    tokens = f"{first.tokens} token" + ("s" if first.tokens > 1 else "")
    named = (g.comparison.baseline for g in lines if g.comparison)
    base = next((g.kernel for g in lines if g.verdict and g.verdict.label == "BASELINE"), None) or next(named, None)
    cases = f"{first.cases} case{'s' * (first.cases > 1)}" + (f" ({first.degenerate} degenerate)" if first.degenerate else "")
    parts = [first.stage, first.geometry.replace(":", " ", 1), f"{first.capture} {first.layers}", tokens, cases]
    if first.modes:
        parts.append(first.modes)
    parts += [
        result.cache,
        *(["graphs replayed"] if result.launch == "graph" else []),
        f"baseline {base}" if base else "no baseline",
        f"device {result.device}",
    ]
    return " · ".join(parts)


def floor_line(lines: Sequence[Group]) -> str:
    """The floor of a table's cases, the least effect that could have been seen, and the null arm."""
    first = lines[0]
    if first.floor_us is None:
        return "no floor: nothing was timed"
    compared = [g.comparison for g in lines if g.comparison]
    text = f"floor {_number(first.floor_us)} µs = {first.floor_term}."
    if compared:
        text += f" minimum detectable effect {max(c.effect.mde for c in compared):.1%}.".replace("%", " %")
    null = next((c.null for c in compared if c.null), None)
    return text + (f" null arm {_ratio(null.ratio)}." if null else "")


def text(result: Result, where: str, *, markdown: bool = False) -> str:
    """The whole report: one table a group, floors, ceilings, what is missing, what to do next."""
    out = []
    for lines, shown in tables(result):
        head = title(lines[0], shown, result)
        out.append(f"### {head}\n" if markdown else head)
        if shown:
            rows = [cells(g, result) for g in shown]
            out.append(tabulate(rows, heads(result), tablefmt="github" if markdown else "plain", disable_numparse=True))
        out += [f"    reproduce: {g.reproduce}" for g in shown if g.reproduce]
        out.append(("\n" if markdown else "") + floor_line(shown or lines) + "\n")
    out += workload_lines(result, markdown=markdown)
    return "\n".join([*out, *_tail(result, where)])


def workload_lines(result: Result, *, markdown: bool = False) -> Iterator[str]:
    """A table for each stage that was replayed in several shapes: all of them together, weighted."""
    for (stage, geometry, *_), members in groupby(result.workloads, key=lambda w: (w.stage, w.geometry, w.capture, w.modes)):
        lines = list(members)
        shares = ", ".join(f"{tokens} token{'s' * (tokens > 1)} {share:.0%}" for tokens, share in lines[0].weights.items())
        head = f"{stage} · {geometry.replace(':', ' ', 1)} · over all shapes: {shares} ({lines[0].weighted_by})".replace(
            "%", " %"
        )
        rows = [[w.kernel, _ratio(w.comparison.effect.ratio), _told(w.verdict, result)] for w in lines]
        yield f"### {head}\n" if markdown else head
        yield tabulate(rows, ["kernel", "vs base", "verdict"], tablefmt="github" if markdown else "plain") + "\n"


def _tail(result: Result, where: str) -> list[str]:
    tail = []
    if result.ceilings:
        tail.append(ceilings_text(result.ceilings))
    if result.unasked:
        tail.append(f"the device was not asked whether it computes rightly: {result.unasked}.")
    if failed := [str(f).split("  ")[0] for f in result.selftest if f.wrong]:
        tail.append(f"the device FAILS its self-test: {', '.join(failed)}; what rests on it is MISTRUSTED.")
    if result.drift:
        tail.append(f"ceilings moved ({', '.join(result.drift)}) beside cases that were not timed again: those are INCONCLUSIVE.")
    if foreign := [d.partition(":")[2] for d in result.disturbed if d.startswith("foreign_process")]:
        tail.append(f"other processes kept the processors busy ({', '.join(foreign)}): comparisons are INCONCLUSIVE.")
    if "clock_disagrees" in result.disturbed:
        tail.append("the clock of the spans is not the kernel's: every time is INVALID.")
    if result.dropped_blocks:
        told = ", ".join(f"{n} for {cause}" for cause, n in result.dropped_blocks.items())
        tail.append(f"blocks dropped for causes declared beforehand: {told}.")
    if result.machine:
        tail.append(machine_text(*result.machine))
    if result.repeated:
        tail.append(f"timings made again, since the memory ceilings had moved beside them: {result.repeated}.")
    held = next((HELD[g.stage.partition(".")[0]] for g in result.groups), "captured rows")
    tail.append(f"{held} {result.origin}; drawn from seeds: {', '.join(result.drawn)}.")
    if missing := unavailable(result):
        tail.append("unavailable: " + ", ".join(providers_text(missing)))
    if not result.finished:
        tail.append(f"unfinished: `b70-replay run --resume {where}` goes on.")
    if result.quick:
        many = "1 process" if result.processes == 1 else f"{result.processes} processes"
        tail.append(f"QUICK: {many}. A look, not a verdict to promote on; `--processes 5` and 30 blocks or more can be.")
    return [*tail, f"wrote {where}/result.json"]


def machine_text(before: Machine, after: Machine) -> str:
    """What the device said of itself, before and after; what it does not say is unknown."""
    told, unknown = [], []
    for field, name, unit in (
        ("mhz", "clock", " MHz"), ("temperature_c", "temperature", " °C"), ("power_w", "power", " W"),
        ("power_cap_w", "power cap", " W"), ("governor", "governor", ""), ("throttled", "throttling", ""),
    ):  # fmt: skip
        values = [getattr(m, field) for m in (before, after)]
        if None in values:
            unknown.append(name)
        else:
            texts = [
                f"{v:.0f}{unit}" if isinstance(v, float | int) and unit else {True: "yes", False: "no"}.get(v, v) for v in values
            ]
            told.append(f"{name} {' → '.join(dict.fromkeys(texts))}")
    return "telemetry: " + "; ".join([*told, *([", ".join(unknown) + " unknown"] if unknown else [])]) + "."


def providers_text(missing: Mapping[str, str]) -> Iterator[str]:
    """A kernel and why it is unavailable; those of one provider with one reason together, by their number."""
    alike: dict[tuple[str, str], list[str]] = {}
    for kernel, why in missing.items():
        alike.setdefault((kernel.partition(":")[0], why.partition(" [")[0]), []).append(kernel)
    for (provider, why), kernels in alike.items():
        yield f"{kernels[0]} ({why})" if len(kernels) == 1 else f"{provider}, {len(kernels)} kernels ({why})"


def unavailable(result: Result) -> dict[str, str]:
    """Kernels that could not run → why."""
    return {g.kernel: g.detail for g in result.groups if g.exact == "UNAVAILABLE"}


def ceilings_text(c: Ceilings) -> str:
    """The rates that floors are made of."""
    return (
        f"ceilings: read {c.read_gbs.mid:.0f} GB/s, copy {c.copy_gbs.mid:.0f}, in place {c.inplace_gbs.mid:.0f}, "
        f"from cache {c.hot_gbs.mid:.0f}; int8 {c.int8_gops.mid:.0f} GOP/s, bf16 {c.bf16_gops.mid:.0f}; "
        f"empty launch {c.launch_us.mid:.2f} µs "
        f"(read by {c.best_of['read']}, launch by {c.best_of['launch']})"
    )
