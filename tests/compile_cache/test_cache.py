"""The compile cache: what a key says, one builder a key over processes, nothing half-written, damage, misses; and the same over S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rayneuron.compile_cache import cache as caching
from rayneuron.compile_cache.cache import Cache, key
from rayneuron.devices.base import LIKELIEST, Shape
from rayneuron.errors import CompileError, ConfigError
from rayneuron.models.arch import Arch

ARCH = Arch("llama", vocab=512, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=112)
SHAPES = [Shape("decode", 4, 1, 128, LIKELIEST)]
FIELDS = dict(arch=ARCH, shapes=SHAPES, dtype=torch.bfloat16, quantization=None, tp=8, stage=0, lnc=1, device="neuron",
              compiler="2.23.6484.0", flags="-O1", source="abc")  # fmt: skip
CHANGES = dict(arch=Arch("llama", 512, 64, 3, 4, 2, 16, 112), shapes=[Shape("decode", 8, 1, 128, LIKELIEST)], dtype=torch.float32,
               quantization="int8", tp=4, stage=1, lnc=2, device="cpu", compiler="2.24.8799.0", flags="-O2", source="abd")  # fmt: skip


def write(text: str):
    def build(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "graph.neff").write_text(text)
        (folder / "meta.json").write_text("{}")

    return build


def never(folder: Path) -> None:
    raise AssertionError("built although it was there")


def test_a_key_is_the_same_in_every_process() -> None:
    script = (
        "from tests.compile_cache.test_cache import FIELDS, key\n"
        "print(key('graphs', **FIELDS).digest, key('graphs', **dict(reversed(FIELDS.items()))).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert out == [key("graphs", **FIELDS).digest] * 2


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_decides(name: str) -> None:
    assert key("graphs", **{**FIELDS, name: CHANGES[name]}).digest != key("graphs", **FIELDS).digest


@pytest.mark.parametrize("name", caching.FORBIDDEN)
def test_what_must_not_decide_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        key("graphs", **FIELDS, **{name: "x"})


def test_kinds_do_not_meet() -> None:
    assert key("native", tp=1).digest != key("graphs", tp=1).digest
    with pytest.raises(ValueError, match="cannot be part"):
        key("graphs", weights_of=torch.zeros(1))


def test_built_once_and_then_loaded(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path))
    first = cache.get_or_build(key("graphs", **FIELDS), write("neff"))
    assert Cache(f"file://{tmp_path}").get_or_build(key("graphs", **FIELDS), never) == first
    assert (first / "deep" / "graph.neff").read_text() == "neff"
    manifest = caching.entry(first)
    assert manifest["key"]["tp"] == 8 and set(manifest["files"]) == {"deep/graph.neff", "meta.json"}
    assert not list((tmp_path / ".drafts").iterdir())


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache, mine = Cache(str(tmp_path)), key("graphs", **FIELDS)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise CompileError("the compiler said no")

    with pytest.raises(CompileError, match="said no"):
        cache.get_or_build(mine, fail)
    assert cache.get(mine) is None and not list((tmp_path / ".drafts").iterdir())
    assert cache.get_or_build(mine, write("neff")).is_dir()


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "manifest"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    cache, mine = Cache(str(tmp_path)), key("graphs", **FIELDS)
    file = cache.get_or_build(mine, write("neff")) / "deep" / "graph.neff"
    if harm == "truncate":
        file.write_text("ne")
    elif harm == "flip":
        file.write_text("nefg")
    elif harm == "delete":
        file.unlink()
    else:
        (file.parents[1] / "manifest.json").write_text("{")
    assert (cache.get_or_build(mine, write("again")) / "deep" / "graph.neff").read_text() == "again"
    assert "damaged" in caplog.text


BUILDER = """
import os, sys, time
from pathlib import Path
from rayneuron.compile_cache.cache import Cache, key
log, go = Path(sys.argv[2]), Path(sys.argv[3])
def build(folder):
    with log.open("a") as f: f.write("built\\n")
    (folder / "half").write_text("half")
    while not go.exists(): time.sleep(0.02)
    (folder / "half").unlink(); (folder / "whole").write_bytes(os.urandom(64))
