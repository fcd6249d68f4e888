"""Write a promotion's folder: launcher and control, identity, engine file, endpoint file and README. Pure but for the last step.

Values come from a TOML file that anybody may have written: each is quoted for the shell, none stands in a comment.
"""

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from replay.endpoint.predict import Prediction
from replay.endpoint.spec import CACHES, Endpoint
from replay.errors import InputError
from replay.identity import WATCHED
from replay.model import Interval, Value
from replay.results.build import Group


class SwapKernel(Value, frozen=True, omit_defaults=True):
    """A kernel that the engine plugin puts in the place of a stage's op; ``sha256`` of the file or package it is from."""

    stage: str
    kernel: str
    sha256: str
    load: str = ""


class Swap(Value, frozen=True):
    """What the engine plugin does with the kernels."""

    mode: Literal["off", "shadow", "serve"]
    kernel: tuple[SwapKernel, ...]


class Engine(Value, frozen=True):
    """engine.toml, as the plugin reads it through B70_ENGINE."""

    swap: Swap


class Promotion(Value, frozen=True, kw_only=True):
    """identity.json: what was promoted, on what evidence, and what the launcher must find again.

    ``source``: the key in the identity's sources that the kernel is made of. ``files``: path → sha256 of all that was
    loaded when it was measured; ``binaries`` are those of them that were compiled into the cache, which the launcher's
    own caches begin with, so that what serves is what was measured. ``environment``: the watched variables
    that the server must have; ``overridden``: those in which the endpoint differs from the measurement. ``cautions``: what a
    reader should weigh before he relies on the numbers.
    """

    form: Literal["b70-promotion/1"]
    stage: str
    kernel: str
    load: str
    source: str
    claim: Literal["faster", "parity"]
    device: str
    margin: float
    cache: str
    processes: int
    claims: tuple[Group, ...]
    prediction: Prediction | None
    journal_sha256: str
    endpoint: str
    endpoint_sha256: str
    devices: int
    port: int
    min_free_gib: float
    packages: dict[str, str]
    environment: dict[str, str]
    overridden: tuple[str, ...]
    unknown: tuple[str, ...]
    cautions: tuple[str, ...]
    files: dict[str, str]
    binaries: tuple[str, ...]
    identity: dict[str, Any]


def environment(identity: dict[str, Any], endpoint: Endpoint) -> tuple[dict[str, str], tuple[str, ...]]:
    """(variables of the server, names in which the endpoint overrides what the kernel was measured with)."""
    measured = {name: value for name, value in identity["environment"].items() if name not in CACHES}
    overridden = tuple(name for name, value in measured.items() if endpoint.env.get(name, value) != value)
    return {**measured, **endpoint.env}, overridden


def encoded(promotion: Promotion) -> bytes:
    """identity.json."""
    return msgspec.json.format(msgspec.json.encode(promotion), indent=1) + b"\n"


def render(promotion: Promotion, identity: bytes, endpoint: Endpoint, endpoint_toml: bytes) -> dict[str, bytes]:
    """The files of a promotion by name; ``identity`` are the bytes of its identity.json."""
    import tomli_w

    engine = tomli_w.dumps(msgspec.to_builtins(engine_of(promotion))).encode()
    files = {"identity.json": identity, "engine.toml": engine, "endpoint.toml": endpoint_toml}
    variables, _ = environment(promotion.identity, endpoint)
    shown = "|".join(sorted({*WATCHED, "B70_", *(f"{name}=" for name in {*variables, *CACHES})}))
    for role in ("launch", "control"):
        files[f"{role}.sh"] = _template("serve.sh.j2").render(
            role=role, endpoint=endpoint, environment=variables, caches=CACHES, shown=shown,
            identity_sha256=hashlib.sha256(identity).hexdigest(),
        ).encode()  # fmt: skip
    files["README.md"] = _readme(promotion).encode()
    return files


def engine_of(promotion: Promotion) -> Engine:
    """The engine file: the kernel serves. A gate that wants it in shadow first writes its own."""
    sources = promotion.identity["sources"]
    sha256 = sources[promotion.source]
    if promotion.source == "replay":  # ours are Python and SYCL
        sha256 = hashlib.sha256(f"{sources['replay']} {sources['sycl']}".encode()).hexdigest()
    return Engine(Swap("serve", (SwapKernel(promotion.stage, promotion.kernel, sha256, promotion.load),)))


def placed_at(folder: Path, binary: str) -> Path:
    """Where a compiled binary of the run lies in a promotion's folder: in the launcher's own cache."""
    return folder / "cache" / "launch" / CACHES["B70_CACHE"] / Path(binary).name


def write(folder: Path, files: dict[str, bytes], binaries: Sequence[str] = ()) -> None:
    """Write them into a new or empty folder, with the binaries in the launcher's own cache; InputError otherwise."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(str(folder), "-o", "an empty or new folder", "one with files in it")
        for name, data in files.items():
            (folder / name).write_bytes(data)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
        for binary in binaries:
            placed = placed_at(folder, binary)
            placed.parent.mkdir(parents=True, exist_ok=True)
            placed.write_bytes(Path(binary).read_bytes())
    except OSError as error:
        raise InputError(str(folder), "-o", "a folder that can be written", (error.strerror or str(error)).lower()) from None


def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("replay.endpoint"), undefined=StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True, lstrip_blocks=True, autoescape=False,  # noqa: S701  # shell and Markdown, no HTML
    )  # fmt: skip
    templates.filters["sh"] = shlex.quote
    return templates.get_template(name)


def _readme(promotion: Promotion) -> str:
    compared = promotion.claims[0].comparison
    gain = promotion.prediction.ms_per_token if promotion.prediction else None
    text: str = _template("README.md.j2").render(
        p=promotion,
        name=_plain(promotion.endpoint),
        baseline=compared.baseline if compared else "none",
        table=[_line(group) for group in promotion.claims],
        gain=f"{gain.mid:.3f} [{gain.lo:.3f}, {gain.hi:.3f}]" if gain else "",
    )
    return text


def _line(group: Group) -> list[str]:
    def shares(i: Interval | None) -> str:
        return f"{i.mid:+.1%} [{i.lo:+.1%}, {i.hi:+.1%}]" if i else "–"

    us, compared = group.us, group.comparison
    return [
        group.stage, group.modes or "–", str(group.tokens), str(group.cases), group.exact,
        f"{us.mid:.1f} [{us.lo:.1f}, {us.hi:.1f}]" if us else "–",
        f"{group.times_floor:.2f}" if group.times_floor else "–",
        shares(compared.effect.ratio if compared else None), shares(compared.null.ratio if compared and compared.null else None),
    ]  # fmt: skip


def _plain(text: str) -> str:
    """Text for a Markdown line: whatever is no letter, digit or plain sign becomes a space."""
    return "".join(c if c.isalnum() or c in "-_.:+" else " " for c in text)
