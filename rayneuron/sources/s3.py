"""Models in a bucket, fetched aside with boto3 and moved into place when every file is what the bucket says it is."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayneuron import settings
from rayneuron.errors import CheckpointError, ConfigError, NotReady
from rayneuron.models import Progress
from rayneuron.sources.fetching import alone, check_room, full, size, wanted, watched

log = logging.getLogger(__name__)


def fetch(source: str, progress: Progress, *, weights: bool, allow_pickle: bool) -> tuple[Path, str]:
    """The directory of s3://bucket/prefix, and the same with #state, which another state of the bucket does not match.

    Raises ConfigError, CheckpointError or NotReady.
    """
    place, _, state = source.removeprefix("s3://").partition("#")
    place = place.rstrip("/")
    bucket, _, prefix = place.partition("/")
    prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    if not bucket:
        raise ConfigError(f"{source} needs a bucket: s3://bucket/prefix", param="model.path")
    with _said(place):
        client = _client(place)
        found = _listed(client, bucket, prefix)
        names = wanted(found, weights, allow_pickle)
        if "config.json" not in names:
            raise ConfigError(f"s3://{place} holds no config.json; write the prefix that stands before it", param="model.path")
        now = hashlib.sha256(repr([(name, found[name]) for name in wanted(found, True, allow_pickle)]).encode()).hexdigest()[:16]
        if state not in ("", now):
            raise NotReady(f"s3://{place} changed while it was fetched; start again")
        folder = settings.cache_dir() / "models" / "s3" / bucket / prefix
        target = folder / (now if weights else f"{now}-words")
        with alone(folder / f".{target.name}.lock", progress):
            if not target.is_dir():
                _download(client, bucket, prefix, {name: found[name] for name in names}, target, progress)
    return target, f"s3://{place}#{now}"


def _client(place: str) -> Any:
    try:
        import boto3
    except ImportError:
        raise ConfigError(f"s3://{place} needs boto3; run pip install 'rayneuron[s3]'", param="model.path") from None
    return boto3.client("s3")


def _listed(client: Any, bucket: str, prefix: str) -> dict[str, tuple[int, str]]:
    """name -> (bytes, ETag) of every object below the prefix."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    objects = [o for page in pages for o in page.get("Contents", ()) if not o["Key"].endswith("/")]
    return {o["Key"].removeprefix(prefix): (int(o["Size"]), o["ETag"].strip('"')) for o in objects}


def _download(client: Any, bucket: str, prefix: str, files: dict[str, tuple[int, str]], target: Path, progress: Progress) -> None:
    """What an earlier try has fetched is used again; everything is checked before it counts."""
    partial = target.with_name(f".{target.name}.partial")
    missing = [name for name, (length, _) in files.items() if not _has(partial / name, length)]
    total = sum(files[name][0] for name in missing)
    check_room(partial, total, f"s3://{bucket}/{prefix}", "set RAYNEURON_CACHE to a folder on a larger disk")
    log.info("fetching s3://%s/%s: %.2f GB", bucket, prefix, total / 1e9)

    def work() -> None:
        for name in missing:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, prefix + name, str(partial / name))
        for name, (length, tag) in files.items():
            if not _has(partial / name, length) or not _matches(client, bucket, prefix + name, partial / name, tag):
                (partial / name).unlink()
                raise CheckpointError(f"{name} of s3://{bucket}/{prefix} is not what the bucket says it is; start again to fetch it anew")

    before = size(partial)
    watched(work, lambda: size(partial) - before, total, progress)
    for file in partial.rglob("*"):
        if file.is_file() and str(file.relative_to(partial)) not in files:
            file.unlink()  # half a file, of a process that was killed
    os.replace(partial, target)


def _has(file: Path, length: int) -> bool:
    return file.is_file() and file.stat().st_size == length


def _matches(client: Any, bucket: str, key: str, file: Path, tag: str) -> bool:
    """Against the ETag, which is the MD5 of an object, or of the MD5s of its parts; encrypted with a key of KMS it is neither."""
    said = re.fullmatch(r"[0-9a-f]{32}(?:-(\d+))?", tag)
    head = client.head_object(Bucket=bucket, Key=key, **({"PartNumber": 1} if said and said[1] else {}))
    if said is None or str(head.get("ServerSideEncryption", "")).startswith("aws:kms"):
        return True
    part, length = int(head["ContentLength"]), file.stat().st_size
    digests = [_md5(file, start, part) for start in range(0, max(1, length), max(1, part))]
    if said[1] is None:
        return digests[0].hex() == tag
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}" == tag


def _md5(file: Path, start: int, length: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with open(file, "rb") as opened:
        opened.seek(start)
        while length > 0 and (block := opened.read(min(length, 1 << 22))):
            digest.update(block)
            length -= len(block)
    return digest.digest()


@contextmanager
def _said(place: str) -> Iterator[None]:
    """What went wrong, in one line with what to do about it; by names, so that boto3 is looked for only where it is needed."""
    try:
        yield
    except Exception as wrong:
        if isinstance(wrong, OSError) and full(wrong):
            said = f"the disk was full while s3://{place} was fetched; make room, or set RAYNEURON_CACHE"
            raise ConfigError(said, param="model.path") from None
        code = str(getattr(wrong, "response", {}).get("Error", {}).get("Code", "")) if type(wrong).__module__.startswith("boto") else None
        if code is None:
            raise
        line = " ".join(str(wrong).split())[:200]
        if code in ("NoSuchBucket", "AccessDenied", "403", "404", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled"):
            raise ConfigError(f"s3://{place} may not be read: {line}", param="model.path") from None
        if "Credentials" in type(wrong).__name__:
            raise ConfigError(f"s3://{place} needs credentials of AWS where the replica runs: {line}", param="model.path") from None
        raise NotReady(f"s3://{place} could not be fetched: {line}") from None
