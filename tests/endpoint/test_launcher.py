"""The generated launcher: golden for both shipped endpoints, clean under shellcheck, deaf to what a TOML file says."""

import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import psutil
import pytest

from replay.captures.manifest import file_sha256
from replay.devices import cpu_facts
from replay.endpoint.launcher import Promotion, encoded, render, write
from replay.endpoint.predict import Prediction
from replay.endpoint.promote import locate_endpoint
from replay.endpoint.spec import Endpoint, read
from replay.errors import InputError
from replay.identity import FIELDS, collect
from replay.model import Comparison, Effect, Interval, Verdict
from replay.results.build import Group
from tests.conftest import ROOT

GOLDEN = Path(__file__).parent / "golden"
EFFECT = Effect(Interval(-0.5, -0.51, -0.49), Interval(-0.5, -0.505, -0.495), 0.01, 5, 2)
NULL = Effect(Interval(0, -0.002, 0.002), Interval(0, -0.001, 0.001), 0.004, 5, 5)
GROUP = Group(
    stage="moe.layer", geometry="qwen36:tp4", capture="drawn", layers="L9", tokens=1, modes="", kernel="sycl:moe.layer:staged",
    cases=16, degenerate=0, exact="BITWISE", us=Interval(231, 228, 235), host_us=None, floor_us=144.0, floor_term="bytes", times_floor=1.604,
    comparison=Comparison("eager:moe.layer", EFFECT, NULL), verdict=Verdict("FASTER", False), detail="", reproduce=None,
)  # fmt: skip


def promotion(endpoint: Endpoint, identity: dict[str, object] | None = None, **fields: object) -> Promotion:
    """A promotion that was never run: fixed values for golden files, or this machine's identity."""
    fixed = {name.partition(".")[0]: "fixed" for name in FIELDS}
    fixed |= {"sources": {"replay": "0" * 64, "sycl": "1" * 64}, "environment": {"SYCL_CACHE_PERSISTENT": "1"}}
    base = Promotion(
        form="b70-promotion/1", stage="moe.layer", kernel="sycl:moe.layer:staged", load="", source="replay", claim="faster",
        device=endpoint.device, margin=0.01, cache="cold-weights", endpoint_sha256="4" * 64, binaries=(), cautions=("made up",), processes=5, claims=(GROUP,),
        prediction=Prediction(
            ms_per_token=Interval(4.8, 4.7, 4.9), baseline="eager:moe.layer", layers=40, calls_per_token=1.0,
            weights={1: 1.0}, weighted_by="192 records of the capture",
        ),
        journal_sha256="2" * 64, endpoint=endpoint.name, devices=endpoint.devices, port=endpoint.port,
        min_free_gib=endpoint.min_free_gib, packages=endpoint.packages,
        environment={"SYCL_CACHE_PERSISTENT": "1", **endpoint.env}, overridden=(), unknown=("power",), files={},
        identity=identity or fixed,
    )  # fmt: skip
    return msgspec.structs.replace(base, **fields)


def rendered(promotion: Promotion, endpoint: Endpoint, toml: bytes) -> dict[str, bytes]:
    """The files of a promotion that is made now."""
    return render(promotion, encoded(promotion), endpoint, toml)


@pytest.mark.parametrize("name", ["tiny-cpu", "b70-tp4-qwen36"])
def test_golden(name: str, tmp_path: Path) -> None:
    """Both shipped endpoints render to the files kept here; `B70_GOLDEN=write` writes them anew."""
    endpoint, toml = read(locate_endpoint(name))
    files = rendered(promotion(endpoint), endpoint, toml)
    assert files.pop("endpoint.toml") == toml
    for file, data in files.items():
        if os.environ.get("B70_GOLDEN") == "write":
            (GOLDEN / name).mkdir(exist_ok=True)
            (GOLDEN / name / file).write_bytes(data)
        assert data.decode() == (GOLDEN / name / file).read_text(), file


