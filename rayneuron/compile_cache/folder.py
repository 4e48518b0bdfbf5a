"""Cache entries in a folder: built aside, moved into place whole, locked by the kernel while being built, checked when read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_DRAFTS, _LOCKS = ".drafts", ".locks"
_CHUNK_BYTES = 1 << 20
_YOUNG_S = 60.0


class Lock:
    """The right to build one entry, held until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the next one build."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)  # an ending that was meant: the next owner has nobody to take over from
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Folder:
    """A folder of entries, each a sub-folder named by its digest. Hosts may share it over NFS: the lock is the kernel's there too."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str) -> Path | None:
        """The entry, every file checked against its manifest; None if there is none. A damaged one is moved away and said in the log."""
        path = self.root / name
        if not path.is_dir():
            return None
        problem = damage(path)
        if problem is None:
            return path
        log.warning("cache entry %s is damaged (%s) and will be built again", path, problem)
        self._remove(path)
        return None

    def lock(self, name: str) -> Lock | None:
        """The right to build, or None while somebody else has it. One whose owner died is taken over, with a line in the log."""
        path = self._hidden(_LOCKS) / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        before = os.pread(descriptor, 1000, 0).decode(errors="replace").strip("\0 \n")
        if before:
            log.warning("%s ended without finishing %s; this process takes over", before, name)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, whoami().encode(), 0)
        return Lock(descriptor)

    def owner(self, name: str) -> str:
        """Who builds the entry now, in words."""
        try:
            return (self._hidden(_LOCKS) / name).read_text().strip() or "another process"
        except OSError:
            return "another process"

    @contextmanager
    def draft(self, name: str) -> Iterator[Path]:
        """An empty folder to build in, gone afterwards unless it was published. Drafts of builders that died are removed."""
        drafts = self._hidden(_DRAFTS)
        locks = self._hidden(_LOCKS)
        for old in drafts.glob(f"{name}.*"):
            if not _held(old, locks / old.name):
                shutil.rmtree(old, ignore_errors=True)
                (locks / old.name).unlink(missing_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=drafts))
        alive = os.open(locks / path.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(alive, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            (locks / path.name).unlink(missing_ok=True)
            os.close(alive)

    def seal(self, draft: Path, fields: dict[str, Any]) -> None:
        """Write the manifest of a finished draft: `fields`, and size and checksum of every file."""
        files = {
            str(f.relative_to(draft)): {"bytes": f.stat().st_size, "sha256": checksum(f)}
            for f in sorted(draft.rglob("*"))
            if f.is_file() and f != draft / MANIFEST
        }
        manifest = {**fields, "files": files, "built_by": whoami(), "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))

    def publish(self, name: str, draft: Path) -> Path:
        """Move a sealed draft into place. Where another has published meanwhile, theirs stays."""
        for f in draft.rglob("*"):
            _flush(f)
        target = self.root / name
        os.chmod(draft, 0o755)
        try:
            os.rename(draft, target)
        except OSError:
            if damage(target) is not None:
                self._remove(target)
                os.rename(draft, target)
        _flush(self.root)
        return target

    def manifests(self) -> list[dict[str, Any]]:
        """What every entry says of itself."""
        found = []
        for path in sorted(self.root.glob(f"*/{MANIFEST}")):
            try:
                found.append(json.loads(path.read_text()))
            except (OSError, ValueError):
                continue
        return found

    def _hidden(self, part: str) -> Path:
        path = self.root / part
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _remove(self, path: Path) -> None:
        """Aside first, so that no reader meets a folder that is half deleted."""
        aside = Path(tempfile.mkdtemp(dir=self._hidden(_DRAFTS), prefix="removed."))
        try:
            os.rename(path, aside / path.name)
        except FileNotFoundError:
            pass
        shutil.rmtree(aside, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with an entry, None where nothing is."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        return f"manifest unreadable: {problem}"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"] or checksum(file) != expected["sha256"]:
            return f"{name} is not what was built"
    return None


def checksum(file: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def whoami() -> str:
    """This process, for people: "pid 12 on host"."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _held(draft: Path, lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return not draft.exists() or time.time() - draft.stat().st_mtime < _YOUNG_S  # already gone, or just being made
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse to flush a folder
    finally:
        os.close(descriptor)