def waiting(what, s):
    with log.open("a") as f: f.write("waits\\n")
path = Cache(sys.argv[1]).get_or_build(key("graphs", n=1), build, waiting)
print((path / "whole").read_bytes().hex())
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "cache"), str(tmp_path / "log"), str(tmp_path / "go")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})


def until(condition, timeout_s: float = 300.0) -> None:
    event = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        if condition():
            return
        event.wait(0.05)
    raise AssertionError("it did not happen")


def logged(tmp_path: Path, word: str) -> int:
    return (tmp_path / "log").read_text().split().count(word) if (tmp_path / "log").exists() else 0


def test_eight_processes_build_once(tmp_path: Path) -> None:
    """BR-27: 8 processes ask for the same entry: one compiles, seven wait and load the same bytes."""
    processes = [start(tmp_path) for _ in range(8)]
    until(lambda: logged(tmp_path, "built") == 1 and logged(tmp_path, "waits") >= 7)
    assert not Cache(str(tmp_path / "cache")).get(key("graphs", n=1))  # half of it is not visible
    (tmp_path / "go").touch()
    out = {p.communicate(timeout=300)[0] for p in processes}
    assert len(out) == 1 and len(out.pop().strip()) == 128
    assert logged(tmp_path, "built") == 1


def test_a_killed_builder_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BR-28: the lock of a dead builder does not block, and its draft is removed."""
    first = start(tmp_path)
    until(lambda: logged(tmp_path, "built") == 1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    cache = Cache(str(tmp_path / "cache"))
    path = cache.get_or_build(key("graphs", n=1), write("mine"))
    assert (path / "deep" / "graph.neff").read_text() == "mine" and not (path / "half").exists()
    assert f"pid {first.pid}" in caplog.text and "takes over" in caplog.text
    assert not list((tmp_path / "cache" / ".drafts").iterdir())


def test_waiting_ends_and_names_the_owner(tmp_path: Path) -> None:
    mine, now, heard = key("graphs", n=1), [0.0], []
    cache = Cache(str(tmp_path), wait_s=60, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    with Cache(str(tmp_path)).folder.lock(mine.digest):
        with pytest.raises(CompileError, match=f"waited 60 s for graphs {mine.digest} being built by pid {os.getpid()}"):
            cache.get_or_build(mine, never, lambda what, s: heard.append(s))
    assert heard[0] == 0.0 and heard[-1] < 60 and len(heard) < 60
    assert cache.get_or_build(mine, write("x")).is_dir()


def test_required_but_absent_says_the_difference(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), require=True)
    with pytest.raises(CompileError, match="nothing else of its kind; run `rayneuron compile`"):
        cache.get_or_build(key("graphs", **FIELDS), never)
    Cache(str(tmp_path)).get_or_build(key("graphs", **{**FIELDS, "tp": 2}), write("a"))
    Cache(str(tmp_path)).get_or_build(key("graphs", **{**FIELDS, "tp": 4, "lnc": 2, "flags": "-O3"}), write("b"))
    with pytest.raises(CompileError, match="the nearest differs: tp is 2 there, 8 here.") as caught:
        cache.get_or_build(key("graphs", **FIELDS), never)
    assert "lnc" not in caught.value.message
    Cache(str(tmp_path)).get_or_build(key("graphs", **FIELDS), write("c"))
    assert cache.get_or_build(key("graphs", **FIELDS), never).is_dir()


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="write a folder"):
        Cache("http://x/y")
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        Cache("s3:///x")


def test_the_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "named"))
    assert Cache().get_or_build(key("graphs", n=1), write("x")).parent == tmp_path / "named"


def test_manifest_is_json_that_people_read(tmp_path: Path) -> None:
    path = Cache(str(tmp_path)).get_or_build(key("graphs", **FIELDS), write("x"))
    said = json.loads((path / "manifest.json").read_text())
    assert said["key"]["dtype"] == "bfloat16" and said["kind"] == "graphs" and said["built_by"].startswith("pid ")
