"""Models of a hub: huggingface_hub fetches them into its own cache; here they are checked, and noted once they are whole."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rayneuron import settings
from rayneuron.config import HUB_ID
from rayneuron.errors import CheckpointError, ConfigError, NotReady
from rayneuron.models import Progress
from rayneuron.sources.fetching import alone, check_room, full, size, wanted, watched

log = logging.getLogger(__name__)

Fetch = Callable[..., tuple[Path, str]]

COMMIT = re.compile(r"[0-9a-f]{40}")
ATTEMPTS = 2
ROOM = "set HF_HOME to a folder on a larger disk"
HASHES_AT_ONCE = 4


def fetch(source: str, progress: Progress, *, weights: bool, allow_pickle: bool) -> tuple[Path, str]:
    """The directory of org/name[@revision], and org/name@commit. Raises ConfigError, CheckpointError or NotReady."""
    name, revision = _split(source)
    known = _noted(name, revision)
    if known is not None and (settings.hub_offline() or COMMIT.fullmatch(revision)):
        return known, f"{name}@{known.name}"
    with _said(name, revision):
        from huggingface_hub import snapshot_download

        at: dict[str, Any] = {"endpoint": settings.hub_endpoint(), "token": settings.hub_token()}
        if settings.hub_offline():
            path = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns="config.json"))
            if damaged := watched(lambda: _damaged(path), lambda: 0, 1, progress):
                raise CheckpointError(f"{damaged[0]} is damaged (its checksum differs); delete it, and fetch it where there is a network")
            _write_note(name, revision, path)
            return path, f"{name}@{path.name}"
        try:
            commit, sizes = _listed(name, revision, at)
        except ConnectionError:
            raise
        except Exception as wrong:
            if known is None or not _unreachable(wrong):
                raise
            log.warning("%s: the hub does not answer, so the commit it had last is used: %s", name, known.name)
            return known, f"{name}@{known.name}"
        names = wanted(sizes, weights, allow_pickle)
        with alone(_note(name, commit).with_suffix(".lock"), progress):
            path = _noted(name, commit) or _folder(name) / "snapshots" / commit
            missing = sum(sizes[n] for n in names if not (path / n).exists())
            if _noted(name, commit) is None:
                check_room(_folder(name), missing, name, ROOM)
                path = _download({**at, "repo_id": name, "revision": commit, "allow_patterns": names}, missing, progress)
            if weights:
                for one in (revision, commit):
                    _write_note(name, one, path)
    return path, f"{name}@{commit}"


def ask(source: str, allow_pickle: bool) -> None:
    """Refuse what could not be fetched: no such model or revision, no access, no room. Asks the hub, unless it was fetched whole before."""
    name, revision = _split(source)
    if _noted(name, revision) is not None or settings.hub_offline():
        return
    with _said(name, revision):
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        endpoint, token = settings.hub_endpoint(), settings.hub_token()
        commit, sizes = _listed(name, revision, {"endpoint": endpoint, "token": token})
        names = wanted(sizes, True, allow_pickle)
        for one in names[:1]:  # a gated model lists its files to everybody
            get_hf_file_metadata(hf_hub_url(name, one, revision=commit, endpoint=endpoint), token=token, endpoint=endpoint)
        path = _folder(name) / "snapshots" / commit
        missing = sum(sizes[n] for n in names if not (path / n).exists())
        check_room(_folder(name), missing, name, ROOM)


def located(source: str) -> Path | None:
    """The directory, where it was fetched whole before. Asks no hub."""
    return _noted(*_split(source))


def _split(source: str) -> tuple[str, str]:
    said = HUB_ID.fullmatch(source)
    assert said is not None
    return said["id"], said["revision"] or "main"


def _listed(name: str, revision: str, at: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """The commit of a revision, and its files with their sizes."""
    from huggingface_hub import HfApi

    info = HfApi(**at).model_info(name, revision=revision, files_metadata=True)
    return str(info.sha), {s.rfilename: int((s.lfs.size if s.lfs else s.size) or 0) for s in info.siblings or ()}


def _download(what: dict[str, Any], missing: int, progress: Progress) -> Path:
    """Fetch what is missing of a commit, and once more what arrived damaged."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    name, blobs = what["repo_id"], _folder(what["repo_id"]) / "blobs"
    before = size(blobs)
    log.info("fetching %s at %s: %.2f GB", name, what["revision"], missing / 1e9)
    for attempt in range(ATTEMPTS):
        path = Path(watched(lambda: snapshot_download(**what), lambda: size(blobs) - before, missing, progress))
        damaged = watched(lambda path=path: _damaged(path), lambda: missing, missing, progress)  # type: ignore[misc]
        if not damaged:
            return path
        said = ", ".join(file.name for file in damaged)
        log.warning("%s: %s is not what the hub says it is%s", name, said, "" if attempt else "; fetching it again")
        for file in damaged:
            blob = file.parent / os.readlink(file)
            for one in (blob.resolve(), blob, file):
                one.unlink(missing_ok=True)
    raise CheckpointError(f"{name}: {said} arrived damaged {ATTEMPTS} times (its checksum differs); nothing of it was kept")


