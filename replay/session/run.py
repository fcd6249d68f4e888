"""Run a plan: judge every kernel alone, time the green ones together, and write it all to the journal.

What the journal already holds is not done again, which is all there is to ``--resume``.
"""

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from replay.errors import EnvironmentRefused
from replay.exactness import Got, Mismatch, digest
from replay.exactness.judge import TWIN, graded, judge, with_twin
from replay.exactness.trust import mistrust
from replay.identity import Hashes
from replay.kernels.registry import unavailable
from replay.model import NULL, Case, Exact, Inexact, Kernel, MemoryRates, NotRun, Outcome, Twin
from replay.oracle.moe import ExpertRows
from replay.session import journal as j
from replay.session.child import Ceiled, Done, Looked, Raised, Ran, Sampled, judge_main
from replay.session.crew import Crew, Seating
from replay.session.exclusive import timing_on
from replay.session.sampling import Job
from replay.session.workers import Died, Ending, Worker, device_lost, healthy, selftested
from replay.stages import STAGES
from replay.stages.stage import Outputs, Tensors
from replay.stages.vary import inputs_when_timed, twin_of
from replay.timing.floors import MOST_REPEATS, drifted, spare_timings
from replay.timing.spans import Arm, Options, generator

# A timed case, in which all kernels take turns between the ceilings, may be silent for longer than a judged one.
TIMED_S, TIMED_LONGER = 300.0, 2.5
CONTIGUOUS_ONLY = "contiguous inputs only"

Progress = Callable[[str, int, int], None]


@dataclass
class State:
    """What the journal says so far."""

    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    selftested: j.Selftested | None = None
    probed: dict[str, str | None] = field(default_factory=dict)
    posed: set[str] = field(default_factory=set)
    calibrated: list[j.Calibrated] = field(default_factory=list)
    timed: dict[tuple[int, str], tuple[MemoryRates, MemoryRates]] = field(default_factory=dict)  # the last one's memory rates
    again: Counter[tuple[int, str]] = field(default_factory=Counter)  # how often another timing has followed
    dropped: set[tuple[str, str]] = field(default_factory=set)
    loaded: dict[str, str] = field(default_factory=dict)
    finished: bool = False

    def see(self, record: j.Record) -> None:
        """Take one record in."""
        if isinstance(record, j.Judged):
            self.outcomes[record.case, record.kernel] = record.outcome
        elif isinstance(record, j.Selftested):
            self.selftested = record
        elif isinstance(record, j.Probed):
            self.probed[record.stage] = record.mistrust
        elif isinstance(record, j.Posed):
            self.posed.add(record.case)
        elif isinstance(record, j.Calibrated):
            self.calibrated.append(record)
        elif isinstance(record, j.Timed):
            self.again[record.process, record.case] += (record.process, record.case) in self.timed
            self.timed[record.process, record.case] = record.memory
        elif isinstance(record, j.Dropped):
            self.dropped.add((record.case, record.kernel))
        elif isinstance(record, j.Loaded):
            self.loaded.update(record.files)
        elif isinstance(record, j.Finished):
            self.finished = True


