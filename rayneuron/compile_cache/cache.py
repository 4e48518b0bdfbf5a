"""The compile cache: what a key says, one builder a key, and what a miss says about the nearest key.

An entry is a folder of files with a manifest of checksums. It is built aside and moved into place whole, so nobody sees half of one;
the builder holds a kernel file lock that ends with its process. An s3:// cache adds a bucket behind the folder, with a lease instead of
the lock between hosts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayneuron import settings
from rayneuron.compile_cache.folder import MANIFEST, Folder, damage
from rayneuron.compile_cache.s3 import S3
from rayneuron.errors import CompileError, ConfigError

log = logging.getLogger(__name__)

Builder = Callable[[Path], None]  # writes the entry's files into the folder it is given
OnWait = Callable[[str, float], None]  # what is waited for, seconds waited so far

MOST_WAIT_S = 3 * 3600.0  # the longest compile anybody reported took about an hour
_MOST_SAID = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _TELL_EVERY_S = 0.05, 2.0, 10.0
_FULL, _NOT_OURS = (errno.ENOSPC, errno.EDQUOT), (errno.EROFS, errno.EACCES, errno.EPERM)
FORBIDDEN = ("path", "weights", "port", "url", "folder", "directory", "address", "log_level")


@dataclass(frozen=True, slots=True)
class Key:
    """What an entry depends on, and nothing else. `kind`: graphs, native, packed...; `fields`: JSON values by name, sorted."""

    kind: str
    fields: tuple[tuple[str, Any], ...]

    @property
    def digest(self) -> str:
        """The entry's name: 32 hex digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return json.dumps([self.kind, {k: v for k, v in self.fields}], sort_keys=True, separators=(",", ":"))


def key(kind: str, **fields: Any) -> Key:
    """A key of JSON values (dataclasses and tuples are converted). Raises ValueError for what must not decide: weights, paths, ports."""
    for name in fields:
        if name in FORBIDDEN:
            raise ValueError(f"{name} may not be part of a compile key: the same program would be compiled again for nothing")
    return Key(kind, tuple(sorted((name, plain(value)) for name, value in fields.items())))


def plain(value: Any) -> Any:
    """A JSON value of dataclasses, mappings, sequences, dtypes and numbers, the same in every process."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(v) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    raise ValueError(f"{value!r} of type {type(value).__name__} cannot be part of a compile key")


def source_version(*files: Path) -> str:
    """A digest of source files: a program compiled from other source is another program."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def difference(wanted: Mapping[str, Any], found: Mapping[str, Any], within: str = "") -> list[str]:
    """Fields that differ, in words: "tp is 2 there, 4 here", "graphs has decode_b4 only here"."""
    out: list[str] = []
    for name in sorted({*wanted, *found}):
        here, there = wanted.get(name, "absent"), found.get(name, "absent")
        if here == there:
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            out += difference(here, there, f"{within}{name}.")
        elif _words(here) and _words(there):
            parts = [("only here", sorted({*here} - {*there})), ("only there", sorted({*there} - {*here}))]
            out += [f"{within}{name} has {_short(', '.join(names))} {where}" for where, names in parts if names]
        else:
            out.append(f"{within}{name} is {_short(there)} there, {_short(here)} here")
    return out


def said(differences: Sequence[str]) -> str:
    """The shortest few differences, which say most, and how many more there are."""
    more = len(differences) - _MOST_SAID
    return "; ".join(sorted(differences, key=len)[:_MOST_SAID]) + (f"; and {more} more" if more > 0 else "")


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value) and len(set(value)) == len(value)


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True) if not isinstance(value, str) else value
    return text if len(text) <= 400 else f"{text[:300]}... ({len(text)} characters)"


