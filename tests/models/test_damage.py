"""Damaged safetensors files and damaged or exchanged files cut ahead: refused by name, as safetensors itself refuses them, never read."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rayneuron import models, preflight
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import heads, hub, presharded, rotary, safe_header
from tests.models import cases

HELD = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(8).to(torch.int8), "c": torch.zeros(0, 4), "d": torch.tensor(2.5)}
ABSENT = object()


def theirs(path: Path) -> dict[str, torch.Tensor] | None:
    """What safetensors reads, None where it refuses."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    except Exception:
        return None


def ours(path: Path) -> dict[str, torch.Tensor] | str:
    """What we read, or why not."""
    try:
        file = hub.SafeFile(path)
        return {name: file.tensor(name) for name in file.entries}
    except CheckpointError as error:
        assert str(path) in str(error)
        return str(error)


def read_alike(path: Path, what: str) -> None:
    """Never more than safetensors reads, never anything else; less where a name comes twice, or of a dtype nothing here computes with."""
    a, b = ours(path), theirs(path)
    if isinstance(a, str):
        assert b is None or "appears twice" in a or any(t.dtype not in hub.NAMES for t in b.values()), f"{what}: safetensors reads it"
        return
    assert b is not None, f"{what}: safetensors refuses it"
    assert a.keys() == b.keys() and all(a[n].dtype == t.dtype and a[n].shape == t.shape and a[n].equal(t) for n, t in b.items()), what


def with_header(raw: bytes, text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :]


