"""Record captures/tiny-moe-256 from the tiny server: served, asked, closed, and copied without request ids (`make captures`).

python bench/endpoints/make_captures.py VLLM MODELS CAPTURES
"""

import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from replay.captures.hand_on import anonymise
from replay.endpoint import recorder, server, spec
from replay.engine import config

HERE = Path(__file__).resolve().parent
NAME = "tiny-moe-256"


def main(vllm: str, models: Path, captures: Path) -> int:
    """The exit code: 0 where the capture is as it should be."""
    endpoint, _ = spec.read(HERE / "tiny-cpu.toml")
    asked = config.read(HERE / "tiny-capture.toml").record
    assert asked is not None  # as the file has it
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / NAME
        done = recorder.record(recorder.Asked(
            command=server.serve_command(endpoint, vllm, model=str(models / NAME)), environment=endpoint.env, folder=folder,
            record=msgspec.structs.replace(asked, folder=str(folder)), prompts=recorder.read_prompts(HERE / "prompts.jsonl"),
            made_by="make captures",
        ))  # fmt: skip
        for problem in done.problems:
            print(problem, file=sys.stderr)
        if done.problems or done.manifest is None:
            return 1
        shutil.rmtree(captures / NAME, ignore_errors=True)
        anonymise(folder, captures / NAME)
    print(f"{captures / NAME}: {done.manifest.recorded}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
