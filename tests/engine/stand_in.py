"""A server in vLLM's place: its addresses, and an engine of synthetic steps whose recorder is the real one.

    python -m tests.engine.stand_in serve MODEL --port N [--fault NAME]

Faults: ``empty`` (no step is ever taken), ``slow`` (the writer is blocked), ``dies`` (before it is ready), ``silent`` (no plugin),
``500`` (every completion is an error).
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from replay.endpoint.server import word_after


def main(words: list[str]) -> None:
    """Serve until killed."""
    fault, port = word_after(words, "--fault", ""), int(word_after(words, "--port", "8000"))
    if fault == "dies":
        print("no memory left for the weights", flush=True)
        sys.exit(7)
    engine = None if fault == "silent" else _engine(fault)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        count = 0

        def do_GET(self) -> None:  # the library's name
            if self.path == "/metrics":
                self.say(200, b'# HELP x\nvllm:generation_tokens_total{a="b"} 4.0\n', "text/plain")
            else:
                self.say(200, json.dumps({"data": [{"id": "stand-in"}]}).encode())

        def do_POST(self) -> None:  # the library's name
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if fault == "500":
                self.say(500, b"{}")
                return
            with lock:
                Handler.count += 1
                name = f"cmpl-{Handler.count}"
                prompt, tokens = len(asked["prompt"]), asked["max_tokens"]
                if engine is not None and fault != "empty":
                    engine.prompts[f"{name}-0"] = prompt
                    engine.step({f"{name}-0": prompt})
                    for _ in range(tokens - 1):
                        engine.step({f"{name}-0": 1})
            choice = {"text": "x" * tokens, "token_ids": [1] * tokens, "logprobs": {"token_logprobs": [-0.5] * tokens}}
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
            self.say(200, json.dumps({"id": name, "choices": [choice], "usage": usage}).encode())

        def say(self, code: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def _engine(fault: str) -> Any:
    from replay.engine import config
    from tests.engine.synthetic import Engine, recorder

    asked = config.read(Path(os.environ["B70_ENGINE"])).record
    assert asked is not None
    fields = {n: getattr(asked, n) for n in asked.__struct_fields__ if n not in ("folder", "ranks")}
    made = recorder(Path(asked.folder), **fields)
    if fault == "slow":
        write = made.writer._append

        def late(pieces: Any) -> None:
            time.sleep(0.3)
            write(pieces)

        made.writer._append = late  # type: ignore[method-assign]  # the fault
    return Engine(made, {})


if __name__ == "__main__":
    main(sys.argv[1:])
