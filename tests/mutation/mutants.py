"""One small change to one place of an oracle: a rounding, an index, a bound, an order of sums, an operation, a branch.

A mutant is named by its function and by what stood there before and after, so that a reviewed list survives edits
elsewhere in the file. It is applied by giving the function another code object, which whoever imported it sees.
"""

import ast
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

MODULES = ("replay.oracle.arith", "replay.oracle.quant", "replay.oracle.moe", "replay.stages.moe")
# In the stages' module only what turns tensors into an oracle's arguments is part of the truth, and the order it is held in.
STAGE_FUNCTIONS = (
    "_quantize", "_route", "_remap", "_gemm", "_gemm1", "_act_quant", "_gemm2", "_combine", "_layer_weights", "_middle", "_layer",
    "_shared_weights", "_shared", "_canonical_route",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """``module`` and ``function`` (``Class.method``, or a constant's name), the place's text before and after, and which of
    equal places it is."""

    module: str
    function: str
    before: str
    after: str
    number: int

    def __str__(self) -> str:
        more = f" #{self.number}" if self.number else ""
        return f"{self.module.removeprefix('replay.')}.{self.function}: {self.before} → {self.after}{more}"


def truncated_bf16(x: Any) -> Any:
    """f32 → bf16 bits by dropping the lower half: what ``rn_bf16`` must not be."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def contracted(a: Any, b: Any, c: Any) -> Any:
    """a·b + c with one rounding to f32, as a compiler contracts it."""
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(np.float32)


# ---------------------------------------------------------------- what is changed

_BINARY: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,), ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,), ast.FloorDiv: (ast.Mult,),
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
_CALLS = {
    "np.rint": ("np.trunc", "round_half_away"), "np.trunc": ("np.rint", "np.floor"), "round_half_away": ("np.rint", "np.trunc"),
    "rn_bf16": ("truncated_bf16",), "np.maximum": ("np.minimum",), "np.max": ("np.min",), "np.abs": ("np.positive",),
    "np.exp": ("np.expm1",), "np.cumsum": ("np.cumprod",), "silu": ("sigmoid",),
}  # fmt: skip
_DTYPES = {"np.float64": "np.float32", "np.float32": "np.float64"}


def _binary(node: ast.BinOp) -> Iterator[ast.expr]:
    for operator in _BINARY.get(type(node.op), ()):
        yield ast.BinOp(node.left, operator(), node.right)
    left = node.left
    if isinstance(left, ast.BinOp) and type(left.op) is type(node.op) and isinstance(node.op, ast.Mult | ast.Add):
        yield ast.BinOp(left.left, node.op, ast.BinOp(left.right, node.op, node.right))
    if isinstance(node.op, ast.Add):  # contraction: a·b + c rounded once
        for product, addend in ((node.left, node.right), (node.right, node.left)):
            if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
                factors = ast.Tuple([product.left, product.right, addend], ast.Load())
                yield ast.Call(ast.Name("contracted", ast.Load()), [ast.Starred(factors, ast.Load())], [])


def _compare(node: ast.Compare) -> Iterator[ast.expr]:
    for other in _COMPARE.get(type(node.ops[0]), ()):
        yield ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)


def _call(node: ast.Call) -> Iterator[ast.expr]:
    name = ast.unparse(node.func)
    for other in _CALLS.get(name, ()):
        yield ast.Call(ast.parse(other, mode="eval").body, node.args, node.keywords)
    if name == "np.clip":
        yield node.args[0]
        yield ast.Call(ast.parse("np.minimum", mode="eval").body, [node.args[0], node.args[2]], [])
        yield ast.Call(ast.parse("np.maximum", mode="eval").body, node.args[:2], [])
    if name == "np.where":
        yield node.args[1]
        yield node.args[2]
    if name == "np.copysign":
        yield node.args[0]
    if name == "range":
        yield ast.Call(ast.Name("reversed", ast.Load()), [node], [])
    if name == "np.argsort":
        yield ast.parse(f"np.argsort(-({ast.unparse(node.args[0])}), kind='stable')[::-1]", mode="eval").body
    if name == "bf16_to_f32" and ast.unparse(node.args[0]).startswith("rn_bf16("):
        yield node.args[0].args[0]  # type: ignore[attr-defined]  # the rounding left out
    if isinstance(node.func, ast.Attribute) and node.func.attr == "astype":
        yield node.func.value
    if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)


def _slice(node: ast.Slice) -> Iterator[ast.expr]:
    if node.lower is not None:
        yield ast.Slice(None, node.upper, node.step)
    if node.upper is not None:
        yield ast.Slice(node.lower, None, node.step)


def _index(node: ast.Subscript) -> Iterator[ast.expr]:
    """The neighbour of what an index names."""
    if isinstance(node.slice, ast.Name):
        before = ast.BinOp(node.slice, ast.Sub(), ast.Constant(1))
        yield ast.Subscript(node.value, before, node.ctx)
    if isinstance(node.slice, ast.Constant) and node.slice.value in _OTHER:
        yield ast.Subscript(node.value, ast.Constant(_OTHER[node.slice.value]), node.ctx)


def _constant(node: ast.Constant) -> Iterator[ast.expr]:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, int):
        yield ast.Constant(value + 1)
        yield ast.Constant(value - 1)
    else:
        yield ast.Constant(float(np.nextafter(np.float32(value), np.float32(np.inf))))
        yield ast.Constant(float(np.nextafter(np.float32(value), np.float32(-np.inf))))


def _attribute(node: ast.Attribute) -> Iterator[ast.expr]:
    if other := _DTYPES.get(ast.unparse(node)):
        yield ast.parse(other, mode="eval").body


def _tuple(node: ast.Tuple) -> Iterator[ast.expr]:
    if len(node.elts) > 2 and all(isinstance(e, ast.Constant) for e in node.elts):
        yield ast.Tuple(node.elts[::-1], ast.Load())


def _unary(node: ast.UnaryOp) -> Iterator[ast.expr]:
    if isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield node.operand


# A tensor that could be taken for another of its kind.
_OTHER = {
    "q_scale": "a_scale", "a_scale": "w13_scale", "h_scale": "w2_scale", "w13": "w2", "w2": "w13", "w13_scale": "w2_scale",
    "w2_scale": "w13_scale", "x": "routed", "routed": "x", "shared_w13": "w13", "shared_w2": "w2",
}  # fmt: skip


def _choice(node: ast.IfExp) -> Iterator[ast.expr]:
    yield node.body
    yield node.orelse


_CHANGES: dict[type[ast.expr], Callable[[Any], Iterator[ast.expr]]] = {
    ast.BinOp: _binary, ast.Compare: _compare, ast.Call: _call, ast.Constant: _constant, ast.Attribute: _attribute,
    ast.Tuple: _tuple, ast.UnaryOp: _unary, ast.IfExp: _choice, ast.Slice: _slice, ast.Subscript: _index,
}  # fmt: skip


# ---------------------------------------------------------------- where


def _functions(module: ModuleType) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))


def _places(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Expressions that compute: not annotations, docstrings, error texts, nor the names of modes."""
    skipped = {id(n) for raised in ast.walk(function) if isinstance(raised, ast.Raise) for n in ast.walk(raised)}
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.AnnAssign):
                skipped |= {id(n) for n in ast.walk(node.annotation)}
            if isinstance(node, ast.expr) and id(node) not in skipped:
                yield node


