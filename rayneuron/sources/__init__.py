"""Where models come from: a directory, a hub, a bucket, or the demo. What is fetched is fetched once a node, checked, and taken whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rayneuron import demo
from rayneuron.config import HUB_ID, Deployment
from rayneuron.errors import CheckpointError, ConfigError, NotReady
from rayneuron.models import Progress
from rayneuron.sources import hub, s3
from rayneuron.sources.fetching import logged

S3 = "s3://"
PATH, TOKENIZER, DRAFTS = "model.path", "model.tokenizer", "speculative_config.model"  # keys that name one
ADAPTERS = "lora.lora_modules"  # a key above those that name adapters


@dataclass(frozen=True, slots=True)
class Found:
    """A model directory of this node, and the `source` that gives another node the very same."""

    path: Path
    source: str


def resolve(source: str, progress: Progress | None = None, *, weights: bool = True, allow_pickle: bool = False) -> Found:
    """What `model.path` of a deployment names, made or fetched where it is not here yet; `progress` counts megabytes.

    weights: else only config and tokenizer files are fetched. Raises ConfigError or CheckpointError, NotReady where trying again may help.
    """
    if source.startswith("demo:"):
        return Found(demo.resolve(source), source)
    folder = Path(source).expanduser()
    if os.path.isdir(folder):  # false for a name that no directory can have, too
        return Found(folder, str(folder))
    fetch = _fetcher(source)
    return Found(*fetch(source, progress or logged(source), weights=weights, allow_pickle=allow_pickle))


def located(source: str) -> Path | None:
    """As `resolve`, but nothing is made, fetched or asked: None for what is not whole on this machine yet. Raises ConfigError."""
    if source.startswith("demo:"):
        return demo.located(source)
    folder = Path(source).expanduser()
    if os.path.isdir(folder):
        return folder
    return hub.located(source) if _fetcher(source) is hub.fetch else None


def all_of(config: Deployment) -> dict[str, str]:
    """Whatever a deployment has fetched, by the key that names it."""
    drafts = config.speculative_config
    said = {PATH: config.model.source, TOKENIZER: config.model.tokenizer, DRAFTS: None if drafts is None else drafts.model}
    return {key: source for key, source in said.items() if source is not None}


@contextmanager
def named(key: str) -> Iterator[None]:
    """Raise what is wrong with a source, or could not be fetched, with the key that names it."""
    try:
        yield
    except (ConfigError, CheckpointError, NotReady) as wrong:
        raise type(wrong)(f"{key}: {wrong.message}", param=key, retry_after_s=wrong.retry_after_s) from None


def ask(source: str, allow_pickle: bool = False) -> None:
    """Raise what `resolve` would of a hub's model before it fetches any of it, as far as the hub can say."""
    if not source.startswith("demo:") and not os.path.isdir(Path(source).expanduser()) and _fetcher(source) is hub.fetch:
        hub.ask(source, allow_pickle)


def _fetcher(source: str) -> hub.Fetch:
    if source.startswith(S3):
        return s3.fetch
    if HUB_ID.fullmatch(source) and not os.path.lexists(source):
        return hub.fetch
    raise ConfigError(f"{source!r} is not a directory; name a model directory, org/name of a hub, s3://bucket/prefix or demo:smollm2")
