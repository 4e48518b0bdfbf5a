"""API keys: read from where a deployment file says they are, kept as digests only, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rayneuron import settings
from rayneuron.errors import ConfigError

MARK = "sha256:"
_NOTHING = hashlib.sha256(b"").hexdigest()


def read(sources: Iterable[str], key: str = "serving.api_keys") -> tuple[bytes, ...]:
    """Digests of the keys that `env:NAME`, `file:PATH` (one a line, or its digest as sha256:HEX) and `sha256:HEX` name.

    Raises ConfigError, without a word of what was read, for a source that is absent or holds no key.
    """
    found = []
    for source in sources:
        held = [_digest(word, f"{key}: {source}") for word in _words(source, key)]
        if not held:
            raise ConfigError(f"{key}: {source} is empty or blank; put a key there, or leave the entry out", param=key)
        found += held
    return tuple(dict.fromkeys(found))


def by_account(said: Mapping[str, tuple[str, Iterable[str]]]) -> dict[str, tuple[bytes, ...]]:
    """Digests of each account's keys. `said`: the file's key, and the sources under it. Raises ConfigError, also for a key of two."""
    found: dict[str, tuple[bytes, ...]] = {}
    for name, (key, sources) in said.items():
        held = read(sources, key)
        for other, theirs in found.items():
            if set(held) & set(theirs):
                raise ConfigError(f"{key}: a key of {other} is among them, and calls with it could be either's; leave one out", param=key)
        found[name] = held
    return found


def accepts(known: Iterable[bytes], given: bytes) -> bool:
    """Whether `given` is one of the keys. Takes the same time whichever it is, and if it is none."""
    digest = hashlib.sha256(given).digest()
    return any([hmac.compare_digest(digest, one) for one in known])  # a list: every one is compared


def shown(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a call shows: a bearer's, or that of Anthropic's header."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _words(source: str, key: str) -> Iterator[str]:
    kind, _, place = source.partition(":")
    if kind == "env":
        value = settings.variable(place)
        if value is None:
            raise ConfigError(
                f"{key}: the variable {place} of {source} is not set on this machine; export it, or leave the entry out", param=key
            )
        lines = [value]
    elif kind == "file":
        try:
            lines = Path(place).expanduser().read_text("utf-8").splitlines()
        except (OSError, ValueError) as problem:
            why = problem.strerror if isinstance(problem, OSError) else "it is no UTF-8 text"
            raise ConfigError(f"{key}: {source} cannot be read: {why}", param=key) from None
    else:
        lines = [source]
    return (line.strip() for line in lines if line.strip())


def _digest(word: str, where: str) -> bytes:
    if not word.startswith(MARK):
        return hashlib.sha256(word.encode()).digest()
    digits = word.removeprefix(MARK).lower()
    if len(digits) != 64 or not all(digit in "0123456789abcdef" for digit in digits) or digits == _NOTHING:
        raise ConfigError(f"{where}: sha256: needs the 64 hex digits of a key that is not empty, as sha256sum prints them")
    return bytes.fromhex(digits)
