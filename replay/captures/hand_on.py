"""Captures for others: routes in the lab's form, and a copy of a capture that says nothing of whose requests they were."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.captures.manifest import MANIFEST, Capture, FileEntry, Manifest, file_sha256, open_capture, read_manifest
from replay.captures.records import LabRecord, RecordedV1
from replay.captures.routes import read_batches
from replay.captures.tensors import FORMS, TensorFile, holds_of, open_tensors, save_tensors
from replay.errors import InputError

# What a record says of a request, a time or a process.
_OF_NOBODY = ("ts", "pid", "call")


def export(capture: Capture, target: Path) -> int:
    """Write a capture's routes in the lab's form; how many records. Padding rows have no experts there: −1."""
    count = 0
    with written(_new(target)) as partial, partial.open("wb") as out:
        for batch in read_batches(capture.routes):
            for i, line in enumerate(batch.lines):
                record = msgspec.json.decode(line)
                out.write(msgspec.json.encode(_as_lab(record, set(batch.real_tokens(i)), count)) + b"\n")
                count += 1
    return count


def _as_lab(record: Mapping[str, Any], real: set[int], call: int) -> dict[str, Any]:
    tokens, k, experts = record["num_tokens"], record["top_k"], record["num_experts"]
    ids = record.get("topk_ids")
    if ids is not None:
        ids = [row if t in real else [-1] * k for t, row in enumerate(ids)]
        counts = np.bincount([e for row in ids for e in row if e >= 0], minlength=experts).tolist()
    else:
        counts = record["counts"]
    rank = record.get("rank")
    return {
        "ts": record.get("ts"), "pid": record.get("pid"), "rank": rank, "local_rank": record.get("local_rank", rank),
        "layer": record["layer"], "stage": record["stage"], "call": record.get("call", call), "shape": [tokens, k],
        "num_tokens": tokens, "top_k": k, "num_experts": experts, "assignments": sum(counts),
        "nonzero_experts": sum(c > 0 for c in counts), "max_rows_per_expert": max(counts), "counts": counts,
        **({} if ids is None else {"topk_ids": ids}),
    }  # fmt: skip


def anonymise(path: Path, target: Path) -> int:
    """Write a copy of a capture, a file or a folder, with requests named r0, r1, … in the order they came, and without times,
    processes and fields that this version does not know; how many requests it had."""
    names: dict[str, str] = {}
    if path.is_file():
        with written(_new(target)) as partial:
            _copy(open_capture(path).files[0], partial, names)
        return len(names)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(str(target), "-o", "a new or empty folder", "one with files in it")
    with written(target) as partial:
        _copy_folder(path, partial, names)
    return len(names)


def _copy_folder(path: Path, target: Path, names: dict[str, str]) -> None:
    manifest = read_manifest(path / MANIFEST)
    entries = []
    for entry in manifest.files:
        held = open_capture(path / entry.path).files[0]
        copy = target / entry.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy(held, copy, names)
        entries.append(FileEntry(entry.path, entry.holds, file_sha256(copy), copy.stat().st_size))
    changed: Manifest = msgspec.structs.replace(manifest, files=entries)
    if manifest.recorded is not None:
        record = {**manifest.recorded.record, "requests": ""}
        told = msgspec.structs.replace(manifest.recorded, record=record, ended="", faults=[])
        changed = msgspec.structs.replace(changed, recorded=told)
    (target / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(changed), indent=2) + b"\n")


@contextlib.contextmanager
def written(target: Path) -> Iterator[Path]:
    """Where to write a file or a folder, which then takes its place whole or not at all; InputError where it cannot be."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield partial
        if target.is_dir():
            target.rmdir()
        partial.replace(target)
    except OSError as error:
        raise InputError(str(target), "-o", "a place that can be written", (error.strerror or str(error)).lower()) from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


def _new(target: Path) -> Path:
    if target.exists():
        raise InputError(str(target), "-o", "a new file", "one that is there")
    return target


def _copy(path: Path, target: Path, names: dict[str, str]) -> None:
    if path.suffix == ".safetensors":
        _copy_tensors(path, target, names)
        return
    with target.open("wb") as raw, _packed(raw) if path.suffix == ".zst" else contextlib.nullcontext(raw) as out:
        for line in _nobody(path, names):
            out.write(line + b"\n")


def _packed(raw: Any) -> Any:
    import zstandard

    return zstandard.ZstdCompressor().stream_writer(raw, closefd=False)


def _nobody(path: Path, names: dict[str, str]) -> Iterator[bytes]:
    for batch in read_batches(path):
        known = RecordedV1.__struct_fields__ if batch.form == "v1" else LabRecord.__struct_fields__
        for line in batch.lines:
            record = {n: v for n, v in msgspec.json.decode(line).items() if n in known and n not in _OF_NOBODY}
            if record.get("requests") is not None:
                record["requests"] = [_named(names, name) for name in record["requests"]]
            yield msgspec.json.encode(record)


def _named(names: dict[str, str], name: str) -> str:
    return names.setdefault(name, f"r{len(names)}") if name else ""


def _copy_tensors(path: Path, target: Path, names: dict[str, str]) -> None:
    file = open_tensors(path, FORMS[holds_of(path)], (), TensorFile)
    meta = dict(file.meta)
    if "requests" in meta:
        meta["requests"] = msgspec.json.encode([_named(names, n) for n in msgspec.json.decode(meta["requests"])]).decode()
    save_tensors(target, meta, {name: np.asarray(file.tensor(name)) for name in file.entries})
