"""The selectors of rows, whatever a capture holds."""

import re
from dataclasses import dataclass

from replay.errors import InputError

DEFAULT_STARTS = 16
_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.(?:mlp(?:\.experts)?|linear_attn)$")


@dataclass(frozen=True, kw_only=True)
class Select:
    """The route selectors, under the names engineers type (``--route-…``)."""

    layer_regex: str | None = None
    stage_regex: str | None = None
    start_indices: str | None = None
    windows: tuple[int, ...] = (1,)
    min_num_tokens: int | None = None
    max_num_tokens: int | None = None
    max_cases: int | None = None


def layer_label(name: str) -> str:
    """``L9`` for the layer name of a main model; any other name as it is, so that a draft model's layer 0 stays apart."""
    match = _LAYER.match(name)
    return f"L{match[1]}" if match else name.replace("/", "_")


def parse_starts(text: str, rows: int, window: int) -> list[int]:
    """``0,5,8:64:4`` as indices; the stop is exclusive. ValueError names the part that is no index or range."""
    if text == "default":
        last = max(rows - window, 0)
        return sorted({round(i * last / (DEFAULT_STARTS - 1)) for i in range(DEFAULT_STARTS)})
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?::(\d+)(?::(\d+))?)?\s*", part)
        if not match or match[3] == "0":
            raise ValueError(f"an index or start:stop[:step], got {part!r}")
        start, stop, step = match[1], match[2], match[3]
        part_range = range(int(start), int(start) + 1) if stop is None else range(int(start), int(stop), int(step or 1))
        # One index past the end is enough to be told; a range of billions is not worth making.
        found += part_range[: rows + 1] if part_range and part_range[-1] >= rows else part_range
    if not found:
        raise ValueError(f"at least one index, got the empty range {text!r}")
    return list(dict.fromkeys(found))


def chosen_starts(select: Select, rows: int, window: int) -> list[int]:
    """The start indices that were asked for, or the default ones; InputError for a text that is none."""
    try:
        return parse_starts("default" if select.start_indices is None else select.start_indices, rows, window)
    except ValueError as error:
        expected, _, got = str(error).partition(", got ")
        raise InputError("--route-start-indices", "value", expected, got) from None


def compiled(option: str, pattern: str | None) -> re.Pattern[str]:
    """An option's regular expression; InputError where it is none."""
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise InputError(option, "pattern", "a regular expression", f"{pattern!r} ({error})") from None
