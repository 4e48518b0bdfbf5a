"""A directory that is written aside and moved into place whole: what fails on the way leaves nothing that is in the way of the next try."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayneuron.errors import ConfigError


@contextmanager
def aside(target: Path) -> Iterator[Path]:
    """A new directory beside `target` that takes its place at the end. Raises ConfigError where there is something already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name a new directory")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = target.absolute().with_name(f".{target.absolute().name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
