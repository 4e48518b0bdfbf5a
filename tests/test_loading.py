"""From a deployment to an engine: what is read beside what, what it cost, and what is left when it fails."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayneuron import devices, loading
from rayneuron.compile_cache.cache import Cache
from rayneuron.config import parse
from rayneuron.engine import profile
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.types import Profile
from tests.serve.scripted import eventually

ARGS = {"dtype": "fp32", "threads": 1, "max_model_len": 64, "max_num_seqs": 2}


def copied(source: Path, target: Path, **changed: str) -> Path:
    """A model directory with other texts in some of its files."""
    shutil.copytree(source, target)
    for name, text in changed.items():
        (target / f"{name}.json").write_text(text)
    return target


def test_every_part_of_a_start_is_timed_and_reported(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.INFO, "rayneuron.loading"):
        opened = loading.open_engine(parse({"model": {"path": str(tiny)}, **ARGS}), lambda *progress: told.append(progress))
    opened.engine.close()
    assert set(opened.seconds) == {"import", "check", "tokenizer", "weights", "graphs", "profile"} and min(opened.seconds.values()) >= 0
    assert [done for stage, done, total in told if stage == "weights"] == [1, 2]
    assert {total for stage, done, total in told if stage == "weights"} == {2}
    bytes_of_file = (tiny / "model.safetensors").stat().st_size
    said = next(record.getMessage() for record in caplog.records if "a rank will hold" in record.getMessage())
    assert f"weights {bytes_of_file / 2**20:.1f} MiB" in said, "this model is stored in the precision it runs in"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what steps take is kept, of this test alone; the kernels stay where they are."""
    monkeypatch.setattr(devices, "kept", lambda name, url: Cache(str(tmp_path / "kept")))
    return tmp_path / "kept"


def times(tiny: Path, **said: Any) -> Profile:
    opened = loading.open_engine(parse({"model": {"path": str(tiny)}, **ARGS, **said}))
    opened.engine.close()
    assert opened.engine.timing is not None
    return opened.engine.timing.fixed


def test_what_steps_take_is_measured_by_the_first_start(tiny: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas cut prompts alike, and a warm start measures nothing. What changes a step is part of the key, what it is called is not."""
    monkeypatch.setattr(profile, "outdated", lambda *_: False)  # whatever else this machine does
    first = times(tiny)
    assert first.batch == (1, 2) and first.lengths == (64,) and 0 < min(ms for *_, ms in (*first.decode, *first.prefill))
    monkeypatch.setattr(profile, "measure", lambda *_, **__: fail())
    assert times(tiny) == first
    other = times(tiny, model={"path": str(tiny), "name": "another"}, limits={"max_waiting": 1}, prefill_chunk_ms=12.5)
    assert other.chunk_ms == 12.5 and msgspec.structs.replace(other, chunk_ms=first.chunk_ms) == first
    for said in ({"max_num_seqs": 3}, {"threads": 2}, {"dtype": "bf16"}, {"kv_cache_tokens": 64}, {"fused_qkv": False}):
        with pytest.raises(Failing):
            times(tiny, **said)


def test_a_table_of_a_busy_machine_is_taken_once_more(tiny: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then holds for all: one step of each start tells. One of a quieter machine than now is kept."""
    measure, tables = profile.measure, []

    def scaled(by: float) -> None:
        def measured(*words: Any, **more: Any) -> Profile:
            found = measure(*words, **more)
            slower = {kind: tuple((*at, by * ms) for *at, ms in getattr(found, kind)) for kind in ("decode", "prefill")}
            tables.append(msgspec.structs.replace(found, **slower))
            return tables[-1]

        monkeypatch.setattr(profile, "measure", measured)

    scaled(1000.0)
    assert times(tiny).decode == tables[0].decode
    scaled(0.001)
    assert times(tiny).decode == tables[1].decode
    assert times(tiny).decode == tables[1].decode and len(tables) == 2
    assert len(list(kept.rglob("profile.json"))) == 2


def test_a_table_that_is_damaged_is_measured_again(tiny: Path, kept: Path) -> None:
    times(tiny)
    (file,) = kept.rglob("profile.json")
    file.write_text("{}")
    assert times(tiny).prefill
    assert msgspec.json.decode(file.read_bytes(), type=Profile).prefill


def test_where_nothing_can_be_kept_it_is_measured_every_time(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "kept", lambda name, url: Cache("/proc/nowhere"))
    assert times(tiny).prefill
    assert "what steps take cannot be kept for the next start: " in caplog.text and "/proc/nowhere" in caplog.text


def test_a_broken_tokenizer_ends_the_start(tiny: Path, tmp_path: Path) -> None:
    """And nothing goes on behind it: the thread that read it has ended."""
    broken = copied(tiny, tmp_path / "broken", tokenizer="{")
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError, match="no tokenizer could be read"):
        loading.open_engine(parse({"model": {"path": str(broken)}, **ARGS}))
    assert not [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("rayneuron")]


