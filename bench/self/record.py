"""What recording costs a server: the hooks' own clock, and pairs of blocks of a server that records and one that does not.

    python bench/self/record.py VLLM MODEL [PAIRS]        (``make bench-record``)

Both servers are up all the time and asked in turn, in random order within a pair; a block is one request of 256 tokens at
concurrency 1, its decode time a token from ``/metrics``. Exit code 1 where the hooks take more than ``BUDGET_US`` of the engine's
thread a recorded layer call.
"""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np

from replay.captures import recording
from replay.endpoint import recorder, spec
from replay.endpoint.server import Server, decode_seconds, serve_command
from replay.engine.config import Record
from replay.timing.estimate import median_interval

BUDGET_US, LAYERS = 8.0, 40  # 3 % of a B70's token of 10.7 ms
TOKENS = 256
PROMPT = "On Monday the ferry left at nine"
ENDPOINT = Path(__file__).resolve().parents[1] / "endpoints" / "tiny-cpu.toml"


def block(server: Server) -> float:
    """Decode milliseconds a token of one request, by the server's own histogram."""
    before = server.metrics()
    server.complete(PROMPT, TOKENS, ignore_eos=True)
    seconds, tokens = decode_seconds(before, server.metrics())
    return seconds / tokens * 1e3


def main(vllm: str, model: str, pairs: int) -> int:
    """The exit code."""
    endpoint, _ = spec.read(ENDPOINT)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "recorded"
        engine = recorder.prepare(folder, Record(folder=str(folder), what=("routes", "weights"), phases=("decode",)))
        variables = {"recording": {**endpoint.env, "B70_ENGINE": str(engine)}, "control": endpoint.env}
        servers = {
            name: Server(serve_command(endpoint, vllm, model=model, port=8410 + i), Path(made) / f"{name}.log", env)
            for i, (name, env) in enumerate(variables.items())
        }
        times: dict[str, list[float]] = {name: [] for name in servers}
        try:
            for server in servers.values():
                server.start()
                server.wait(300)
                block(server)  # the first one is the warm-up's
            for pair in range(pairs):
                for name in random.Random(pair).sample(list(servers), 2):  # noqa: S311  # an order, no secret
                    times[name].append(block(servers[name]))
            recorder.flush(folder)
        finally:
            for server in servers.values():
                server.stop()
        counted = recording.read_counters(recording.counters_path(folder, 0))
    return told(times, counted)


def told(times: dict[str, list[float]], counted: dict[str, int]) -> int:
    """Print both measurements; the exit code."""
    calls, steps = max(counted["calls"], 1), max(counted["steps"], 1)
    layer_us, step_us = counted["hook_ns"] / 1e3 / calls, counted["step_ns"] / 1e3 / steps
    us = layer_us + step_us / LAYERS
    print(f"hooks: {layer_us:.2f} µs of the engine's thread a recorded layer call ({calls:,} calls), and {step_us:.1f} µs a step")
    print(f"of a model of {LAYERS} layers: {us:.2f} µs a layer call (budget {BUDGET_US:g})")
    for name, values in times.items():
        middle = median_interval(np.array(values))
        print(f"{name}: {middle.mid:.3f} ms a token [{middle.lo:.3f}, {middle.hi:.3f}], {len(values)} blocks of {TOKENS} tokens")
    ratio = median_interval(np.array(times["recording"]) / np.array(times["control"]) - 1)
    per_step = calls / steps
    paired = f"{ratio.mid:+.2%} [{ratio.lo:+.2%}, {ratio.hi:+.2%}]"
    print(f"recording against control, pair by pair: {paired}, {per_step:.0f} layers a token")
    print(f"steps: {counted['offered']:,} offered, {counted['written']:,} written, {counted['dropped']:,} dropped")
    return int(us > BUDGET_US or counted["dropped"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 24))
