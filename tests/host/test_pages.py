"""Weights in the page cache: what is said of a file that was dropped from it, and of one that was read ahead."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rayneuron.host import pages


def test_what_is_dropped_is_read_ahead_again(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(os.urandom(4 * 2**20))
    (tmp_path / "config.json").write_text("{}")
    assert pages.weight_files(tmp_path) == [file]
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        assert pages.resident([file]) == 1.0, "it was written a moment ago"
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = pages.resident([file])
    assert pages.warm([file], 2**20) == 2**20 and pages.warm([file], 2**30) == 4 * 2**20
    until_s = time.monotonic() + 10
    while pages.resident([file]) < 1.0 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert pages.resident([file]) == 1.0 >= dropped
    assert pages.resident([]) == 0.0