@pytest.mark.parametrize("name", ["tiny-cpu", "b70-tp4-qwen36"])
def test_shellcheck_finds_nothing(name: str) -> None:
    """Neither in the launcher nor in the control."""
    scripts = [str(GOLDEN / name / f"{role}.sh") for role in ("launch", "control")]
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_engine_file_names_the_kernel() -> None:
    """What the plugin reads: mode, stage, id and sha256; the file of a user's own kernel with its own hash."""
    endpoint, toml = read(locate_endpoint("tiny-cpu"))
    engine = tomllib.loads(rendered(promotion(endpoint), endpoint, toml)["engine.toml"].decode())
    assert engine["swap"]["mode"] == "serve"
    (kernel,) = engine["swap"]["kernel"]
    assert (kernel["stage"], kernel["kernel"]) == ("moe.layer", "sycl:moe.layer:staged")
    assert len(kernel["sha256"]) == 64
    assert "load" not in kernel
    mine = promotion(endpoint, load="/k/mine.py", source="/k/mine.py")
    mine.identity["sources"]["/k/mine.py"] = "3" * 64
    (kernel,) = tomllib.loads(rendered(mine, endpoint, toml)["engine.toml"].decode())["swap"]["kernel"]
    assert (kernel["load"], kernel["sha256"]) == ("/k/mine.py", "3" * 64)


# ---------------------------------------------------------------- values that want to run

EVIL = [
    "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "a\ntouch pwned\n", "\\'; touch pwned #",
    "${IFS}touch${IFS}pwned", "&& touch pwned", "| touch pwned", "!!", "*", "~", "-x; touch pwned", "{{ 7 * 7 }}", "{% raw %}",
    "<(touch pwned)", "\u2028touch pwned", "$'\\x60touch pwned\\x60'", "# touch pwned\r\ntouch pwned",
]  # fmt: skip

STUB = """#!{python}
import json, os, sys
if "vllm.entrypoints.openai.api_server" in sys.argv:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, open(os.environ["SEEN"], "w"))
"""


def stub(folder: Path, text: str = STUB) -> str:
    """A Python that answers every check with yes and writes down what it was told to serve."""
    folder.mkdir(exist_ok=True)
    path = folder / "python stub"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_no_value_of_an_endpoint_file_can_run(tmp_path: Path) -> None:
    """Executed, not only inspected: every value arrives as it was written, and no file appears."""
    out, seen = tmp_path / "it's $(touch pwned) here", tmp_path / "seen.json"
    source = tmp_path / "evil.toml"
    import tomli_w

    document = {
        "form": "b70-endpoint/1", "name": EVIL[4], "device": "cpu", "model": EVIL[0], "served_name": EVIL[1], "host": EVIL[2],
        "args": EVIL, "env": {f"VLLM_EVIL_{i}": text for i, text in enumerate(EVIL)}, "python": stub(tmp_path / "a b"),
    }  # fmt: skip
    source.write_text(tomli_w.dumps(document))
    endpoint, toml = read(source)
    measured = {"SYCL_EVIL": EVIL[3], "ZE_EVIL": EVIL[5]}
    promoted = promotion(endpoint, environment=measured | endpoint.env)
    promoted.identity["environment"] = measured
    write(out, rendered(promoted, endpoint, toml))
    for script in ("launch.sh", "control.sh"):
        for arguments in ([], ["--dry-run"]):
            environment = {"PATH": os.environ["PATH"], "SEEN": str(seen)}
            done = subprocess.run(
                [str(out / script), *arguments], cwd=tmp_path, env=environment, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr
        found = msgspec.json.decode(seen.read_bytes())
        assert found["argv"] == [
            "-m", "vllm.entrypoints.openai.api_server", "--model", EVIL[0], "--served-model-name", EVIL[1], "--host", EVIL[2],
            "--port", "8000", *EVIL,
        ]  # fmt: skip
        assert [found["env"][f"VLLM_EVIL_{i}"] for i in range(len(EVIL))] == EVIL
        assert (found["env"]["SYCL_EVIL"], found["env"]["ZE_EVIL"]) == (EVIL[3], EVIL[5])
        assert ("B70_ENGINE" in found["env"]) == (script == "launch.sh")
    assert not list(tmp_path.rglob("pwned*"))
    assert (out / "README.md").read_text().splitlines()[0] == "# sycl:moe.layer:staged for a touch pwned "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('env = { PATH = "/evil" }', "env.PATH: expected a variable that is not the shell's"),
        ('env = { LD_PRELOAD = "evil.so" }', "env.LD_PRELOAD"),
        ('env = { BASH_ENV = "evil.sh" }', "env.BASH_ENV"),
        ('env = { UID = "1" }', "env.UID"),
        ('env = { OCL_ICD_FILENAMES = "evil.so" }', "env.OCL_ICD_FILENAMES"),
        ('env = { VLLM_CACHE_ROOT = "/shared" }', "env.VLLM_CACHE_ROOT"),
        ('env = { "A=$(x)" = "1" }', "a variable's name"),
        ('model = "--config=evil"', "model: expected a name or path"),
        ('args = ["--port=9"]', "none that the launcher sets itself, got --port=9"),
        ('packages = { "" = "1" }', "a distribution's name"),
        ('env = { VLLM_PLUGINS = "" }', "env.VLLM_PLUGINS"),
        ('name = ""', "name: expected a name or path"),
        ("calls_per_token = 0", "calls_per_token"),
        ("port = 70000", "port: expected 1 to 65535, got 70000"),
        ("port = true", "the fields of b70-endpoint/1"),
        ("surprise = 1", "surprise"),
        ('device = "tpu"', "device"),
        ('args = "--x"', "args"),
        ('args = ["a\\u0000b"]', "zero byte"),
        ("x = [", "TOML"),
    ],
)
def test_bad_endpoint_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """What, where, expected, got."""
    base = {
        "form": '"b70-endpoint/1"', "name": '"n"', "device": '"cpu"', "model": '"m"', "served_name": '"s"', "args": "[]",
        "env": "{}",
    }  # fmt: skip
    base.pop(text.partition(" = ")[0], None)
    path = tmp_path / "e.toml"
    path.write_text("\n".join([*(f"{k} = {v}" for k, v in base.items()), text]))
    with pytest.raises(InputError, match=r".") as error:
        read(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_endpoint_file(tmp_path: Path) -> None:
    """A missing file is named."""
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "none.toml")