def _sites(function: ast.FunctionDef) -> Iterator[tuple[int, ast.expr, ast.expr]]:
    """(place, what stands there, what shall stand there)."""
    for index, node in enumerate(_places(function)):
        for other in _CHANGES.get(type(node), lambda _: iter(()))(node):
            yield index, node, other


def _shown(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 90 else text[:60] + " … " + text[-28:]


def mutants() -> Iterator[tuple[Mutant, Callable[[], None]]]:
    """Every mutant, and what puts it into force in this process."""
    for name in MODULES:
        module = importlib.import_module(name)
        for function, tree in _functions(module):
            if name != "replay.stages.moe" or function in STAGE_FUNCTIONS:
                yield from _numbered(name, function, tree)
        yield from _constants(module)


def _numbered(module: str, function: str, tree: ast.FunctionDef) -> Iterator[tuple[Mutant, Callable[[], None]]]:
    seen: dict[tuple[str, str], int] = {}
    for index, node, other in _sites(tree):
        key = _shown(node), _shown(other)
        number = seen.get(key, 0)
        seen[key] = number + 1
        yield Mutant(module, function, *key, number), _recode(module, function, tree, index, other)


def _recode(module: str, function: str, tree: ast.FunctionDef, index: int, other: ast.expr) -> Callable[[], None]:
    def apply() -> None:
        changed = copy.deepcopy(tree)
        changed.decorator_list = []
        place = list(_places(changed))[index]
        for parent in ast.walk(changed):
            for name, value in ast.iter_fields(parent):
                if value is place:
                    setattr(parent, name, copy.deepcopy(other))
                elif isinstance(value, list) and any(v is place for v in value):
                    setattr(parent, name, [copy.deepcopy(other) if v is place else v for v in value])
        holder = importlib.import_module(module)
        namespace = vars(holder)
        namespace |= {"truncated_bf16": truncated_bf16, "contracted": contracted}
        for needed in ("round_half_away", "sigmoid"):
            namespace.setdefault(needed, getattr(importlib.import_module("replay.oracle.arith"), needed))
        made: dict[str, Any] = {}
        code = compile(ast.fix_missing_locations(ast.Module([changed], [])), f"<mutant of {function}>", "exec")
        exec(code, namespace, made)
        found: Any = holder
        for part in function.split("."):
            found = getattr(found, part)
        assert isinstance(found, FunctionType)
        found.__code__ = made[changed.name].__code__

    return apply


def _constants(module: ModuleType) -> Iterator[tuple[Mutant, Callable[[], None]]]:
    """Numbers that a module's functions share."""
    for name, value in list(vars(module).items()):
        number = type(value) in (int, float) or isinstance(value, np.floating)
        if not number or not name.isupper() or module.__name__ == "replay.stages.moe":
            continue
        if f"\n{name} = " not in inspect.getsource(module):
            continue  # imported: its own module's turn
        if isinstance(value, int):
            others: tuple[Any, ...] = (value * 2, value - 1)
        else:
            kind = type(value)
            others = (np.nextafter(value, kind(np.inf)), np.nextafter(value, kind(0)))
        for other in others:
            yield Mutant(module.__name__, name, repr(value), repr(other), 0), _reassign(name, value, other)


def _reassign(name: str, value: Any, other: Any) -> Callable[[], None]:
    def apply() -> None:
        for module in map(importlib.import_module, MODULES):
            if getattr(module, name, None) is value:
                setattr(module, name, other)

    return apply
