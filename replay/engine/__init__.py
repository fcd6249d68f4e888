"""The part that runs inside vLLM: a general plugin, inert unless ``B70_ENGINE`` names an engine file.

``register`` is called in the API server, the engine core and every worker, more than once; it reads the file, puts the hooks in
place and is done. What is wrong with a recording never stops a server; a file that cannot be read does, since it may ask for a
kernel that would then not serve.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay.engine.config import Record

_DONE = False


def register() -> None:
    """vLLM's entry point (``vllm.general_plugins``)."""
    global _DONE
    file = os.environ.get("B70_ENGINE")
    if _DONE or not file:
        return
    _DONE = True
    from replay.engine import config
    from replay.errors import InputError

    engine = config.read(Path(file))
    if engine.swap is not None and engine.swap.get("mode") != "off":
        raise InputError(file, "swap", "none: this version records and does not swap", str(engine.swap.get("mode")))
    if engine.record is not None:
        _record(engine.record, file)


def _record(record: "Record", file: str) -> None:
    import vllm

    from replay.engine import config, hooks
    from replay.engine.attach import refuse
    from replay.errors import InputError

    try:
        config.check(record, file)
        config.check_folder(record, file)
        _own_compiled_code(record)
        hooks.install(record, vllm.__version__)
    except Exception as error:  # a module of vLLM that does not import is no reason not to serve
        refuse(record, str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")


def _own_compiled_code(record: "Record") -> None:
    """A graph that was compiled without the taps, and kept, would record nothing: recordings have a cache of their own."""
    import hashlib

    from replay import __version__

    taps = record.wants("router"), record.wants("gdn"), "hidden" in record.what
    key = f"b70-record-{hashlib.sha256(repr((__version__, taps)).encode()).hexdigest()[:12]}"
    root = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    if root.name != key:
        os.environ["VLLM_CACHE_ROOT"] = str(root / key)
