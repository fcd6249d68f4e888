"""What the engine's own thread does for a recording: copy what a layer saw, and hand a step over when it is done.

Each method is called by a hook (``replay.engine.hooks``) and costs a few microseconds; its own clock says how many. Nothing is
taken outside a step of the scheduler: warm-up, profiling and dummy runs never open one.
"""

import functools
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from replay.captures.recording import FORM, Head, Weights
from replay.engine.config import Record
from replay.engine.rows import Batch
from replay.engine.writer import Seen, Writer

ACTIVE: "Recorder | None" = None  # this process's, once its model runner is there

F = TypeVar("F", bound=Callable[..., Any])


def _on_the_engines_thread(method: F) -> F:
    """Its time is counted, a step's and a layer call's apart. A fault of ours ends the recording and says so; the request that
    met it never sees it."""
    of_steps = method.__name__ in ("begin", "whose", "end")

    @functools.wraps(method)
    def counted(self: "Recorder", *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(f"{method.__name__}: {type(error).__name__}: {error}")
            return None
        finally:
            if of_steps:
                self.step_ns += time.perf_counter_ns() - begin
            else:
                self.hook_ns += time.perf_counter_ns() - begin

    return counted  # type: ignore[return-value]  # the same parameters


class Recorder:
    """One rank's recording."""

    def __init__(self, record: Record, writer: Writer) -> None:
        self.record, self.writer = record, writer
        self.routes, self.weights, self.hidden = (name in record.what for name in ("routes", "weights", "hidden"))
        self.gdn, self.lm_head = record.wants("gdn"), record.wants("lm_head")
        self.after, self.outputs = "states_after" in record.what, "outputs" in record.what
        self.pattern = re.compile(record.layers)
        self.wanted = re.compile(record.requests) if record.requests else None
        self.runner: Any = None
        self.gave_up = False
        self.chosen: set[str] = set()  # layers that the pattern takes, and those that it does not
        self.left_out: set[str] = set()
        self.told: set[str] = set()  # GDN layers whose weights were handed over
        self.calls: list[Seen] | None = None  # of the open step, where it is recorded
        self.routed: list[tuple[str, Any, Any]] | None = None  # its routes: layer, ids, weights
        self.nbytes = 0  # of its other tensors
        self.batch: Batch | None = None
        self.padded = self.decodes = self.state_steps = 0
        self.states_now: bool | None = None
        self.steps = self.layer_calls = self.hook_ns = self.step_ns = 0

    def takes(self, layer: str) -> bool:
        """Whether a layer is recorded."""
        if layer not in self.chosen and layer not in self.left_out:
            (self.chosen if self.pattern.search(layer) else self.left_out).add(layer)
        return layer in self.chosen

    # ------------------------------------------------------------ steps

    @_on_the_engines_thread
    def begin(self, runner: Any = None) -> None:
        """A step of the scheduler that has tokens begins; one that was not ended is handed over first."""
        if self.calls is not None:
            self._hand_over()
        self.steps += 1
        if self.gave_up or self.writer.stopped or (self.steps - 1) % self.record.every:
            return
        self.calls, self.batch, self.states_now, self.padded, self.decodes, self.nbytes = [], None, None, 0, 0, 0
        self.routed = [] if self.routes else None
        self.runner = runner

    @_on_the_engines_thread
    def whose(self, runner: Any, scheduled: dict[str, int]) -> None:
        """Whose the rows of the open step are, in the order that the runner gave them."""
        if self.calls is None:
            return
        held = runner.input_batch
        names = tuple(held.req_ids)
        count = len(names)
        self.batch = Batch(
            names, tuple(scheduled[name] for name in names), tuple(held.num_computed_tokens_cpu[:count].tolist()),
            tuple(held.num_prompt_tokens[:count].tolist()), tuple(held.num_tokens_no_spec[:count].tolist()), 0,
        )  # fmt: skip

    @_on_the_engines_thread
    def end(self) -> None:
        """Hand over the open step."""
        self._hand_over()

    def _hand_over(self) -> None:
        calls, routed, self.calls, self.routed = self.calls, self.routed or (), None, None
        self.layer_calls += len(routed)
        offers = bool(calls or routed) and self.batch is not None
        self.writer.count(self.steps, self.writer.seq + offers, self.layer_calls, self.hook_ns, self.step_ns)
        if calls is None or self.batch is None or not offers:
            return
        nbytes, padded = self.nbytes, self.padded
        if routed:
            _, ids, weights = routed[0]
            padded = ids.shape[0]
            nbytes += len(routed) * (ids.nbytes + (0 if weights is None else weights.nbytes))
        self.writer.offer(self.steps - 1, self.batch._replace(padded=padded), routed, calls, nbytes)

    # ------------------------------------------------------------ what layers saw

    def route(self, layer: str, weights: Any, ids: Any) -> None:
        """ids [T, k] and weights [T, k] of a router's choice. Every layer of every step calls it: its time is counted here,
        without the wrapper of the others."""
        begin = time.perf_counter_ns()
        routed = self.routed
        if routed is not None and (layer in self.chosen or self.takes(layer)):
            try:
                routed.append((layer, ids.clone(), weights.clone() if self.weights else None))
                if not layer:
                    self.give_up("a router of no layer: it did not come through the hooked MoERunner")
            except Exception as error:
                self.give_up(f"route: {type(error).__name__}: {error}")
            self.hook_ns += time.perf_counter_ns() - begin

    def _add(self, seen: Seen) -> None:
        assert self.calls is not None  # as its callers have seen
        self.calls.append(seen)
        self.nbytes += sum(t.nbytes for t in seen.tensors.values())

    @_on_the_engines_thread
    def gate(self, layer: str, hidden: Any, logits: Any) -> None:
        """hidden [T, H] and router logits [T, E], as a router gets them."""
        if self.calls is not None and self.hidden and self.takes(layer):
            self._add(Seen("gate", layer, {"hidden": hidden.clone(), "logits": logits.clone()}))
            self.padded = hidden.shape[0]

    @_on_the_engines_thread
    def logits(self, logits: Any) -> None:
        """logits [requests, vocab], as the sampler gets them."""
        if self.calls is not None and self.lm_head and logits is not None:
            self._add(Seen("lm_head", "lm_head", {"logits": logits.clone()}))

    @_on_the_engines_thread
    def gdn_begins(self, layer: Any, metadata: Any, **inputs: Any) -> dict[str, Any] | None:
        """The decode rows that a GDN layer is about to take: ``inputs`` [T, …], and the states in their slots, where it is a step
        of states. What is returned goes to ``gdn_ends``."""
        if self.calls is None or not self.gdn or not self.takes(layer.prefix) or not metadata.num_decodes:
            return None
        decodes, slots = metadata.num_decodes, metadata.non_spec_state_indices_tensor
        if self.wanted is not None and not any(map(self.wanted.search, self.runner.input_batch.req_ids[:decodes])):
            return None
        most = self.record.max_gdn_steps
        if self.states_now is None:
            if most and self.state_steps >= most:
                return None
            self.states_now = self.state_steps % self.record.states_every == 0
            self.state_steps += 1
        self.decodes = decodes
        held = {"slot": slots[:decodes].clone(), **{name: x[:decodes].clone() for name, x in inputs.items()}}
        if self.states_now:
            at = slots[:decodes].long()
            held |= {"conv_state": layer.kv_cache[0][at], "ssm_state": layer.kv_cache[1][at]}
        return held

    @_on_the_engines_thread
    def gdn_ends(self, layer: Any, held: dict[str, Any] | None, out: Any) -> None:
        """The same rows when the layer has done its work; ``out`` [T, Hv, V]."""
        if held is None or self.calls is None:
            return
        if self.outputs:
            held["core_attn_out"] = out[: self.decodes].clone()
        if self.states_now and self.after:
            at = held["slot"].long()
            held |= {"conv_state_after": layer.kv_cache[0][at], "ssm_state_after": layer.kv_cache[1][at]}
        self._add(Seen("gdn", layer.prefix, held))
        self.layer_calls += 1

    @_on_the_engines_thread
    def gdn_z(self, layer: str, z: Any) -> None:
        """z [T, Hv, V] of the decode rows of a GDN layer."""
        if self.calls is not None and self.decodes and self.takes(layer):
            self._add(Seen("gdn_z", layer, {"z": z[: self.decodes].clone()}))

    @_on_the_engines_thread
    def gdn_weights(self, layer: Any, tensors_of: Callable[[Any], Any], modes_of: Callable[[Any], dict[str, str]]) -> None:
        """What a GDN layer holds from step to step, once."""
        if layer.prefix in self.told:
            return
        tensors, modes = tensors_of(layer), modes_of(layer)
        self.told.add(layer.prefix)
        tables = {
            name: {"shape": list(t.shape), "stride": list(t.stride()), "storage_offset": t.storage_offset()}
            for name, t in zip(("conv_state", "ssm_state"), layer.kv_cache, strict=False)
        }
        held = {name: t.detach().clone() for name, t in tensors.items() if t is not None}
        self.writer.weights(Weights(layer=layer.prefix, parts=(), tables=tables, modes=modes), held)

    def give_up(self, why: str) -> None:
        """Nothing more is taken; the writer writes what waits, and why."""
        self.calls, self.routed, self.gave_up = None, None, True
        self.writer.fail(why)

    def close(self) -> None:
        """The engine ends: what waits is written, and an end."""
        self._hand_over()
        self.writer.close()


def attach(record: Record, head: dict[str, Any]) -> Recorder:
    """Begin a rank's recording; InputError where its folder is not to be had."""
    import msgspec

    global ACTIVE
    writer = Writer(record, Head(form=FORM, record=msgspec.to_builtins(record), **head))
    ACTIVE = Recorder(record, writer)
    return ACTIVE
