"""What every fetch needs: one process a node at a time, room on the disk, the files that matter, and how far it has come."""

from __future__ import annotations

import errno
import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rayneuron.errors import ConfigError
from rayneuron.models import Progress

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LOOK_PERIOD_S, LINE_PERIOD_S = 0.5, 5.0
MB = 10**6
WORDS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
CUT = "rayneuron_shards.json"  # written by `rayneuron shard`; then every file belongs to it


def wanted(names: Iterable[str], weights: bool, allow_pickle: bool) -> list[str]:
    """The files of a model that are read here: no second copy of the weights in another format, nothing of other frameworks."""
    names = sorted(names)
    if CUT in names:
        return names
    top = [name for name in names if "/" not in name]
    safe = [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")]
    pickles = [name for name in top if name.endswith(".bin") or name == "medusa_lm_head.pt"] if allow_pickle and not safe else []
    return [name for name in top if name.endswith(WORDS)] + (safe + pickles if weights else [])


def check_room(folder: Path, needed: int, name: str, advice: str) -> None:
    """Refuse what does not fit on the disk of `folder`, before a byte of it is fetched. Raises ConfigError."""
    at = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(at).free
    if needed > free:
        said = f"{name} needs {needed / 1e9:.2f} GB more, and {folder} has {free / 1e9:.2f} GB free"
        raise ConfigError(f"{said}; make room, or {advice}", param="model.path")


def full(wrong: OSError) -> bool:
    """Whether the disk was full after all."""
    return wrong.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def alone(lock: Path, progress: Progress) -> Iterator[None]:
    """One process of this node at a time; the others wait, saying that they do. The kernel gives the lock back, however the holder ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(0, 1)
                time.sleep(LOOK_PERIOD_S)
        yield


def watched(work: Callable[[], Result], done: Callable[[], int], total: int, progress: Progress) -> Result:
    """`work()` on a thread of its own, while this one says how many of the `total` bytes are there."""
    results: list[Result | BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as wrong:
            results.append(wrong)

    thread = threading.Thread(target=run, name="rayneuron-fetch", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_PERIOD_S)
        progress(min(done(), total) // MB, max(1, total // MB))
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def logged(name: str) -> Progress:
    """Progress as lines of the log."""
    said = [time.monotonic(), -1.0]

    def progress(done: int, total: int) -> None:
        now = time.monotonic()
        if now - said[0] >= LINE_PERIOD_S and done != said[1]:
            said[:] = now, done
            log.info("%s: %d of %d MB fetched", name, done, total)

    return progress


def size(folder: Path) -> int:
    """Bytes of the files below a folder; one that comes and goes meanwhile counts or not."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return found
