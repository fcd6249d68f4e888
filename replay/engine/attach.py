"""When a rank's model runner is there: can what was asked for be recorded truly? Its recording begins, or it is refused."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay.captures import recording
from replay.engine import log, record
from replay.engine.config import Record
from replay.engine.writer import NotOurs
from replay.errors import InputError
from replay.model import Geometry
from replay.model.geometry import nearest


def attach(asked: Record, vllm_config: Any) -> None:
    """Begin this rank's recording, or say why not; the server goes on either way. Once a process."""
    if record.ACTIVE is not None:
        return
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    expected = asked.ranks or tuple(range(ranks))
    if rank not in expected and max(expected) < ranks:
        return
    try:
        if max(expected) >= ranks:
            raise InputError("record", "ranks", f"ranks below {ranks}", str(max(expected)))
        if reasons := [f"{what}: expected {expected}, got {got}" for what, expected, got in refusals(asked, vllm_config)]:
            refuse(asked, "; ".join(reasons))
            return
        head = {
            "rank": rank, "expected": expected, "pid": os.getpid(), "versions": _versions(),
            "model": str(vllm_config.model_config.model), "geometry": geometry_of(vllm_config.model_config.hf_text_config, ranks),
        }  # fmt: skip
        record.attach(asked, head)
    except NotOurs as error:
        log.error("nothing is recorded, the server goes on: %s", error)
        return
    except Exception as error:  # whatever it is, the server goes on
        refuse(asked, str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")
        return
    log.info("rank %d of %d records %s to %s", rank, ranks, ", ".join(asked.what), asked.folder)


def refuse(asked: Record, why: str) -> None:
    """Say in the log, and where it can be in the folder, why nothing is recorded."""
    log.error("nothing is recorded, the server goes on: %s", why)
    if not asked.folder:
        return
    with contextlib.suppress(OSError):  # where no note can be left, the log has it
        recording.refuse(Path(asked.folder), why)


def refusals(asked: Record, config: Any) -> Iterator[tuple[str, str, str]]:
    """(what, expected, got) of each thing about a server under which a recording would not be true."""
    if config.speculative_config is not None:
        yield (
            "--speculative-config",
            "none: rows that a verify rejects would be taken for real ones",
            str(config.speculative_config.method),
        )
    mode = getattr(config.compilation_config.cudagraph_mode, "name", str(config.compilation_config.cudagraph_mode))
    if mode not in ("NONE", "None") and config.device_config.device_type != "cpu":  # a CPU captures no graphs, whatever the mode
        expected = (
            "NONE: a hook fires when a graph is captured and never when it is replayed; serve with --enforce-eager or "
            '--compilation-config \'{"cudagraph_mode": "NONE"}\''
        )
        yield "cudagraph_mode", expected, mode
    parallel = config.parallel_config
    sole: dict[str, object] = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_eplb": False, "enable_dbo": False}
    for name, only in sole.items():
        if (got := getattr(parallel, name)) != only:
            yield f"--{name.replace('_', '-')}", str(only).lower(), str(got).lower()
    if asked.wants("gdn") and config.device_config.device_type != "cpu":
        yield "record.what", "no GDN states: their hooks are of vLLM's CPU kernels", config.device_config.device_type


def geometry_of(text: Any, ranks: int) -> Geometry:
    """The sizes of one rank, from a model's Hugging Face configuration; under the name of the preset that has them."""

    def get(*names: str, default: int = 0) -> int:
        return next((int(value) for name in names if (value := getattr(text, name, None))), default)

    heads = get("num_attention_heads", default=1)
    return nearest(
        ranks,
        hidden=get("hidden_size"), experts=get("num_experts", "n_routed_experts", "num_local_experts", default=1),
        top_k=get("num_experts_per_tok", default=1), inter=get("moe_intermediate_size", "intermediate_size") // ranks,
        k_heads=max(get("linear_num_key_heads", "num_key_value_heads", default=1) // ranks, 1),
        v_heads=max(get("linear_num_value_heads", "num_attention_heads", default=1) // ranks, 1),
        head_dim=get("linear_key_head_dim", "head_dim", default=get("hidden_size") // heads),
        conv_width=get("linear_conv_kernel_dim", default=4), vocab=get("vocab_size"), layers=get("num_hidden_layers"),
    )  # fmt: skip


def _versions() -> dict[str, str]:
    import torch
    import vllm

    return {"python": platform.python_version(), "torch": str(torch.__version__), "vllm": vllm.__version__}
