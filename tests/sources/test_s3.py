"""Models in a bucket, against moto's S3: whole or not at all, taken up again, checked, the same state on every node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayneuron import sources
from rayneuron.errors import CheckpointError, ConfigError, NotReady, RayNeuronError
from rayneuron.sources import s3
from tests.sources.hub_server import folder

boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto")
PLACE = "s3://models/team/tiny"
WEIGHTS = "model.safetensors"
PART = 5 * 2**20


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path) -> Iterator[Any]:
    """A client of the bucket, with the tiny model below the prefix, and an empty cache."""
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "cache"))
    with moto.mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        for name, data in {**folder(tiny), "README.md": b"# tiny", "old/model.safetensors": b"1"}.items():
            client.put_object(Bucket="models", Key=f"team/tiny/{name}", Body=data)
        yield client


def refused(source: str, kind: type[RayNeuronError], *says: str) -> None:
    with pytest.raises(kind) as caught:
        sources.resolve(source)
    for word in says:
        assert word in caught.value.message
    assert "\n" not in caught.value.message


def made(tmp_path: Path) -> list[Path]:
    """Directories that a start would take for a model."""
    return [path for path in (tmp_path / "cache").rglob("*") if (path / "config.json").is_file() and not path.name.startswith(".")]


def test_it_is_fetched_once_and_read_again(bucket: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    found = sources.resolve(f"{PLACE}/", lambda done, total: seen.append((done, total)))
    assert folder(found.path) == folder(tiny) and seen and sources.located(PLACE) is None
    monkeypatch.setattr(s3, "_download", lambda *_: pytest.fail("it is here"))
    assert sources.resolve(PLACE) == sources.resolve(found.source) == found


def test_a_large_object_in_parts_is_checked_by_the_sums_of_its_parts(bucket: Any, tiny: Path, tmp_path: Path) -> None:
    upload = bucket.create_multipart_upload(Bucket="models", Key="big/model.safetensors")["UploadId"]
    parts = []
    for number, data in ((1, b"a" * PART), (2, b"b" * 100)):
        sent = bucket.upload_part(Bucket="models", Key="big/model.safetensors", UploadId=upload, PartNumber=number, Body=data)
        parts.append({"PartNumber": number, "ETag": sent["ETag"]})
    bucket.complete_multipart_upload(Bucket="models", Key="big/model.safetensors", UploadId=upload, MultipartUpload={"Parts": parts})
    bucket.put_object(Bucket="models", Key="big/config.json", Body=b"{}")
    path = sources.resolve("s3://models/big").path
    assert (path / WEIGHTS).read_bytes() == b"a" * PART + b"b" * 100
    tag = bucket.head_object(Bucket="models", Key="big/model.safetensors")["ETag"].strip('"')
    assert tag.endswith("-2")
    (tmp_path / "damaged").write_bytes(b"a" * PART + b"c" * 100)
    assert s3._matches(bucket, "models", "big/model.safetensors", path / WEIGHTS, tag)
    assert not s3._matches(bucket, "models", "big/model.safetensors", tmp_path / "damaged", tag)


def test_a_fetch_that_breaks_off_is_taken_up(bucket: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, fetched = Broken(bucket, WEIGHTS, ConnectionResetError("gone")), []
    monkeypatch.setattr(s3, "_client", lambda place: broken)
    with pytest.raises(ConnectionResetError):
        sources.resolve(PLACE)
    assert made(tmp_path) == []
    broken.fault, broken.seen = None, fetched
    assert folder(sources.resolve(PLACE).path) == folder(tiny)
    assert WEIGHTS in fetched and "config.json" not in fetched, "what was whole is kept"


def test_what_arrives_damaged_is_refused_and_fetched_anew(bucket: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(bucket, WEIGHTS, "damaged")
    monkeypatch.setattr(s3, "_client", lambda place: broken)
    refused(PLACE, CheckpointError, WEIGHTS, "is not what the bucket says it is")
    assert made(tmp_path) == []
    broken.fault = None
    assert folder(sources.resolve(PLACE).path) == folder(tiny)


def test_another_node_has_the_same_state_or_says_so(bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = sources.resolve(PLACE)
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "cache" / "other"))
    other = sources.resolve(found.source)
    assert other.source == found.source and other.path != found.path
    bucket.put_object(Bucket="models", Key="team/tiny/config.json", Body=b"{}")
    refused(found.source, NotReady, "changed while it was fetched")
    assert sources.resolve(PLACE).path != other.path


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("s3://none/tiny", "may not be read"),
        ("s3://models/team", "holds no config.json; write the prefix"),
        ("s3:///tiny", "needs a bucket: s3://bucket/prefix"),
    ],
)
def test_what_is_wrong_is_one_line(bucket: Any, source: str, says: str, tmp_path: Path) -> None:
    refused(source, ConfigError, says)
    assert made(tmp_path) == []


def test_a_disk_without_room_is_refused_before_anything_is_fetched(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayneuron.sources.fetching.shutil.disk_usage", lambda at: SimpleNamespace(free=1))
    refused(PLACE, ConfigError, "needs 0.00 GB more", "set RAYNEURON_CACHE")
    assert made(tmp_path) == [] and not list(tmp_path.rglob(WEIGHTS))


class Broken:
    """A client whose downloads of one file break off half-way (an error), or arrive with a bit changed."""

    def __init__(self, client: Any, name: str, fault: Any) -> None:
        self.client, self.name, self.fault = client, name, fault
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def download_file(self, bucket: str, key: str, target: str) -> None:
        name = key.rpartition("/")[2]
        self.seen.append(name)
        if name == self.name and isinstance(self.fault, Exception):
            Path(f"{target}.1a2b3c").write_bytes(b"half")
            raise self.fault
        self.client.download_file(bucket, key, target)
        if name == self.name and self.fault == "damaged":
            data = Path(target).read_bytes()
            Path(target).write_bytes(bytes([data[0] ^ 1]) + data[1:])