# ---------------------------------------------------------------- started for real

SERVER = """#!{python}
import os, subprocess, sys, time
if "vllm.entrypoints.openai.api_server" in sys.argv:
    child = subprocess.Popen([{python!r}, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
    open(os.environ["SEEN"], "w").write(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(600)
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """A folder promoted on this machine, its server a stub that leaves a deaf worker behind."""
    import tomli_w

    source = tmp_path / "endpoint.toml"
    fields = {"python": stub(tmp_path / "bin", SERVER), "stop_timeout_s": 2, "min_free_gib": 0.0, "port": free_port()}
    source.write_text(tomli_w.dumps(tomllib.loads(locate_endpoint("tiny-cpu").read_text()) | fields))
    endpoint, toml = read(source)
    identity = collect(argv=(), sources=(), seed=7, capture_sha256="0" * 64, device=cpu_facts())
    library = tmp_path / "kernel.so"
    library.write_bytes(b"built once")
    plugin = tmp_path / "site" / "plugin-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nb70_replay = plugin:register\n")
    (tmp_path / "site" / "vllm").mkdir()
    binary = tmp_path / "cache" / "kernel.syclbin"
    binary.parent.mkdir()
    binary.write_bytes(b"compiled once")
    identity["environment"] = {}
    promoted = promotion(
        endpoint, identity=identity, environment=endpoint.env, binaries=(str(binary),), endpoint_sha256=file_sha256(source),
        files={str(path): file_sha256(path) for path in (library, binary)},
    )  # fmt: skip
    write(tmp_path / "out", rendered(promoted, endpoint, toml), promoted.binaries)
    binary.unlink()  # the launcher has its own
    return tmp_path / "out"


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """The caller's variables, without those that the identity would object to."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    return kept | {"SEEN": str(folder / "seen"), "PYTHONPATH": f"{ROOT}:{folder.parent / 'site'}"} | extra


def refusal(folder: Path, **extra: str) -> list[str]:
    """What the launcher says when it must refuse."""
    done = subprocess.run(
        [str(folder / "launch.sh")], env=environment(folder, **extra), capture_output=True, text=True, check=False
    )
    assert done.returncode == 5, (done.returncode, done.stderr)
    assert not (folder / "seen").exists()
    return done.stderr.strip().splitlines()


