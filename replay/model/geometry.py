"""Sizes of one rank of a model, and the models that have a name."""

import re

import msgspec

from replay.model.value import Value


class Geometry(Value, frozen=True, kw_only=True):
    """Sizes of one tensor-parallel rank of a model; counts, never bytes."""

    preset: str
    tp: int
    hidden: int
    experts: int
    top_k: int
    inter: int
    k_heads: int
    v_heads: int
    head_dim: int
    conv_width: int
    vocab: int
    layers: int

    @property
    def conv_dim(self) -> int:
        """Channels of a GDN layer's q, k and v together."""
        return (2 * self.k_heads + self.v_heads) * self.head_dim

    def __str__(self) -> str:
        """``qwen36:tp4``, and behind a second colon whatever differs from that preset."""
        base = _PRESETS[self.preset](self.tp)
        changed = [f"{f}={getattr(self, f)}" for f in _SIZES if getattr(self, f) != getattr(base, f)]
        return f"{self.preset}:tp{self.tp}" + (":" + ",".join(changed) if changed else "")

    @classmethod
    def parse(cls, text: str) -> "Geometry":
        """Read back what ``str`` printed; ValueError names the part that is wrong."""
        match = re.fullmatch(r"([\w.-]+):tp(\d+)(?::([\w=,]+))?", text)
        if not match or match[1] not in _PRESETS:
            raise ValueError(f"geometry {text!r}: expected PRESET:tpN with PRESET one of {', '.join(_PRESETS)}")
        base = preset(match[1], int(match[2]))
        changes = dict(part.partition("=")[::2] for part in match[3].split(",")) if match[3] else {}
        if unknown := set(changes) - set(_SIZES):
            raise ValueError(f"geometry {text!r}: expected one of {', '.join(_SIZES)}, got {sorted(unknown)[0]!r}")
        if bad := [f"{n}={v}" for n, v in changes.items() if not v.isdigit()]:
            raise ValueError(f"geometry {text!r}: expected a whole number, got {bad[0]!r}")
        return msgspec.structs.replace(base, **{name: int(value) for name, value in changes.items()}).checked()

    def checked(self) -> "Geometry":
        """This geometry, its preset known and its sizes possible; ValueError otherwise."""
        preset(self.preset, self.tp)
        for size in _SIZES:
            if getattr(self, size) < 1:
                raise ValueError(f"{size}: expected 1 or more, got {getattr(self, size)}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most experts {self.experts}, got {self.top_k}")
        return self


_SIZES = ("hidden", "experts", "top_k", "inter", "k_heads", "v_heads", "head_dim", "conv_width", "vocab", "layers")


def _qwen36(tp: int) -> Geometry:
    """Qwen3.6-35B-A3B (model_type qwen3_5_moe)."""
    return Geometry(
        preset="qwen36", tp=tp, hidden=2048, experts=256, top_k=8, inter=512 // tp, k_heads=16 // tp,
        v_heads=32 // tp, head_dim=128, conv_width=4, vocab=248_320 // tp, layers=40,
    )  # fmt: skip


def _qwen3_next(tp: int) -> Geometry:
    """Qwen3-Next-80B-A3B."""
    return Geometry(
        preset="qwen3-next", tp=tp, hidden=2048, experts=512, top_k=10, inter=512 // tp, k_heads=16 // tp,
        v_heads=32 // tp, head_dim=128, conv_width=4, vocab=151_936 // tp, layers=48,
    )  # fmt: skip


def _qwen3_30b(tp: int) -> Geometry:
    """Qwen3-30B-A3B: no GDN layers, so its head counts are those of its attention and drive no stage."""
    return Geometry(
        preset="qwen3-30b", tp=tp, hidden=2048, experts=128, top_k=8, inter=768 // tp, k_heads=4 // tp,
        v_heads=32 // tp, head_dim=128, conv_width=4, vocab=151_936 // tp, layers=48,
    )  # fmt: skip


def _tiny_moe_16(tp: int) -> Geometry:
    """A few million weights of Qwen3-Next's architecture, 16 experts: ``make tiny-endpoint``."""
    return Geometry(
        preset="tiny-moe-16", tp=tp, hidden=256, experts=16, top_k=4, inter=64 // tp, k_heads=2 // tp, v_heads=4 // tp,
        head_dim=64, conv_width=4, vocab=512 // tp, layers=4,
    )  # fmt: skip


def _tiny_moe_256(tp: int) -> Geometry:
    """The same with 256 experts, eight of them a token, and GDN heads of 128."""
    return Geometry(
        preset="tiny-moe-256", tp=tp, hidden=256, experts=256, top_k=8, inter=64 // tp, k_heads=2 // tp, v_heads=4 // tp,
        head_dim=128, conv_width=4, vocab=512 // tp, layers=4,
    )  # fmt: skip


_PRESETS = {
    "qwen36": _qwen36, "qwen3-next": _qwen3_next, "qwen3-30b": _qwen3_30b, "tiny-moe-16": _tiny_moe_16,
    "tiny-moe-256": _tiny_moe_256,
}  # fmt: skip
PRESETS = tuple(_PRESETS)


def preset(name: str, tp: int) -> Geometry:
    """The geometry of one rank of a known model; ValueError where ``tp`` does not divide its sizes."""
    if name not in _PRESETS:
        raise ValueError(f"preset {name!r}: expected one of {', '.join(PRESETS)}")
    if tp < 1:
        raise ValueError(f"tp: expected a positive number, got {tp}")
    whole, part = _PRESETS[name](1), _PRESETS[name](tp)
    for size in ("inter", "k_heads", "v_heads", "vocab"):
        if getattr(part, size) * tp != getattr(whole, size):
            raise ValueError(f"tp: expected a divisor of {name}'s {size} {getattr(whole, size)}, got {tp}")
    return part


def nearest(tp: int, **sizes: int) -> Geometry:
    """Sizes under the name of the preset that shares the most of them; ValueError where no preset can be cut in ``tp``."""
    best: Geometry | None = None
    for name in PRESETS:
        try:
            base = preset(name, tp)
        except ValueError:
            continue
        if best is None or _shared(base, sizes) > _shared(best, sizes):
            best = base
    if best is None:
        raise ValueError(f"tp: expected one that divides the sizes of one of {', '.join(PRESETS)}, got {tp}")
    return msgspec.structs.replace(best, **sizes).checked()


def _shared(base: Geometry, sizes: dict[str, int]) -> int:
    return sum(getattr(base, name) == value for name, value in sizes.items())
