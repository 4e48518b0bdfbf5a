"""From a deployment to an engine: what is read beside what, what it cost, and what is left when it fails."""

from __future__ import annotations

import logging
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from rayneuron import loading
from rayneuron.config import parse
from rayneuron.errors import CheckpointError

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
    assert set(opened.seconds) == {"import", "check", "tokenizer", "weights", "graphs"} and min(opened.seconds.values()) >= 0
    assert [done for stage, done, total in told if stage == "weights"] == [1, 2]
    assert {total for stage, done, total in told if stage == "weights"} == {2}
    bytes_of_file = (tiny / "model.safetensors").stat().st_size
    said = next(record.getMessage() for record in caplog.records if "a rank will hold" in record.getMessage())
    assert f"weights {bytes_of_file / 2**20:.1f} MiB" in said, "this model is stored in the precision it runs in"


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