class AtOnce(ThreadPoolExecutor):
    """Has done everything when `submit` returns."""

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        made = super().submit(*call, **named)
        wait([made])
        return made


def test_a_broken_tokenizer_stops_the_weights(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the tokenizer is known to be broken, no more layers are read and nobody is told of progress."""
    monkeypatch.setattr(loading, "ThreadPoolExecutor", AtOnce)
    broken = copied(tiny, tmp_path / "broken", tokenizer="{")
    told: list[str] = []
    with pytest.raises(CheckpointError, match="no tokenizer could be read"):
        loading.open_engine(parse({"model": {"path": str(broken)}, **ARGS}), lambda stage, done, total: told.append(stage))
    assert told == []


STAGES = ("weights", "graphs")
SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "two ranks": {"tensor_parallel": 2, "instance": "cores:2", "group": {"start_s": 60.0, "cores_s": 0.0}},
}


def held(ledgers: Path) -> dict[str, Any]:
    """What a start takes of this machine: threads of ours, children, sockets and shared memory, locks on cores."""
    children = {
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if (text := read(stat)) and int(text.rpartition(")")[2].split()[1]) == os.getpid() and text.rpartition(")")[2].split()[0] != "Z"
    }
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("rayneuron")),
        "children": children,
        "sockets": sum(link.startswith("socket:") for link in links),
        "shared": sorted(link for link in links if "shm" in link) + sorted(n for n in os.listdir("/dev/shm") if n.startswith("rayneuron")),
        "cores": sorted(link for link in links if link.startswith(str(ledgers))),
    }


def compiling() -> list[str]:
    """Threads of constraints that nobody waits for, since an engine is closed without them."""
    return [t.name for t in threading.enumerate() if t.name.startswith(("rayneuron-grammar", "rayneuron-mask"))]


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def nothing(*progress: object) -> None:
    return None


WHERE = ("generation", "defaults", "tokenizer", *STAGES, "engine")
QUICK = [(where, "one") for where in WHERE] + [("weights", "two ranks")]
SLOW = [pytest.param(where, "two ranks", marks=pytest.mark.slow) for where in WHERE if where != "weights"]


@pytest.mark.parametrize(("where", "shape"), [*QUICK, *SLOW])
def test_after_a_failed_start_nothing_is_left(where: str, shape: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fails: what was taken is given back, and the same start succeeds right afterwards."""
    monkeypatch.setenv("RAYNEURON_LEDGER", str(tmp_path / "cores"))
    model = copied(tiny, tmp_path / "model")
    args: dict[str, Any] = {"model": {"path": str(model)}, **ARGS, **SHAPES[shape]}
    eventually(lambda: not compiling(), 30, compiling)  # what an engine before this one left to itself
    before, progress, wrong = held(tmp_path / "cores"), nothing, dict(args)
    if where == "generation":
        (model / "generation_config.json").write_text("[]")
    elif where == "defaults":
        wrong["sampling_defaults"] = {"temperature": 9}
    elif where == "tokenizer":
        (model / "tokenizer.json").write_text("{")
    elif where == "engine":
        from rayneuron.engine import neuron_sampling

        monkeypatch.setattr(neuron_sampling, "rule_of", lambda config: fail() if threading.current_thread().name == "MainThread" else None)
    else:

        def progress(stage: str, done: int, total: int) -> None:
            if stage == where:
                fail()

    with pytest.raises((CheckpointError, ConfigError, Failing)):
        loading.open_engine(parse(wrong), progress)
    eventually(lambda: held(tmp_path / "cores") == before, 30, lambda: (held(tmp_path / "cores"), before))
    monkeypatch.undo()
    for name in ("generation_config.json", "tokenizer.json"):
        shutil.copy(tiny / name, model / name) if (tiny / name).exists() else (model / name).unlink(missing_ok=True)
    loading.open_engine(parse(args)).engine.close()


class Failing(Exception):
    """What a part of a start ends with."""


def fail() -> None:
    raise Failing


def test_generation_config_is_read_before_ranks_start(tiny: Path, tmp_path: Path) -> None:
    class NoProcesses:
        node_ips = ("127.0.0.1",)

        def start(self, *told: object) -> None:
            raise AssertionError("started")

    model = copied(tiny, tmp_path / "model", generation_config=json.dumps([]))
    config = parse({"model": {"path": str(model)}, **ARGS, "tensor_parallel": 2})
    with pytest.raises(CheckpointError, match=r"generation_config.json holds no JSON object"):
        loading.open_engine(config, processes=NoProcesses())  # type: ignore[arg-type]
