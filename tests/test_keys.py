"""Keys: where they are read, what is refused, and that nothing of one is ever said."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rayneuron import keys
from rayneuron.errors import ConfigError


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_every_source_gives_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_KEY", " from-env\n")
    file = tmp_path / "keys"
    file.write_text(f"first\n\nsecond \nsha256:{digest('third').upper()}\n")
    known = keys.read(["env:ONE_KEY", f"file:{file}", f"sha256:{digest('fourth')}", "env:ONE_KEY"])
    assert len(known) == 5
    for key in ("from-env", "first", "second", "third", "fourth"):
        assert keys.accepts(known, key.encode())
    for key in ("", " ", "firs", "first\n", digest("third"), f"sha256:{digest('third')}", "from-envfirst"):
        assert not keys.accepts(known, key.encode())
    assert not any(word in repr(known) for word in ("first", "from-env"))


def test_a_key_is_of_one_account() -> None:
    mine, theirs = f"sha256:{digest('a')}", f"sha256:{digest('b')}"
    said = {"one": ("tenants.one.keys", [mine]), "two": ("tenants.two.keys", [theirs])}
    assert {name: len(found) for name, found in keys.by_account(said).items()} == {"one": 1, "two": 1}
    with pytest.raises(ConfigError, match=r"tenants\.two\.keys: a key of one is among them"):
        keys.by_account({**said, "two": ("tenants.two.keys", [theirs, mine])})


@pytest.mark.parametrize(("held", "says"), [(None, "is not set"), ("", "empty or blank"), (" \n\t", "empty or blank")])
def test_an_absent_or_blank_variable(held: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONE_KEY", raising=False)
    if held is not None:
        monkeypatch.setenv("ONE_KEY", held)
    with pytest.raises(ConfigError, match=rf"serving.api_keys: .*ONE_KEY.*{says}"):
        keys.read(["env:ONE_KEY"])


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (None, "No such file"),
        (b"", "empty or blank"),
        (b"\n \n", "empty or blank"),
        (b"geheim\nsha256:geheim", "64 hex digits"),
        (b"geheim\nsha256:" + digest("").encode(), "not empty"),
        (b"geheim\xff", "no UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_key(held: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if held is not None:
        file.write_bytes(held)
    with pytest.raises(ConfigError, match=says) as caught:
        keys.read([f"file:{file}"])
    assert "geheim" not in caught.value.message and caught.value.__cause__ is None


def test_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many comparisons whichever key is given: how long it takes tells nothing."""
    known = keys.read([f"sha256:{digest(str(n))}" for n in range(5)])
    counts = []
    for given in (b"0", b"4", b"none"):
        seen: list[bytes] = []
        monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b, seen=seen: seen.append(b) or a == b)
        keys.accepts(known, given)
        counts.append(len(seen))
    assert counts == [5, 5, 5]
