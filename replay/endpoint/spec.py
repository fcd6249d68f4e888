"""An endpoint as data: the model, the server's arguments and its environment, read from a TOML file."""

import re
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from replay.errors import InputError

FORM = "b70-endpoint/1"
OWN_ARGUMENTS = ("--model", "--served-model-name", "--host", "--port")
# Compiled code that the launcher keeps apart for each candidate, by variable.
CACHES = {
    "B70_CACHE": "b70-replay",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "SYCL_CACHE_DIR": "sycl",
    "NEO_CACHE_DIR": "neo",
}
# Variables that decide which program or library runs, or that are the launcher's own: no endpoint file may set them.
_FORBIDDEN = re.compile(
    r"PATH|CDPATH|IFS|ENV|HOME|SHELL.*|BASH.*|PS\d|PROMPT_COMMAND|E?UID|PPID|_|LD_.*|GLIBC_.*|PYTHON.*|VLLM_PLUGINS|OCL_ICD_.*|ZE_ENABLE_ALT_DRIVERS|"
    r"B70_.*|here|python|command|server|tenths|" + "|".join(CACHES)
)


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One thing a model must answer, by its text: ``repeats`` times the same. Where ``length`` is given, ``{fill}`` in the prompt
    becomes so much text that the whole prompt has that many bytes."""

    name: str
    prompt: str
    expect: str
    max_tokens: int = 32
    repeats: int = 1
    length: int = 0


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model is served.

    ``device``: the kind whose measurements count for it. ``geometry``: that of one rank, as case ids print it, where the
    kernel must have been measured on it; "" where any will do. ``args`` go to the server as they are. ``calls_per_token``:
    calls of a layer's stage for one output token of a sequence. ``template``: what ``{prompt}`` of a canary or of an item of the
    quality suite is put into. ``packages``: versions that the endpoint's Python must
    have besides those measured with. ``min_free_gib``: memory that must be free on each device before a start.
    """

    form: Literal["b70-endpoint/1"]
    name: str
    device: Literal["cpu", "xpu", "cuda"]
    model: str
    served_name: str
    args: list[str]
    env: dict[str, str]
    python: str = "python3"
    geometry: str = ""
    devices: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    calls_per_token: float = 1.0
    min_free_gib: float = 0.0
    stop_timeout_s: int = 30
    packages: dict[str, str] = {}
    template: str = "{prompt}"
    canary: list[Item] = []
    quality: list[Item] = []


_FILL = "The tide came in and the boats swung on their chains. "


def prompt_of(endpoint: Endpoint, item: Item) -> str:
    """What a server is asked."""
    text = endpoint.template.replace("{prompt}", item.prompt)
    missing = item.length - len(text.replace("{fill}", "").encode())
    return text.replace("{fill}", (_FILL * (max(missing, 0) // len(_FILL) + 1))[: max(missing, 0)])


def read(path: Path) -> tuple[Endpoint, bytes]:
    """(the endpoint, the file's bytes). InputError for a file that does not describe one."""
    try:
        data = path.read_bytes()
        endpoint = msgspec.convert(tomllib.loads(data.decode()), Endpoint)
    except OSError as error:
        raise InputError(str(path), "--endpoint", "a readable TOML file", (error.strerror or str(error)).lower()) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), "--endpoint", "TOML", str(error)) from None
    except msgspec.ValidationError as error:
        raise InputError(str(path), "--endpoint", f"the fields of {FORM}", str(error)) from None
    _check(endpoint, str(path))
    return endpoint, data


def _check(endpoint: Endpoint, where: str) -> None:
    """Names that can be names, numbers in range, and no byte that no argument can hold."""
    for name in endpoint.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(where, f"env.{name!r}", "a variable's name", repr(name))
        if _FORBIDDEN.fullmatch(name):
            raise InputError(where, f"env.{name}", "a variable that is not the shell's, the loader's or the launcher's", name)
    texts = [endpoint.name, endpoint.model, endpoint.served_name, endpoint.python, endpoint.host, *endpoint.args]
    for text in endpoint.args:
        if text.partition("=")[0] in OWN_ARGUMENTS:
            raise InputError(where, "args", "none that the launcher sets itself", text)
    for package in endpoint.packages:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", package):
            raise InputError(where, "packages", "a distribution's name", repr(package))
    for text in (*texts, *endpoint.env.values()):
        if "\0" in text:
            raise InputError(where, "value", "text without a zero byte", repr(text))
    for item in (*endpoint.canary, *endpoint.quality):
        if not item.prompt or not item.expect or item.repeats < 1 or item.max_tokens < 1:
            raise InputError(where, f"item {item.name!r}", "a prompt, what is expected, and numbers of 1 or more", repr(item))
    for field in ("name", "model", "served_name", "python", "host"):
        value = getattr(endpoint, field)
        if not value or value.startswith("-"):
            raise InputError(where, field, "a name or path", repr(value))
    for field, low, high in (
        ("port", 1, 65535), ("devices", 1, 64), ("calls_per_token", 1e-3, 1000), ("min_free_gib", 0, 10_000),
        ("stop_timeout_s", 1, 3600),
    ):  # fmt: skip
        number = getattr(endpoint, field)
        if not low <= number <= high:
            raise InputError(where, field, f"{low} to {high}", str(number))