def test_a_changed_hash_is_named(launcher: Path) -> None:
    """Exit 5, and which: a library that was built again, an identity or engine file that was edited."""
    library = launcher.parent / "kernel.so"
    library.write_bytes(b"built twice")
    (line,) = refusal(launcher)
    assert line.startswith(f"launch.sh: {library}: expected sha256 ")
    library.write_bytes(b"built once")
    rendered = ("engine.toml", "control.sh", "cache/launch/b70-replay/kernel.syclbin")
    for names in (rendered, ("identity.json",), ("endpoint.toml",)):  # the others rest on these two
        before = {name: (launcher / name).read_bytes() for name in names}
        for name, content in before.items():
            (launcher / name).write_bytes(content + b" ")
        lines = refusal(launcher)
        for name, content in before.items():
            assert sum(f"{name}: expected sha256" in line for line in lines) == 1, name
            (launcher / name).write_bytes(content)
    script = launcher / "launch.sh"
    script.write_text(script.read_text().replace("--enforce-eager", "--no-enforce-eager"))
    (line,) = refusal(launcher)
    assert "launch.sh: expected sha256" in line.partition(": ")[2]


def test_every_other_difference_is_named(launcher: Path) -> None:
    """Variables set by the caller, in one refusal."""
    lines = refusal(launcher, SYCL_EVIL="1", ZE_AFFINITY_MASK="3")
    assert lines == [
        "launch.sh: SYCL_EVIL: expected 'unset', got '1'", "launch.sh: ZE_AFFINITY_MASK: expected 'unset', got '3'"
    ]  # fmt: skip


def test_no_server_and_no_plugin(launcher: Path) -> None:
    """Without the plugin the native op would be served in silence; the control needs none, but both need vLLM."""
    lines = refusal(launcher, PYTHONPATH=str(ROOT))
    assert lines == [
        "launch.sh: vllm: expected a package that can be imported, got none",
        "launch.sh: plugin: expected one that acts on [swap], got one that acts on [record]",
    ]
    done = subprocess.run(
        [str(launcher / "control.sh")],
        env=environment(launcher, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (5, "control.sh: vllm: expected a package that can be imported, got none\n")


def test_the_whole_group_ends_with_the_launcher(launcher: Path) -> None:
    """The server and a worker that ignores SIGTERM are gone when the launcher is told to stop."""
    process, pids = started(launcher)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)  # a second, impatient one changes nothing
    assert process.wait(20) == 143
    assert alive(pids) == []


def test_a_server_that_ends_takes_its_workers_along(launcher: Path) -> None:
    """Its exit code is the launcher's; one that is only stopped has not ended."""
    process, pids = started(launcher)
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(0.5)
    assert process.poll() is None
    assert alive(pids) == pids
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait(20) in (128 + signal.SIGKILL, 128 + signal.SIGSTOP)  # bash may keep the first it saw
    assert alive(pids) == []


def started(launcher: Path) -> "tuple[subprocess.Popen[bytes], list[int]]":
    """A launcher whose server runs, and the server's processes."""
    process = subprocess.Popen([str(launcher / "launch.sh")], env=environment(launcher), stderr=subprocess.PIPE)
    seen = launcher / "seen"
    while not (seen.exists() and len(seen.read_text().split()) == 2):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    pids = [int(word) for word in seen.read_text().split()]
    assert alive(pids) == pids
    return process, pids


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that run."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    """Nothing is written over."""
    (tmp_path / "x").write_text("mine")
    with pytest.raises(InputError, match="an empty or new folder"):
        write(tmp_path, {"x": b"theirs"})
    assert (tmp_path / "x").read_text() == "mine"


def test_words_are_quoted_as_the_shell_wants_them() -> None:
    """The golden command line splits back into the endpoint's words."""
    endpoint, _ = read(locate_endpoint("b70-tp4-qwen36"))
    text = (GOLDEN / "b70-tp4-qwen36" / "launch.sh").read_text()
    words = shlex.split(text.partition("command=(")[2].partition("\n)")[0])
    assert words[-len(endpoint.args) :] == endpoint.args
