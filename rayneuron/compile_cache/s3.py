"""Cache entries in an S3 bucket: files by checksum, the manifest written last and once, a lease while an entry is being built."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rayneuron.compile_cache.folder import MANIFEST, checksum, whoami
from rayneuron.errors import CompileError, ConfigError

log = logging.getLogger(__name__)

LEASE_S = 120.0
_TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_GONE = ("NoSuchKey", "404", "NotFound")


class S3:
    """s3://`place`, place being bucket/prefix. An entry is visible once its manifest is; a failed upload is never referred to."""

    def __init__(self, place: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, _, prefix = place.partition("/")
        if not self.name:
            raise ConfigError("compile cache s3:// needs a bucket: s3://bucket/prefix")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._clock = clock
        try:
            import boto3
        except ImportError:
            raise ConfigError(f"compile cache s3://{place} needs boto3; run pip install boto3") from None
        self._s3 = boto3.client("s3")
        self._seen: dict[str, tuple[str, float]] = {}  # lease -> (its version, when it was first seen so)

    def manifest(self, name: str) -> dict[str, Any] | None:
        """The manifest of an entry, None where there is none."""
        data = self._read(f"{name}/{MANIFEST}")
        return None if data is None else json.loads(data[0])

    def manifests(self) -> list[dict[str, Any]]:
        """What every entry says of itself."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self._prefix)
        names = [o["Key"] for page in pages for o in page.get("Contents", ()) if o["Key"].endswith(f"/{MANIFEST}")]
        return [m for m in (self.manifest(n.removeprefix(self._prefix).split("/")[0]) for n in names) if m is not None]

    def fetch(self, name: str, draft: Path) -> bool:
        """Copy an entry into `draft`; False, and the entry taken out of sight, where a file is missing or not what was built."""
        manifest = self._read(f"{name}/{MANIFEST}")
        if manifest is None:
            return False
        for file, expected in json.loads(manifest[0])["files"].items():
            target = draft / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._s3.download_file(self.name, self._key(f"files/{expected['sha256']}"), str(target))
                whole = checksum(target) == expected["sha256"]
            except self._s3.exceptions.ClientError as problem:
                if _code(problem) not in _GONE:
                    raise
                whole = False
            if not whole:
                log.warning("cache entry %s in s3://%s is damaged (%s) and will be built again", name, self.name, file)
                self._s3.delete_object(Bucket=self.name, Key=self._key(f"{name}/{MANIFEST}"))
                self._s3.delete_object(Bucket=self.name, Key=self._key(f"files/{expected['sha256']}"))
                return False
        (draft / MANIFEST).write_bytes(manifest[0])
        return True

    def publish(self, name: str, draft: Path) -> None:
        """Upload a sealed draft. Raises CompileError where another has published other files under the same name."""
        text = (draft / MANIFEST).read_bytes()
        files = json.loads(text)["files"]
        for file, expected in files.items():
            self._s3.upload_file(str(draft / file), self.name, self._key(f"files/{expected['sha256']}"))
        if self._write(f"{name}/{MANIFEST}", text, IfNoneMatch="*"):
            return
        theirs = self.manifest(name)
        if theirs is None:  # taken out of sight between the two calls
            return self.publish(name, draft)
        if theirs["files"] != files:
            raise CompileError(
                f"{theirs.get('built_by', 'another process')} has published other files under cache entry {name} in s3://{self.name}: "
                "the key misses something the result depends on, or the compiler is not deterministic. Delete the entry to replace it"
            )

    def lease(self, name: str) -> Lease | None:
        """The right to build among all hosts, or None while somebody else has it. A lease nobody renews is taken over."""
        key = f"{name}/lease"
        version = self._claim(key, IfNoneMatch="*")
        if version is None:
            found = self._read(key)
            if found is None or not self._expired(key, found[1]):
                return None
            log.warning("%s has not renewed its lease of %s for %.0f s; this process takes over", found[0].decode(), name, LEASE_S)
            version = self._claim(key, IfMatch=found[1])
        return None if version is None else Lease(self, key, version)

    def owner(self, name: str) -> str:
        """Who builds the entry now, in words."""
        found = self._read(f"{name}/lease")
        return found[0].decode().split(" #")[0] if found else "another process"

    def renew(self, key: str, version: str) -> str | None:
        """A new version of a lease this process holds, None if it has been taken over."""
        return self._claim(key, IfMatch=version)

    def release(self, key: str, version: str) -> None:
        """Give a lease back if it is still ours."""
        found = self._read(key)
        if found is not None and found[1] == version:
            self._s3.delete_object(Bucket=self.name, Key=self._key(key))

    def _expired(self, key: str, version: str) -> bool:
        """Seen in the same version for longer than a lease lasts, by our own clock: the clocks of other hosts are not asked."""
        seen, since = self._seen.get(key, ("", 0.0))
        if seen != version:
            self._seen[key] = (version, self._clock())
            return False
        return self._clock() - since > LEASE_S

    def _claim(self, key: str, **condition: str) -> str | None:
        return self._write(key, f"{whoami()} #{uuid.uuid4().hex}".encode(), **condition)

    def _write(self, key: str, data: bytes, **condition: str) -> str | None:
        """Put an object under a condition; its version, or None where the condition fails."""
        try:
            return str(self._s3.put_object(Bucket=self.name, Key=self._key(key), Body=data, **condition)["ETag"])
        except self._s3.exceptions.ClientError as problem:
            if _code(problem) in (*_TAKEN, *_GONE):
                return None
            raise

    def _read(self, key: str) -> tuple[bytes, str] | None:
        try:
            found = self._s3.get_object(Bucket=self.name, Key=self._key(key))
            return found["Body"].read(), str(found["ETag"])
        except self._s3.exceptions.ClientError as problem:
            if _code(problem) in _GONE:
                return None
            raise

    def _key(self, name: str) -> str:
        return self._prefix + name


class Lease:
    """A lease that renews itself three times in its life until the `with` block ends."""

    def __init__(self, store: S3, key: str, version: str) -> None:
        self._store, self._key, self._version = store, key, version
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="rayneuron-lease", daemon=True)

    def _keep(self) -> None:
        while not self._ended.wait(LEASE_S / 3):
            version = self._store.renew(self._key, self._version)
            if version is None:
                log.warning("the lease %s was taken over; what is being built here will be compared with theirs", self._key)
                return
            self._version = version

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._store.release(self._key, self._version)


def _code(problem: Any) -> str:
    return str(problem.response["Error"]["Code"])