def header_of(raw: bytes) -> dict[str, Any]:
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def headers(whole: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Headers that say something else: each part of each entry replaced."""
    values = (None, "4", 1.5, True, -1, 0, 24, 10**30, [], {}, [0, 1], [-4, 20], [24, 0], [0, 10**30], [2, 3, 1], "F32", "F64", "U64", "x")
    for name in whole:
        for part in ("dtype", "shape", "data_offsets") if name != "__metadata__" else ("format",):
            for value in (ABSENT, *values):
                entry = {k: v for k, v in {**whole[name], part: value}.items() if v is not ABSENT}
                yield f"{name}.{part} = {value!r}", json.dumps({**whole, name: entry}).encode()
        for value in (ABSENT, *values):
            yield f"{name} = {value!r}", json.dumps({k: v for k, v in {**whole, name: value}.items() if v is not ABSENT}).encode()
    text = json.dumps(whole).encode()
    deep = (b"[" * 5000, b'{"a":' * 5000)
    yield from ((f"{t[:9]!r}", t) for t in (b"", b"[]", b"null", b"{}", b" " + text, text + b"}", text + b"\0", *deep))
    yield "a twice", text[:-1] + b', "a": ' + json.dumps(whole["a"]).encode() + b"}"


def test_a_file_is_read_as_safetensors_reads_it_or_refused(tmp_path: Path) -> None:
    """Every byte of the length and the header changed three ways, every entry replaced, and data that does not fit its header."""
    path = tmp_path / "x.safetensors"
    save_file(HELD, path, {"format": "pt"})
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    read_alike(path, "as written")
    for at in range(end):
        for value in (raw[at] ^ 1, 0, 255):
            path.write_bytes(raw[:at] + bytes([value]) + raw[at + 1 :])
            read_alike(path, f"byte {at} = {value}")
    for what, text in headers(header_of(raw)):
        path.write_bytes(with_header(raw, text))
        read_alike(path, what)
    for new in (raw + b"\0", raw[:-1], raw[:end], b"", raw[:5]):
        path.write_bytes(new)
        assert isinstance(ours(path), str) and theirs(path) is None, len(new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": [20, 28]}, "tensor 'b' at byte 20 overlaps tensor 'a', which ends at 24"),
        ({"b": [0, 8]}, "tensor 'a' at byte 0 overlaps tensor 'b'"),
        ({"b": [28, 36], "d": [36, 40]}, "tensor 'b' at byte 28 leaves bytes uncovered behind tensor 'a', which ends at 24"),
        ({"d": [8, 12]}, "overlaps"),
        ({"a": [0, 23]}, "tensor 'a' of shape .2, 3. does not fit its 23 bytes"),
        ({"a": [-24, 0]}, "tensor 'a' has a header this reader does not know"),
    ],
    ids=str,
)
def test_overlapping_and_uncovered_data_name_file_and_tensor(tmp_path: Path, change: dict[str, list[int]], message: str) -> None:
    path = tmp_path / "x.safetensors"
    with hub.writer(path, {n: (t.dtype, tuple(t.shape)) for n, t in HELD.items()}) as put:
        for name, t in HELD.items():
            put(name, t)
    raw = path.read_bytes()
    header = header_of(raw)
    for name, offsets in change.items():
        header[name]["data_offsets"] = offsets
    path.write_bytes(with_header(raw, json.dumps(header).encode()) + b"\0" * 4 * (len(change) == 2))
    with pytest.raises(CheckpointError, match=f"x.safetensors.*{message}"):
        hub.SafeFile(path)
    assert theirs(path) is None


def file_of(count: int, text: bytes, data: int = 0) -> bytes:
    return count.to_bytes(8, "little") + text + b"\0" * data


def tensors(**said: tuple[Any, Any]) -> bytes:
    return json.dumps({n: {"dtype": "F32", "shape": shape, "data_offsets": offsets} for n, (shape, offsets) in said.items()}).encode()


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a length beyond memory": (file_of(2**63, b"{}"), "a header of 9223372036854775808"),
    "all ones": (b"\xff" * 16, "a header of 18446744073709551615"),
    "a length beyond the file": (file_of(3, b"{}"), "10 bytes, a header of 3"),
    "no length": (b"\1\0\0", "3 bytes, a header of 1"),
    "nothing": (b"", "0 bytes, a header of 0"),
    "no JSON": (file_of(9, b"not JSON!"), "a damaged safetensors header"),
    "no text": (file_of(4, b"\xff\xfe\xfd\xfc"), "a damaged safetensors header"),
    "deep": (file_of(200_000, b"[" * 200_000), "a damaged safetensors header"),
    "a long number": (file_of(9000, b"1" * 9000), "a damaged safetensors header"),
    "a list": (file_of(2, b"[]"), "it is no JSON object"),
    "no offsets": (file_of(26, b'{"a":{"dtype":"F32"}}     '), "tensor 'a' has a header this reader does not know"),
    "no tensor": (file_of(7, b'{"a":5}'), "tensor 'a' has a header this reader does not know"),
    "a shape that is huge": (file_of(len(t := tensors(a=([2**40] * 9999, [0, 4]))), t, 4), "tensor 'a' has a header"),
    "negative": (file_of(len(t := tensors(a=([-1], [4, 0]))), t, 4), "tensor 'a' has a header this reader does not know"),
    "overlapping": (file_of(len(t := tensors(a=([2], [0, 8]), b=([1], [4, 8]))), t, 8), "tensor 'b' at byte 4 overlaps tensor 'a'"),
    "outside": (file_of(len(t := tensors(a=([1], [0, 4]), b=([1], [4, 8]))), t, 4), "tensor 'b' ends at byte 8 of 4"),
    "far outside": (file_of(len(t := tensors(a=([1], [2**60, 2**60 + 4]))), t, 4), "tensor 'a' has a header this reader does not know"),
    "a hole": (file_of(len(t := tensors(a=([1], [4, 8]))), t, 8), "at byte 4 leaves bytes uncovered behind the header"),
    "more than it says": (file_of(len(t := tensors(a=([1], [0, 4]))), t, 9), "5 bytes behind tensor 'a' belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_whoever_reads_a_hostile_header_says_the_same(tmp_path: Path, what: str) -> None:
    """The loader, what knows heads by their shapes, and what checks a deployment before anything is read."""
    raw, says = HOSTILE[what]
    (tmp_path / "model.safetensors").write_bytes(raw)
    said = set()
    for reads in (hub.Checkpoint, heads.shapes, lambda folder: preflight._check_weights(folder, False)):
        with pytest.raises(CheckpointError) as wrong:
            reads(tmp_path)
        said.add(str(wrong.value))
    assert len(said) == 1 and says in said.pop()
    assert theirs(tmp_path / "model.safetensors") is None


def test_every_dtype_that_is_read_has_its_width() -> None:
    assert {name: dtype.itemsize for name, dtype in hub.DTYPES.items()} == safe_header.WIDTHS


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama cut for two ranks."""
    folder = tmp_path_factory.mktemp("cut")
    cases.save(cases.CONFIGS["llama_tied"](), folder / "model", tokens=4)
    presharded.shard(folder / "model", 2, folder / "two")
    return folder / "two"


@pytest.fixture
def two(cut: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(cut, tmp_path / "two"))


def open_rank(path: Path, rank: int = 1, **options: Any) -> dict[str, Any]:
    config = hub.read_config(path)
    arch = models.check(config, tp=2, max_model_len=16, **options)
    return presharded.open_weights(path, config, arch, dtype=torch.float32, rank=rank, ranks=2)


def test_files_that_were_swapped(two: Path) -> None:
    first, second = (presharded.file_of(two, rank) for rank in (0, 1))
    first.rename(two / "kept")
    second.rename(first)
    (two / "kept").rename(second)
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match=f"tp{rank}_sharded.* says it holds rank {1 - rank} of 2, not {rank} of 2; .*swapped"):
            open_rank(two, rank)


def test_a_file_of_another_cut(two: Path, cut: Path, tmp_path: Path) -> None:
    """Same rank, same shapes, other weights: the header holds their checksums, the manifest the header's."""
    cases.save(cases.CONFIGS["llama_tied"](), tmp_path / "other", tokens=4, seed=1)
    presharded.shard(tmp_path / "other", 2, tmp_path / "cut")
    shutil.copy(presharded.file_of(tmp_path / "cut", 1), presharded.file_of(two, 1))
    assert open_rank(two, 0)
    with pytest.raises(CheckpointError, match=r"tp1_sharded.* is not the file of rayneuron_shards.json: its header differs"):
        open_rank(two, 1)


