"""``engine.toml``: what the plugin does inside vLLM. ``B70_ENGINE`` names the file; without it the plugin does nothing."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from replay.errors import InputError

VARIABLE = "B70_ENGINE"
# Sections that this version acts on. A [swap] that nobody does would serve the native op in silence: it is refused.
SECTIONS = ("record",)

What = Literal["routes", "weights", "hidden", "gdn", "states", "states_after", "outputs", "logits"]
STAGES = ("router", "gdn", "lm_head")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is recorded, and until when; a commented example is ``bench/endpoints/engine.example.toml``.

    ``layers``, ``stages`` and ``requests`` are regular expressions that must be found in a layer's name, in one of ``STAGES``, in
    a request's id; "" takes all. ``every``: each so many-th step. ``ranks``: empty for all. ``states_every``: before (and after)
    each so many-th step of those recorded; ``max_gdn_steps`` ends GDN alone. A limit of 0 is none: ``max_tokens`` rows,
    ``max_lines`` route records, ``max_bytes`` of a rank's journal. ``buffer_mib``: what may wait for the writer; more is dropped,
    and counted.
    """

    folder: str = ""
    layers: str = ""
    stages: str = ""
    phases: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    requests: str = ""
    every: int = 1
    ranks: tuple[int, ...] = ()
    what: tuple[What, ...] = ("routes", "weights")
    states_every: int = 8
    max_gdn_steps: int = 0
    max_tokens: int = 0
    max_lines: int = 0
    max_bytes: int = 0
    buffer_mib: int = 256

    def wants(self, stage: str) -> bool:
        """Whether a stage is recorded at all."""
        needs = {"router": ("routes", "hidden"), "gdn": ("gdn",), "lm_head": ("logits",)}
        return re.search(self.stages, stage) is not None and any(w in self.what for w in needs[stage])


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    record: Record | None = None
    swap: dict[str, Any] | None = None


def read(path: Path) -> Engine:
    """The file; InputError for one that cannot be read. What a recording asks for is looked at by ``check``."""
    try:
        engine = msgspec.convert(tomllib.loads(path.read_text()), Engine)
    except OSError as error:
        raise InputError(str(path), VARIABLE, "a readable TOML file", (error.strerror or str(error)).lower()) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), VARIABLE, "TOML", str(error)) from None
    except msgspec.ValidationError as error:
        raise InputError(str(path), VARIABLE, "the sections [record] and [swap]", str(error)) from None
    return engine


def check_folder(record: Record, where: str) -> None:
    """InputError where no folder is named; `capture record` brings its own."""
    if not record.folder:
        raise InputError(where, "record.folder", "a folder", "none")


def check(record: Record, where: str) -> None:
    """InputError for a value that is out of range, or a pattern that is none."""
    for name in ("layers", "stages", "requests"):
        try:
            re.compile(getattr(record, name))
        except re.error as error:
            raise InputError(where, f"record.{name}", "a regular expression", f"{getattr(record, name)!r} ({error})") from None
    for name, least in (
        ("every", 1),
        ("states_every", 1),
        ("buffer_mib", 1),
        ("max_tokens", 0),
        ("max_lines", 0),
        ("max_bytes", 0),
        ("max_gdn_steps", 0),
    ):
        if getattr(record, name) < least:
            raise InputError(where, f"record.{name}", f"{least} or more", str(getattr(record, name)))
    if not any(record.wants(stage) for stage in STAGES):
        raise InputError(where, "record.what, record.stages", f"something of {', '.join(STAGES)}", "nothing")
    if not record.phases:
        raise InputError(where, "record.phases", "prefill, decode or both", "none")
    of_gdn = {"gdn", "states", "states_after", "outputs"} & set(record.what)
    if of_gdn and not of_gdn >= {"gdn", "states"}:
        raise InputError(where, "record.what", "gdn and states, if anything of theirs", ", ".join(record.what))
    if of_gdn and "decode" not in record.phases:
        raise InputError(where, "record.phases", "decode, since GDN is recorded there", ", ".join(record.phases))