class Session:
    """One run over one journal."""

    def __init__(self, plan: j.Plan, journal: j.Journal, records: Sequence[j.Record], progress: Progress) -> None:
        self.plan, self.journal, self.progress = plan, journal, progress
        self.state = State()
        for record in records:
            self.state.see(record)
        self.seating = Seating(plan)
        self.hashes = Hashes()
        self.lost = False  # whether the device was lost and has not been seen to compute since
        self._truth: dict[
            tuple[str, object, str, bool], tuple[Tensors, Outputs]
        ] = {}  # inputs without the weights, which are large

    def write(self, record: j.Record) -> None:
        """Journal a record and take it in."""
        self.journal.write(record)
        self.state.see(record)

    def run(self) -> None:
        """Both phases, as far as the journal does not hold them yet."""
        if self.state.finished:
            return
        # A second's import that the results need: made while children judge, and not while they are timed.
        importing = threading.Thread(target=importlib.import_module, args=("scipy.stats",))
        importing.start()
        if self.state.selftested is None:
            self.write(selftested(self.plan.device))
        for stage in self.plan.stages():
            self._truth.clear()
            self._probe(stage)
            for kernel in self.plan.kernels_of(stage):
                self._judge(kernel, self._cases(stage))
        self._truth.clear()
        importing.join()
        with timing_on(self.plan.device, lambda told: self.progress(told, 0, 1)):
            for process in range(self.plan.processes):
                self._time(process)
        self.write(j.Finished(len(self.state.outcomes)))

    def _cases(self, stage: str) -> list[Case]:
        return [c for c in self.plan.cases if c.problem.stage == stage]

    def truth(self, case: Case, *, timed: bool = False) -> tuple[Tensors, Outputs]:
        """(inputs without weights, expected outputs) of a case, by the oracle; kept while its stage is judged.

        ``timed``: on the variation that is checked while a kernel is timed.
        """
        key = str(case.id), case.held, case.bytes_of, timed  # a twin of more rows may have another case's id
        if key not in self._truth:
            stage = STAGES[case.problem.stage]
            inputs = inputs_when_timed(stage, case) if timed else stage.inputs(case)
            want = stage.expected(case.problem, inputs)
            if not case.twin and not timed and key[0] not in self.state.posed:
                self.write(j.Posed(key[0], stage.work(case.problem, inputs), stage.degenerate(case.problem, inputs)))
            self._truth[key] = ({n: t for n, t in inputs.items() if not isinstance(t, ExpertRows)}, want)
        return self._truth[key]

    # ------------------------------------------------------------ judging

    def _probe(self, stage: str) -> None:
        """Could this stage's check fail at all? Asked once a run."""
        if stage not in self.state.probed:
            self.write(j.Probed(stage, mistrust(STAGES[stage], self._cases(stage))))

    def _judge(self, kernel: Kernel, cases: list[Case]) -> None:
        todo = [c for c in cases if (str(c.id), kernel.id) not in self.state.outcomes]
        for case in list(todo):
            if why := unavailable(kernel, case.problem, self.plan.device, self.plan.launch) or self._lacks(kernel):
                self._outcome(case, kernel, NotRun("UNAVAILABLE", why))
                todo.remove(case)
            elif doubt := self.state.probed[case.problem.stage] or self._distrust(kernel):
                self._outcome(case, kernel, Inexact("MISTRUSTED", -1, doubt))
                todo.remove(case)
        load = (kernel.file,) if kernel.file else ()
        while todo:
            worker = Worker(
                judge_main, kernel, tuple(todo), self.plan.device, self.plan.repeats, load, timeout_s=self.plan.timeout_s
            )
            done = self._hear_judge(worker, kernel, todo)
            if self._device_is_gone():
                for case in todo[done:]:
                    self._outcome(case, kernel, NotRun("DEVICE_LOST", "no healthy device was left for this case"))
                return
            if done == 0:  # a child that ended well without an answer to anything
                self._outcome(todo[0], kernel, NotRun("CRASHED", "ended without an answer"))
                done = 1
            todo = todo[done:]  # a child that died is followed by another for the cases behind the one it died at

    def _lacks(self, kernel: Kernel) -> str | None:
        """What a kernel rests on and the device does not have."""
        return self.state.selftested.lacks(kernel.rests_on) if self.state.selftested else None

    def _distrust(self, kernel: Kernel) -> str | None:
        """Why a kernel's bits say nothing on this device: it fails a self-test that they rest on."""
        tested = self.state.selftested
        return tested.doubt((*STAGES[kernel.stage].rests_on, *kernel.rests_on)) if tested else None

    def _device_is_gone(self) -> bool:
        """After a lost device, whether a fresh process still cannot compute on it."""
        self.lost = self.lost and not healthy(self.plan.device)
        return self.lost

    def _hear_judge(self, worker: Worker, kernel: Kernel, todo: list[Case]) -> int:
        done = 0
        for message in worker.listen():
            if isinstance(message, Ran):
                case = todo[message.index]
                self._record(self._judged(case, kernel, message))
                done = message.index + 1
            elif isinstance(message, Raised):
                self.lost = device_lost(message.summary)
                status: Ending = "DEVICE_LOST" if self.lost else "CRASHED"
                self._outcome(todo[message.index], kernel, NotRun(status, message.summary, message.trace))
                done = message.index + 1
                if self.lost:
                    break  # what else this process holds is of no use
            elif isinstance(message, Died) and done < len(todo):  # behind its last answer there is nothing to charge
                self.lost = message.status == "DEVICE_LOST"
                self._outcome(todo[done], kernel, NotRun(message.status, message.how, message.log_tail))
                done += 1
            elif isinstance(message, Done):
                self._loaded(f"judge {kernel.id}", message)
        return done

    def _judged(self, case: Case, kernel: Kernel, ran: Ran) -> j.Judged:
        stage = STAGES[case.problem.stage].judging(kernel)
        inputs, want = self.truth(case)
        outcome = judge(stage, case, inputs, want, ran.repeats, ran.trespasses)
        twins: dict[Twin, j.Answer] = {}
        for name, got in ran.twins.items():
            if isinstance(outcome, Exact):
                twin = twin_of(stage, case, name)
                outcome = with_twin(stage, twin, *self.truth(twin), got, outcome)
                twins[name] = self.answer(twin, got)
        if not isinstance(outcome, Exact):
            return j.Judged(str(case.id), kernel.id, outcome)
        told = [outcome.detail] * bool(outcome.detail) + [CONTIGUOUS_ONLY] * ("strided" not in kernel.layouts)
        outcome = msgspec.structs.replace(outcome, prepack=ran.prepack, detail="; ".join(told))
        answers = tuple(self.answer(case, got) for got in ran.repeats)
        return j.Judged(str(case.id), kernel.id, outcome, answers, twins)

    def answer(self, case: Case, got: Got, *, timed: bool = False) -> j.Answer:
        """What a call wrote, in canonical form, as the journal keeps it."""
        stage = STAGES[case.problem.stage]
        inputs, want = self.truth(case, timed=timed)
        canonical = Got(stage.canonical(case.problem, inputs, got.outputs), got.poison)
        return j.Answer(got.poison, digest(stage.specs(case.problem), want, canonical))

    def _outcome(self, case: Case, kernel: Kernel, outcome: Outcome) -> None:
        self._record(j.Judged(str(case.id), kernel.id, outcome))

    def _record(self, judged: j.Judged) -> None:
        self.write(judged)
        self.progress(f"judge {judged.kernel}", len(self.state.outcomes), self._pairs())

    def _loaded(self, where: str, done: Done) -> None:
        """Journal the hashes of what a child had loaded, as far as no record holds them."""
        found = self.hashes.of(done.files)
        if new := {path: sha256 for path, sha256 in found.items() if self.state.loaded.get(path) != sha256}:
            self.write(j.Loaded(where, new))

    def _pairs(self) -> int:
        return sum(len(self.plan.kernels_of(c.problem.stage)) for c in self.plan.cases)

    # ------------------------------------------------------------ timing

    def green(self, case: Case) -> tuple[Kernel, ...]:
        """The kernels of a case that may be timed."""
        key = str(case.id)
        return tuple(
            k for k in self.plan.kernels_of(case.problem.stage)
            if isinstance(self.state.outcomes.get((key, k.id)), Exact) and (key, k.id) not in self.state.dropped
        )  # fmt: skip

    def arms(self, case: Case) -> tuple[Arm, ...]:
        """The green kernels of a case, and a second copy of the baseline where there is something to compare with it."""
        green = self.green(case)
        baseline = self.plan.baseline_of(case.problem.stage)
        null = [(k.id + NULL, k) for k in green if k.id == baseline and len(green) > 1]
        return tuple(self.seating.arm(*named) for named in (*((k.id, k) for k in green), *null))

    def _jobs(self, process: int) -> list[Job]:
        """What is left to time in a process, in an order of its own: what drifts slowly meets every case alike."""
        order = generator("cases", self._options(process)).permutation(len(self.plan.cases))
        cases = [self.plan.cases[number] for number in order]
        todo = [(c, arms) for c in cases if (process, str(c.id)) not in self.state.timed and (arms := self.arms(c))]
        return todo or self._again(process, cases)

    def _again(self, process: int, cases: Sequence[Case]) -> list[Job]:
        """Those beside which the memory ceilings moved, as long as the process may repeat any; a look, which promotes nothing,
        may not."""
        if self.plan.quick:
            return []
        timed, again = self.state.timed, self.state.again
        spare = spare_timings(len(self.plan.cases)) - sum(n for (p, _), n in again.items() if p == process)
        moved = [
            (c, arms) for c in cases
            if (last := timed.get((process, str(c.id)))) and drifted(*last, self.plan.margin)
            and again[process, str(c.id)] < MOST_REPEATS and (arms := self.arms(c))
        ]  # fmt: skip
        return moved[: max(spare, 0)]

    def _options(self, process: int) -> Options:
        plan = self.plan
        return Options(plan.blocks, plan.cache, plan.launch, plan.seed, process, plan.quick)

    def _time(self, process: int) -> None:
        # Ceilings belong before and after: a run that was killed in between measures them once more.
        while (jobs := self._jobs(process)) or self._unfinished(process):
            silence = max(TIMED_S, TIMED_LONGER * self.plan.timeout_s)
            self._hear_time(Crew(self.seating, jobs, self.plan.device, self._options(process), silence), process, jobs)

    def _unfinished(self, process: int) -> bool:
        last = next((c for c in reversed(self.state.calibrated) if c.process == process), None)
        return last is not None and last.when == "before"

    def _hear_time(self, crew: Crew, process: int, jobs: list[Job]) -> None:
        cases, done = len(self.plan.cases), len(self.plan.cases) - len(jobs)
        for message in crew.listen():
            if isinstance(message, Ceiled):
                self.write(j.Calibrated(process, message.when, message.ceilings))
            elif isinstance(message, Sampled):
                case, _ = jobs[message.index]
                second = case.twinned("second")
                found = [*self._below(second, message.second), *self._below(case, message.outputs)]
                within = {kernel: what for kernel, is_within, what in found if is_within}
                wrong = {kernel: what for kernel, is_within, what in found if not is_within}
                wrong |= {arm.removesuffix(NULL): what for arm, what in message.trespasses.items()}
                answers = {arm: self.answer(case, got, timed=True) for arm, got in message.outputs.items()}
                others = {arm: self.answer(second, got, timed=True) for arm, got in message.second.items()}
                assert message.memory is not None  # the first seat measures it with every case
                self.write(j.Timed(process, str(case.id), message.samples, wrong, answers, others, message.memory, within))
                self.progress("time", process * cases + done + message.index + 1, self.plan.processes * cases)
            elif isinstance(message, Looked):
                self.write(j.Attended(process, message.watched))
            elif isinstance(message, Died):
                if not jobs:
                    raise EnvironmentRefused(f"timing process {process} died at its ceilings ({message.how}): {message.log_tail}")
                self._charge(crew, process, jobs[message.index], message)
            elif isinstance(message, Done):
                self._loaded(f"time {process}", message)

    def _below(self, case: Case, outputs: dict[str, Got]) -> Iterator[tuple[str, bool, str]]:
        """Kernels whose output, snatched from a timed call, is worth less than when judged, whether it is within their budget,
        and what is said of it."""
        inputs, want = self.truth(case, timed=True)
        kernels = {k.id: k for k in self.plan.kernels_of(case.problem.stage)}
        for arm, got in outputs.items():
            kernel = arm.removesuffix(NULL)
            stage = STAGES[case.problem.stage].judging(kernels[kernel])
            found = graded(stage, case.problem, inputs, want, got)
            outcome = self.state.outcomes[str(case.id), kernel]
            when = f"after timing, {TWIN[case.twin]}" if case.twin else "in a timed call: "
            if isinstance(found, Mismatch):
                yield kernel, False, when + found.text(stage.label(case, found.output, found.row))
            elif isinstance(outcome, Exact) and found.grade == "WITHIN_ULP" != outcome.grade:
                # Other bytes may round otherwise. Another choice among equals is as right: which values tie is their own.
                yield kernel, True, when + found.detail

    def _charge(self, crew: Crew, process: int, job: Job, died: Died) -> None:
        case, arms = job
        number = crew.arm
        # One that died while another had its turn: whatever it was left behind in its process, its arms there are one file's.
        if 0 <= number < len(arms) and not died.timed_out and arms[number].seat != died.seat:
            number = next((i for i, arm in enumerate(arms) if arm.seat == died.seat), -1)
        if not 0 <= number < len(arms):
            raise EnvironmentRefused(f"timing process {process} died outside any kernel ({died.how}): {died.log_tail}")
        self.write(j.Dropped(process, str(case.id), arms[number].kernel.id, died.status, f"{died.how} while it was timed"))
        if died.status == "DEVICE_LOST" and not healthy(self.plan.device):
            raise EnvironmentRefused(f"{self.plan.device}: lost while {arms[number].kernel.id} was timed, and not back")