def damage(two: Path, positions: Callable[[int, int], list[int]]) -> None:
    """One bit flipped at each position: refused, naming the file, and where it is data the tensor."""
    path = presharded.file_of(two, 1)
    raw, entries = path.read_bytes(), hub.SafeFile(path)
    spans = {name: (entries.start + e.start, entries.start + e.stop) for name, e in entries.entries.items()}
    open_rank(two)
    for at in positions(entries.start, len(raw)):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([raw[at] ^ (1 << at % 8)]))
        with pytest.raises(CheckpointError) as error:
            open_rank(two)
        tensor = next((name for name, (start, stop) in spans.items() if start <= at < stop), "")
        assert path.name in str(error.value) and repr(tensor)[1:-1] in str(error.value), at
        with path.open("r+b") as file:
            file.seek(at)
            file.write(raw[at : at + 1])
    open_rank(two)


def test_one_flipped_bit_anywhere(two: Path) -> None:
    """In the length, all over the header, and at both ends and somewhere in the data."""
    draw = random.Random(0)
    damage(two, lambda head, size: [*range(8), *range(8, head, 61), head, size - 1, *(draw.randrange(head, size) for _ in range(40))])


@pytest.mark.slow
def test_every_byte_of_the_header_and_much_of_the_data(two: Path) -> None:
    damage(two, lambda head, size: [*range(head), *range(head, size, 97)])


def test_a_damaged_manifest(two: Path) -> None:
    file = two / presharded.MANIFEST
    found = json.loads(file.read_text())
    for key in found:
        for value in (ABSENT, None, "x", -1, [], {}, 3.5, ["x"]):
            if key in ("convert_s", "scheme", "quantization") and value in (None, "x", -1, 3.5):
                continue  # notes, which loading does not need
            file.write_text(json.dumps({k: v for k, v in {**found, key: value}.items() if v is not ABSENT}))
            with pytest.raises((CheckpointError, ConfigError)):
                open_rank(two)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match=r"rayneuron_shards.json holds no JSON object"):
        open_rank(two)


def test_another_plan_of_heads_is_refused_with_both_named(two: Path) -> None:
    for options, asked in (
        ({"group_query_attention": "CONVERT_TO_MHA"}, "CONVERT_TO_MHA over 1"),
        ({"shard_over_sequence": True}, "shard-over-sequence over 2"),
    ):
        with pytest.raises(ConfigError, match=f"with group_query_attention shard-over-heads and KV over 1 ranks, .* asks for {asked}"):
            open_rank(two, **options)
    assert open_rank(two, group_query_attention="shard-over-heads")


@pytest.mark.parametrize("options", [{"group_query_attention": "CONVERT_TO_MHA"}, {"shard_over_sequence": True}], ids=str)
def test_cutting_under_a_plan_gives_what_loading_under_it_gives(cut: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    source = cut.parent / "model"
    presharded.shard(source, 2, tmp_path / "two", **options)
    for rank in (0, 1):
        mapped, loaded = open_rank(tmp_path / "two", rank, **options), open_rank(source, rank, **options)
        for a, b in zip([mapped["top"], *mapped["layers"]], [loaded["top"], *loaded["layers"]], strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[n], t) for n, t in b.items())
    with pytest.raises(ConfigError, match="the deployment asks for shard-over-heads over 1"):
        open_rank(tmp_path / "two")


def test_config_json_changed_after_the_cut(two: Path) -> None:
    """What changes tensors is refused; rope is not in the files, so a change of it counts as in any directory."""
    raw = hub.read_config(two)
    longer = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    hub.write_json(two / "config.json", {**raw, "rope_parameters": longer})
    arch = models.architecture(hub.read_config(two))
    assert torch.equal(open_rank(two)["top"]["rope.freq"], rotary.frequencies(arch.rope)) and arch.rope.factor == 4.0
    for key, value in (("num_hidden_layers", 1), ("num_hidden_layers", 3), ("intermediate_size", 64), ("attention_bias", True)):
        hub.write_json(two / "config.json", {**raw, key: value})
        with pytest.raises(CheckpointError, match=r"config.json is not the one the llama weights were cut with: \w+ .*cut with"):
            open_rank(two)


def test_block_scales_without_quantization_config(tmp_path: Path) -> None:
    """FP8 weights with one scale a block of 128 x 128, as DeepSeek and Qwen publish them."""
    cases.save(cases.CONFIGS["llama"](), tmp_path, tokens=4)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    name = "model.layers.0.mlp.up_proj.weight"
    for suffix, shape in (("_scale_inv", (1, 1)), ("_scale", (2, 2)), ("_scale", (2, 3, 4)), ("_scale", (0,))):
        scale = torch.ones(shape)
        save_file({**held, name: held[name].to(torch.float8_e4m3fn), name + suffix: scale}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj"):
            config = hub.read_config(tmp_path)
            presharded.open_weights(tmp_path, config, models.architecture(config), dtype=torch.float32)
