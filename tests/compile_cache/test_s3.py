"""The compile cache over S3, against moto's S3: shared between hosts, one builder by lease, damage, and two writers of one key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayneuron.compile_cache.cache import Cache, key
from rayneuron.errors import CompileError
from tests.compile_cache.test_cache import never, write

boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto")
URL = "s3://graphs/cache/v1"
MINE = key("graphs", n=1)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with moto.mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="graphs")
        yield client


def host(tmp_path: Path, name: str, **options) -> Cache:
    return Cache(URL, folder=tmp_path / name, **options)


def names(s3) -> set[str]:
    return {o["Key"] for o in s3.list_objects_v2(Bucket="graphs").get("Contents", ())}


def test_one_host_builds_the_other_loads(s3, tmp_path: Path) -> None:
    first = host(tmp_path, "a").get_or_build(MINE, write("neff"))
    second = host(tmp_path, "b").get_or_build(MINE, never)
    assert first != second and (second / "deep" / "graph.neff").read_text() == "neff"
    assert f"cache/v1/{MINE.digest}/manifest.json" in names(s3) and f"cache/v1/{MINE.digest}/lease" not in names(s3)


def test_hosts_wait_for_the_lease(s3, tmp_path: Path) -> None:
    building, go, waiting, out = threading.Event(), threading.Event(), threading.Event(), {}

    def slow(folder: Path) -> None:
        building.set()
        assert go.wait(60)
        write("slow")(folder)

    def run(name: str, build) -> None:
        out[name] = host(tmp_path, name).get_or_build(MINE, build, lambda what, s: waiting.set())

    first = threading.Thread(target=run, args=("a", slow))
    first.start()
    assert building.wait(60)
    second = threading.Thread(target=run, args=("b", never))
    second.start()
    assert waiting.wait(60)
    go.set()
    first.join(60)
    second.join(60)
    assert (out["b"] / "deep" / "graph.neff").read_text() == "slow"


def test_a_lease_nobody_renews_is_taken_over(s3, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    dead = host(tmp_path, "a").shared.lease(MINE.digest)  # never entered: nobody renews it
    assert dead is not None
    b = host(tmp_path, "b", clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    assert (b.get_or_build(MINE, write("b")) / "deep" / "graph.neff").read_text() == "b"
    assert 120 < now[0] < 130 and "takes over" in caplog.text


def test_a_renewed_lease_is_not(s3, tmp_path: Path) -> None:
    now, heard = [0.0], []
    store = host(tmp_path, "a").shared
    version = store.lease(MINE.digest)._version

    def sleep(s: float) -> None:
        nonlocal version
        now[0] += s
        if now[0] // 30 > len(heard):
            heard.append(now[0])
            version = store.renew(f"{MINE.digest}/lease", version)

    b = host(tmp_path, "b", clock=lambda: now[0], sleep=sleep, wait_s=180)  # one that nobody renews is over by 130
    with pytest.raises(CompileError, match="waited 180 s for graphs .* being built by pid"):
        b.get_or_build(MINE, never)
    assert len(heard) == 6


def test_two_writers_of_one_key(s3, tmp_path: Path) -> None:
    """BR-31: the same content is no conflict, other content under the same key is an error that says so."""
    a, b, c = (host(tmp_path, name) for name in "abc")
    drafts = []
    for cache, text in ((a, "same"), (b, "same"), (c, "other")):
        folder = tmp_path / f"draft-{len(drafts)}"
        folder.mkdir()
        write(text)(folder)
        cache.folder.seal(folder, {"kind": "graphs", "key": {"n": 1}})
        drafts.append(folder)
    a.shared.publish(MINE.digest, drafts[0])
    b.shared.publish(MINE.digest, drafts[1])
    with pytest.raises(CompileError, match="has published other files under cache entry"):
        c.shared.publish(MINE.digest, drafts[2])


@pytest.mark.parametrize("harm", ["change", "delete"])
def test_damage_in_the_bucket(s3, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    host(tmp_path, "a").get_or_build(MINE, write("neff"))
    neff = next(n for n in names(s3) if "/files/" in n and s3.get_object(Bucket="graphs", Key=n)["Body"].read() == b"neff")
    if harm == "change":
        s3.put_object(Bucket="graphs", Key=neff, Body=b"nefg")
    else:
        s3.delete_object(Bucket="graphs", Key=neff)
    assert (host(tmp_path, "b").get_or_build(MINE, write("neff")) / "deep" / "graph.neff").read_text() == "neff"
    assert "damaged" in caplog.text
    assert (host(tmp_path, "c").get_or_build(MINE, never) / "deep" / "graph.neff").read_text() == "neff"


def test_an_upload_that_dies_is_invisible(s3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = host(tmp_path, "a")
    monkeypatch.setattr(a.shared._s3, "upload_file", lambda *_: (_ for _ in ()).throw(OSError("network")))
    with pytest.raises(OSError, match="network"):
        a.get_or_build(MINE, write("x"))
    assert host(tmp_path, "b").get(MINE) is None
    assert (host(tmp_path, "b").get_or_build(MINE, write("y")) / "deep" / "graph.neff").read_text() == "y"


def test_required_names_the_nearest_in_the_bucket(s3, tmp_path: Path) -> None:
    host(tmp_path, "a").get_or_build(key("graphs", n=1, tp=2), write("x"))
    with pytest.raises(CompileError, match="tp is 2 there, 4 here"):
        host(tmp_path, "b", require=True).get_or_build(key("graphs", n=1, tp=4), never)
