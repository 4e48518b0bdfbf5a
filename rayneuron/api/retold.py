"""A body of another dialect, told as one of ours: errors about our fields are said with the names that the body had."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rayneuron.errors import RequestError

KEPT = ("model", "input_tokens")  # the same everywhere


@contextmanager
def said_as(names: Mapping[str, str], prefix: str = "") -> Iterator[None]:
    """Say errors about the fields `names` (ours to theirs) with theirs; `prefix` is where all others stand."""
    try:
        yield
    except RequestError as wrong:
        ours, rest = re.match(r"(\w*)(.*)", wrong.param or "", re.S).groups()  # type: ignore[union-attr]
        theirs = names.get(ours) or (ours if not ours or ours in KEPT or ours.startswith("parameters") else prefix + ours)
        if theirs == ours:
            raise
        said = re.sub(rf"(?<![\w.]){re.escape(ours)}\b", lambda _: theirs, wrong.message)
        raise type(wrong)(said, param=theirs + rest, retry_after_s=wrong.retry_after_s) from wrong