def _damaged(path: Path) -> list[Path]:
    """Files of a snapshot whose bytes are not what their names in the cache say: sha256, or git's sha1."""
    links = [file for file in sorted(path.rglob("*")) if file.is_symlink()]
    with ThreadPoolExecutor(HASHES_AT_ONCE) as pool:
        return [file for file, right in zip(links, pool.map(_is_whole, links), strict=True) if not right]


def _is_whole(file: Path) -> bool:
    expected = Path(os.readlink(file)).name
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", expected):
        return True  # a mirror's own tag: only the length was checked
    digest = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(b"blob %d\0" % file.stat().st_size)
    with open(file, "rb") as opened:
        while block := opened.read(1 << 22):
            digest.update(block)
    return digest.hexdigest() == expected


def _folder(name: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _note(name: str, revision: str) -> Path:
    return settings.cache_dir() / "models" / "hub" / f"{name.replace('/', '--')}@{quote(revision, safe='')}.json"


def _noted(name: str, revision: str) -> Path | None:
    try:
        path = Path(json.loads(_note(name, revision).read_text())["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if (path / "config.json").is_file() else None


def _write_note(name: str, revision: str, path: Path) -> None:
    note = _note(name, revision)
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_name(f".{note.name}.{os.getpid()}")
    partial.write_text(json.dumps({"path": str(path)}))
    partial.replace(note)


def _unreachable(wrong: BaseException) -> bool:
    """No answer, or one that says the hub is ill; by names, for httpx and requests each have a tree of their own."""
    status = getattr(getattr(wrong, "response", None), "status_code", None)
    names = {kind.__name__ for kind in type(wrong).__mro__}
    return (status is None or status >= 500) and bool(names & {"TransportError", "ConnectionError", "RequestException", "HTTPError"})


@contextmanager
def _said(name: str, revision: str) -> Iterator[None]:
    """What went wrong, in one line with what to do about it."""
    from huggingface_hub import errors

    hub = settings.hub_endpoint() or "https://huggingface.co"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name} is gated: accept its terms at {hub}/{name}, and set HF_TOKEN to a token of that account", param="model.path"
        ) from None
    except errors.RevisionNotFoundError:
        said = f"{name} has no revision {revision!r}; write a branch, tag or commit of {hub}/{name}"
        raise ConfigError(said, param="model.path") from None
    except errors.RepositoryNotFoundError:
        said = f"{name} is neither a directory here nor a model of {hub} that may be read"
        raise ConfigError(f"{said}; correct the name, or set HF_TOKEN where it is private", param="model.path") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as absent:
        if not settings.hub_offline():
            raise NotReady(f"{name} could not be fetched from {hub}: {_line(absent.__cause__ or absent)}") from None
        said = f"{name}@{revision} is not whole in the cache, and HF_HUB_OFFLINE forbids to fetch it"
        raise ConfigError(f"{said}; unset it, or fetch the model where there is a network", param="model.path") from None
    except errors.HFValidationError as wrong:
        raise ConfigError(f"{name} is no name of a model: {_line(wrong)}", param="model.path") from None
    except Exception as wrong:
        if isinstance(wrong, OSError) and full(wrong):
            raise ConfigError(f"the disk was full while {name} was fetched; make room, or set HF_HOME", param="model.path") from None
        status = getattr(getattr(wrong, "response", None), "status_code", None)
        if status in (401, 403):
            raise ConfigError(f"{hub} refuses {name} ({status}); set HF_TOKEN to a token that may read it", param="model.path") from None
        if _unreachable(wrong) or (isinstance(wrong, OSError) and "onsistency" in str(wrong)):
            raise NotReady(f"{name} could not be fetched from {hub}: {_line(wrong)}") from None
        raise


def _line(wrong: BaseException) -> str:
    return " ".join(str(wrong).split())[:200] or type(wrong).__name__
