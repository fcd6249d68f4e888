"""Say where in a line a record breaks its form, down to the list index that msgspec leaves out."""

import re
from typing import Any

import msgspec

from replay.errors import InputError

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$")


def explain(where: str, line: bytes, record: type[Any], error: Exception) -> InputError:
    """The InputError for a line that does not decode as ``record``."""
    if not line.strip():
        return InputError(where, "line", "a JSON object", "a blank line")
    if b"\x00" in line:
        return InputError(where, "line", "JSON text", f"a NUL byte at column {line.index(0) + 1}")
    text = str(error)
    if isinstance(error, RecursionError):
        return InputError(where, "line", "a JSON object of this form", "one nested too deeply")
    if isinstance(error, msgspec.ValidationError):
        return _validation(where, line, text)
    if "truncated" in text:
        return InputError(where, "line", "a whole JSON object", f"a truncated line of {len(line)} bytes")
    return InputError(where, "line", "a JSON object", text)


def _validation(where: str, line: bytes, text: str) -> InputError:
    match = _PATH.match(text)
    assert match is not None  # the pattern accepts any one-line text
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if missing := re.match(r"Object missing required field `(\w+)`", what):
        return InputError(where, missing[1], "a value", "no such field")
    typed = re.match(r"Expected `([^`]+)`, got `([^`]+)`", what)
    if not typed:
        return InputError(where, path or "line", "a record of this form", what)
    expected, got = typed[1], typed[2]
    if "[...]" in path:
        path, got = _locate(msgspec.json.decode(line), path, expected, got)
    return InputError(where, path or "line", expected, got)


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "array": (list,)}


def _locate(document: Any, path: str, expected: str, got: str) -> tuple[str, str]:
    """Replace each ``[...]`` by the first index whose element is not of the expected type."""
    field, *levels = path.split("[...]")
    options = [t for name in expected.split(" | ") for t in _TYPES.get(name, (type(None),))]

    def wrong(value: Any) -> bool:
        return not isinstance(value, tuple(options)) or (isinstance(value, bool) and bool not in options)

    def walk(value: Any, depth: int, at: str) -> str | None:
        if depth == len(levels):
            return at if wrong(value) else None
        if not isinstance(value, list):
            return None
        found = (walk(item, depth + 1, f"{at}[{i}]") for i, item in enumerate(value))
        return next((at for at in found if at), None)

    return walk(document.get(field), 0, field) or path, got