class Cache:
    """Entries by key, in a folder of this host and, for an s3:// address, in a bucket shared by all.

    `clock` (monotonic) and `sleep` are arguments so that waiting can be tested without waiting.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        require: bool = False,
        wait_s: float = MOST_WAIT_S,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`url`: a folder, file:///folder or s3://bucket/prefix; None: NEURON_COMPILE_CACHE_URL, else the package's cache folder.

        `require`: build nothing, an absent entry is an error. `folder`: the local side of an s3:// cache.
        """
        self.url = url or settings.compile_cache_url() or str(settings.cache_dir() / "compiled")
        scheme, _, rest = self.url.rpartition("://")
        if scheme not in ("", "file", "s3"):
            raise ConfigError(f"compile cache {self.url!r}: write a folder, file:///folder or s3://bucket/prefix")
        self.shared = S3(rest, clock=clock) if scheme == "s3" else None
        self.folder = Folder((folder or settings.cache_dir() / "compiled") if scheme == "s3" else Path(rest).expanduser())
        self._require, self._wait_s, self._clock, self._sleep = require, wait_s, clock, sleep

    def get(self, key: Key) -> Path | None:
        """The entry's folder, whole and checked, or None. A damaged one is removed."""
        found = self.folder.get(key.digest)
        if found is None and self.shared is not None and self.shared.manifest(key.digest) is not None:
            with self.folder.draft(key.digest) as draft:
                if self.shared.fetch(key.digest, draft):
                    found = self.folder.publish(key.digest, draft)
        return found

    def get_or_build(self, key: Key, build: Builder, waiting: OnWait | None = None) -> Path:
        """The entry's folder, built here if it is nowhere, by one process at a time; the others wait and then load what it built.

        Raises CompileError: absent although precompiled entries are required, another builder took longer than `wait_s`, or the folder
        cannot be written.
        """
        with _writing(self.folder.root):
            found = self.get(key)
            if found is not None:
                return found
            if self._require:
                raise CompileError(self.miss(key))
            deadline_s = self._clock() + self._wait_s
            report = _reporter(waiting or _silent)
            with self._alone(key, deadline_s, report):
                found = self.get(key)  # the one we waited for has built it
                return found if found is not None else self._build(key, build, deadline_s, report)

    def adopt(self, path: Path, kind: str) -> Path:
        """Take over an entry from a folder that `rayneuron compile --out` wrote. Raises ConfigError: damaged, or of another kind."""
        problem = damage(path)
        if problem is not None:
            raise ConfigError(
                f"{path} holds no whole compiled entry ({problem}); write it with `rayneuron compile DEPLOYMENT.yaml --out {path}`"
            )
        manifest = entry(path)
        if manifest["kind"] != kind:
            raise ConfigError(f"{path} holds {manifest['kind']}, and this device needs {kind}; compile this deployment again")
        name = str(manifest["digest"])
        found = self.folder.get(name)
        if found is not None:
            return found
        with self.folder.draft(name) as draft:
            shutil.copytree(path, draft, dirs_exist_ok=True)
            return self.folder.publish(name, draft)

    def miss(self, key: Key) -> str:
        """Why nothing fits: the difference to the nearest entry of the same kind."""
        entries = [*self.folder.manifests(), *(self.shared.manifests() if self.shared else [])]
        mine = dict(key.fields)
        others = [m["key"] for m in entries if m.get("kind") == key.kind and isinstance(m.get("key"), dict)]
        what = f"no precompiled {key.kind} {key.digest} in {self.url}"
        if not others:
            return f"{what}, and nothing else of its kind; run `rayneuron compile` with this deployment file first"
        nearest = min((difference(mine, other) for other in others), key=len)
        return f"{what}; the nearest differs: {said(nearest)}. Run `rayneuron compile` with this deployment file, or change it back"

    def _alone(self, key: Key, deadline_s: float, report: OnWait) -> Any:
        """The lock of this key, waited for. A lock whose owner died is free at once: the kernel lets go of it."""
        began, pause_s = self._clock(), _FIRST_PAUSE_S
        while True:
            lock = self.folder.lock(key.digest)
            if lock is not None:
                return lock
            owner = self.folder.owner(key.digest)
            self._pause(f"{key.kind} {key.digest} being built by {owner}", began, deadline_s, pause_s, report)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _build(self, key: Key, build: Builder, deadline_s: float, report: OnWait) -> Path:
        if self.shared is None:
            return self._make(key, build)
        began, pause_s = self._clock(), _FIRST_PAUSE_S
        while True:
            lease = self.shared.lease(key.digest)
            if lease is not None:
                with lease:
                    return self.get(key) or self._make(key, build)
            found = self.get(key)
            if found is not None:
                return found
            owner = self.shared.owner(key.digest)
            self._pause(f"{key.kind} {key.digest} being built by {owner}", began, deadline_s, pause_s, report)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _make(self, key: Key, build: Builder) -> Path:
        log.info("building %s %s", key.kind, key.digest)
        with self.folder.draft(key.digest) as draft:
            build(draft)
            self.folder.seal(draft, {"kind": key.kind, "key": dict(key.fields), "digest": key.digest})
            if self.shared is not None:
                self.shared.publish(key.digest, draft)
            return self.folder.publish(key.digest, draft)

    def _pause(self, what: str, began: float, deadline_s: float, pause_s: float, report: OnWait) -> None:
        now = self._clock()
        if now >= deadline_s:
            raise CompileError(f"waited {now - began:.0f} s for {what}; it is still alive. End it, or raise the wait")
        report(what, now - began)
        self._sleep(min(pause_s, deadline_s - now))


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Say what to do where a folder cannot be written: the disk is full, or it is not ours. Raises CompileError."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (*_FULL, *_NOT_OURS):
            raise
        more = "make room, or name" if problem.errno in _FULL else "name"
        raise CompileError(
            f"the compile cache {root} cannot be written: {problem.strerror} ({problem.filename or root}); {more} another folder in "
            "compile.cache (RAYNEURON_CACHE for everything). What was compiled before is kept"
        ) from None


def entry(folder: Path) -> dict[str, Any]:
    """The manifest of an entry's folder."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return manifest


def _reporter(waiting: OnWait) -> OnWait:
    told: list[float] = []

    def report(what: str, waited_s: float) -> None:
        waiting(what, waited_s)
        if not told or waited_s - told[-1] >= _TELL_EVERY_S:
            told.append(waited_s)
            log.info("waiting for %s (%.0f s)", what, waited_s)

    return report


def _silent(what: str, waited_s: float) -> None:
    return None
