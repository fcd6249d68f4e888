"""Faults as they happened in GDN kernels, planted one at a time in the eager kernel: each is red, and its row is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from replay.kernels import eager_common, eager_gdn
from replay.model import Exact, Inexact
from replay.stages.gdn_tensors import Drawn
from tests.conftest import judge_here
from tests.gdn import state_case, state_file

CONV, RECURRENT, L2NORM = eager_gdn.conv, eager_gdn.recurrent, eager_gdn.l2norm
SIGMOID = eager_gdn.sigmoid


def history_of_another_slot(x: Any, w: Any, bias: Any, state: Any, slots: Any, starts: Any, out: Any, order: str) -> None:
    """The conv reads the slot before its own, and writes its own."""
    CONV(x, w, bias, state.roll(1, 0), slots, starts, out, order)
    CONV(x, w, bias, state, slots, starts, out.clone(), order)


def activated_instead_of_raw(x: Any, w: Any, bias: Any, state: Any, slots: Any, starts: Any, out: Any, order: str) -> None:
    """The conv state takes what came out of the conv."""
    CONV(x, w, bias, state, slots, starts, out, order)
    state[slots.long(), -1] = out


def state_not_written(qkv: Any, a: Any, b: Any, t: Any, state: Any, out: Any, g: Any, modes: Any) -> None:
    """The last token's state stays where it was."""
    before = state[t["slots"][-1].long()].clone()
    RECURRENT(qkv, a, b, t, state, out, g, modes)
    state[t["slots"][-1].long()] = before


def neighbour_touched(qkv: Any, a: Any, b: Any, t: Any, state: Any, out: Any, g: Any, modes: Any) -> None:
    """One element behind a sequence's slot changes."""
    RECURRENT(qkv, a, b, t, state, out, g, modes)
    free = next(s for s in range(len(state)) if s not in t["slots"].tolist())
    state[free].view(-1)[0] += 1


def a_percent_less(qkv: Any, a: Any, b: Any, t: Any, state: Any, out: Any, g: Any, modes: Any) -> None:
    """Right states, outputs too small by one percent."""
    RECURRENT(qkv, a, b, t, state, out, g, modes)
    out.copy_((out.float() * 0.99).bfloat16())


def contracted(s: Any, d: Any, k: Any) -> Any:
    """S + d·k rounds once, as a compiler makes it that may contract."""
    wide = d[..., None].expand_as(s)
    return eager_common.fma(wide.contiguous(), k[:, :, None, :].expand_as(s).contiguous(), s)


FAULTS: dict[str, tuple[str, str, Callable[..., Any], str]] = {
    "conv history from the wrong slot": ("gdn.step", "conv", history_of_another_slot, "of ssm_state"),
    "raw x replaced by the activated one": ("gdn.conv", "conv", activated_instead_of_raw, "of conv_state"),
    "k-head by modulo": ("gdn.recurrent", "of_v_heads", lambda x, ratio: x.repeat(1, ratio, 1), "of ssm_state"),
    "beta in bf16": ("gdn.recurrent", "sigmoid", lambda x: SIGMOID(x).bfloat16().float(), "of ssm_state"),
    "state not written for the last token": ("gdn.recurrent", "recurrent", state_not_written, "sequence 4"),
    "neighbour slot touched": ("gdn.recurrent", "recurrent", neighbour_touched, "which is nobody's"),
    "eps outside the root": (
        "gdn.recurrent", "l2norm", lambda x, mode: L2NORM(x, "eps_out"), "matches mode l2norm=eps_out, asked l2norm=div_sqrt_eps_in",
    ),
    "contraction on": ("gdn.recurrent", "outer_sum", contracted, "of ssm_state"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_is_red_at_its_row(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAIL, or beyond the budget, with slot or token, sequence and captured row."""
    stage, function, wrong, told = FAULTS[fault]
    monkeypatch.setattr(eager_gdn, function, wrong)
    case = state_case(stage, state_file(tmp_path))
    outcome = judge_here(f"eager:{stage}", case)
    assert isinstance(outcome, Inexact), outcome
    assert outcome.status == "FAIL"
    assert told in outcome.detail, outcome.detail
    assert f"row {outcome.row} (" in outcome.detail
    assert "sequence" in outcome.detail or "nobody" in outcome.detail


def test_the_budget_is_for_other_orders_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own sums are red, WITHIN_ULP for a kernel that asks for the budget, and beta in bf16 is red in that as well."""
    monkeypatch.setattr(eager_gdn, "_over_k", lambda terms: terms.sum(-1))
    case = state_case("gdn.recurrent", state_file(tmp_path))
    assert isinstance(judge_here("eager:gdn.recurrent", case), Inexact)
    own = (msgspec.structs.replace(k, budgeted=True) for k in eager_gdn.KERNELS)
    monkeypatch.setattr(eager_gdn, "KERNELS", tuple(own))
    outcome = judge_here("eager:gdn.recurrent", case)
    assert isinstance(outcome, Exact), outcome
    assert outcome.grade == "WITHIN_ULP"
    assert "own_gates_and_order" in outcome.detail
    with monkeypatch.context() as patched:
        patched.setattr(eager_gdn, "sigmoid", lambda x: SIGMOID(x).bfloat16().float())
        assert isinstance(judge_here("eager:gdn.recurrent", case), Inexact)
    monkeypatch.setattr(eager_gdn, "recurrent", a_percent_less)
    assert isinstance(judge_here("eager:gdn.recurrent", case), Inexact)


@pytest.mark.parametrize(("steps", "fits"), [(0, True), (40, False)])
def test_the_budget_is_for_own_gates_and_no_more(steps: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own exp and softplus in f32 are within it; a g that is forty steps off is not."""
    own = tuple(msgspec.structs.replace(k, budgeted=True) for k in eager_gdn.KERNELS)
    monkeypatch.setattr(eager_gdn, "KERNELS", own)
    monkeypatch.setattr(eager_gdn, "exp_cr", lambda x: x.exp() * (1 + steps * 2.0**-23))
    monkeypatch.setattr(eager_gdn, "softplus", lambda x, mode: torch.nn.functional.softplus(x))
    outcome = judge_here("eager:gdn.recurrent", state_case("gdn.recurrent", state_file(tmp_path)))
    assert isinstance(outcome, Exact) == fits, outcome
    if isinstance(outcome, Exact):
        assert outcome.grade == "WITHIN_ULP"


def test_slots_are_another_order_than_rows(tmp_path: Path) -> None:
    """A kernel that takes the row's number for the slot cannot be right by chance."""
    assert Drawn(state_case("gdn.conv", state_file(tmp_path))).slots.tolist() != list(range(5))
