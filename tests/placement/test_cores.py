"""Instances against the documented table, neuron-ls fixtures, detection order, NEURON_RT_VISIBLE_CORES in every form."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.errors import ConfigError
from rayneuron.placement import cores
from rayneuron.placement.cores import Facts, check_claim, detect, parse_neuron_ls, parse_visible, visible
from rayneuron.placement.instances import INSTANCES, Instance, declared, instance
from rayneuron.placement.ledger import Ledger
from rayneuron.policies import packing

FIXTURES = Path(__file__).parent / "neuron_ls"

# Typed by hand from AWS's pages: name -> devices, logical cores, GiB a core, vCPUs, host GiB, EFA interfaces, TP degrees.
TABLE = {
    "inf2.xlarge": (1, 2, 16, 4, 16, 0, {1, 2}),
    "inf2.8xlarge": (1, 2, 16, 32, 128, 0, {1, 2}),
    "inf2.24xlarge": (6, 12, 16, 96, 384, 0, {1, 2, 4, 8, 12}),
    "inf2.48xlarge": (12, 24, 16, 192, 768, 0, {1, 2, 4, 8, 12, 24}),
    "trn1.2xlarge": (1, 2, 16, 8, 32, 0, {1, 2}),
    "trn1.32xlarge": (16, 32, 16, 128, 512, 8, {1, 2, 4, 8, 16, 32}),
    "trn1n.32xlarge": (16, 32, 16, 128, 512, 16, {1, 2, 4, 8, 16, 32}),
    "trn2.3xlarge": (1, 4, 24, 12, 128, 0, {1, 2, 4}),
    "trn2.48xlarge": (16, 64, 24, 192, 2048, 16, {1, 2, 4, 8, 16, 32, 64}),
    "trn2u.48xlarge": (16, 64, 24, 192, 2048, 16, {1, 2, 4, 8, 16, 32, 64}),
}


def device_cores(kind: Instance, device: int) -> range:
    """The logical cores of one device, as neuron-ls numbers them."""
    each = kind.cores // kind.devices
    return range(device * each, (device + 1) * each)


def test_table_covers_every_instance() -> None:
    assert set(INSTANCES) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_instance_is_as_documented(name: str) -> None:
    kind, (devices, count, gib, vcpus, host, efa, _) = INSTANCES[name], TABLE[name]
    assert (kind.devices, kind.cores, kind.vcpus, kind.efa) == (devices, count, vcpus, efa)
    assert kind.core_memory_bytes == gib * 2**30
    assert kind.host_memory_bytes == host * 2**30
    assert [c for d in range(devices) for c in device_cores(kind, d)] == list(range(count))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])
def test_tp_degree_is_checked_for_the_instance(name: str, degree: int) -> None:  # BR-07
    kind, allowed = INSTANCES[name], TABLE[name][-1]
    if degree in allowed:
        kind.check_degree(degree)
        return
    with pytest.raises(ConfigError) as refused:
        kind.check_degree(degree)
    text = str(refused.value)
    assert ", ".join(map(str, sorted(allowed))) in text and name in text
    assert f"write tensor_parallel: {max(d for d in allowed if d < degree)}" in text


def test_degrees_the_documents_disagree_on_carry_a_note() -> None:
    assert "2.23" in (INSTANCES["trn1.32xlarge"].check_degree(4) or "")
    assert "12" in (INSTANCES["inf2.48xlarge"].check_degree(12) or "")
    assert INSTANCES["inf2.48xlarge"].check_degree(8) is None


def test_logical_core_config() -> None:
    one = instance("trn2.48xlarge:lnc1")
    assert (one.cores, one.core_memory_bytes) == (128, 12 * 2**30)
    assert instance("trn2.48xlarge").lnc == 2
    with pytest.raises(ConfigError, match="lnc1 or trn2.48xlarge:lnc2"):
        instance("trn2.48xlarge:two")
    with pytest.raises(ConfigError, match="not possible on inf2.xlarge; write 1"):
        instance("inf2.xlarge:lnc2")
    with pytest.raises(ConfigError, match=r"inf2\.48xlarge"):
        instance("inf2.46xlarge")


@pytest.mark.parametrize(
    ("fixture", "product", "name", "count"),
    [
        ("inf2.48xlarge_old", None, "inf2.48xlarge", 24),
        ("inf2.xlarge", "inf2.xlarge", "inf2.xlarge", 2),
        ("inf2.xlarge", "inf2.8xlarge", "inf2.8xlarge", 2),
        ("trn1.32xlarge", "trn1n.32xlarge", "trn1n.32xlarge", 32),
        ("trn1.32xlarge", None, "trn1.32xlarge", 32),
        ("trn2.48xlarge_lnc2", None, "trn2.48xlarge", 64),
        ("trn2.48xlarge_lnc2", "trn2u.48xlarge", "trn2u.48xlarge", 64),
    ],
)
def test_neuron_ls_identifies_the_instance(fixture: str, product: str | None, name: str, count: int) -> None:
    chips = parse_neuron_ls((FIXTURES / f"{fixture}.json").read_text())
    kind = detect(Facts(chips=chips, product=product, vcpus=INSTANCES[name].vcpus))
    assert (kind.name, kind.cores) == (name, count)
    assert sum(chip.cores for chip in chips) == count
    assert cores.check_links(kind, chips) == []


def test_one_device_kinds_are_told_apart_by_vcpus() -> None:
    chips = parse_neuron_ls((FIXTURES / "inf2.xlarge.json").read_text())
    assert [detect(Facts(chips=chips, vcpus=v)).name for v in (4, 8, 32)] == ["inf2.xlarge", "trn1.2xlarge", "inf2.8xlarge"]


def test_lnc_is_taken_from_the_driver() -> None:
    text = (FIXTURES / "trn2.48xlarge_lnc2.json").read_text()
    text = text.replace('"nc_count": 4', '"nc_count": 8').replace('"logical_neuroncore_config": 2', '"logical_neuroncore_config": 1')
    assert detect(Facts(chips=parse_neuron_ls(text))).cores == 128
    without = text.replace('"logical_neuroncore_config": 1,', "")
    assert detect(Facts(chips=parse_neuron_ls(without))).lnc == 1


def test_a_missing_link_is_reported() -> None:
    chips = list(parse_neuron_ls((FIXTURES / "inf2.48xlarge_old.json").read_text()))
    chips[3] = replace(chips[3], linked=(2,))
    assert cores.check_links(INSTANCES["inf2.48xlarge"], chips) == ["device 3 is linked to 2, expected 2, 4"]


def test_noise_before_the_list_and_unknown_fields_are_tolerated() -> None:
    entry = '{"neuron_device": 0, "nc_count": 2, "memory_size": 34359738368, "connected_to": null, "new": {}}'
    chips = parse_neuron_ls(f"warning: old driver\n[{entry}]")
    assert chips[0].cores == 2 and chips[0].linked == ()


@pytest.mark.parametrize("text", ["", "neuron-ls: no driver", "{}", "[1]", '[{"neuron_device": 0}]', "[{"])
def test_other_output_is_refused_with_what_it_was(text: str) -> None:
    with pytest.raises(ConfigError, match="neuron-ls printed something else"):
        parse_neuron_ls(text)


def test_detection_order_and_contradictions() -> None:
    chips = parse_neuron_ls((FIXTURES / "inf2.48xlarge_old.json").read_text())
    with pytest.raises(ConfigError, match=r"names trn1\.32xlarge but neuron-ls shows 12 devices of 2 cores"):
        detect(Facts(named="trn1.32xlarge", chips=chips))
    assert detect(Facts(named="inf2.48xlarge", product="trn1.32xlarge", ray_cores=24)).name == "inf2.48xlarge"
    assert detect(Facts(product="trn1.32xlarge", ray_cores=4)).name == "trn1.32xlarge"
    assert detect(Facts(product="Standard PC", ray_cores=4, vcpus=2)).cores == 4
    with pytest.raises(ConfigError, match="Ray counts 32 neuron_cores on this node but inf2.48xlarge has 24"):
        detect(Facts(named="inf2.48xlarge", ray_cores=32))
    with pytest.raises(ConfigError, match="write `instance: inf2.48xlarge`"):
        detect(Facts())


def test_probe_reads_the_machine(tmp_path: Path) -> None:
    assert cores.probe(tmp_path) == ((), None)
    product = tmp_path / "sys/devices/virtual/dmi/id/product_name"
    product.parent.mkdir(parents=True)
    product.write_text("inf2.48xlarge\n")
    tool = tmp_path / cores.NEURON_LS
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\n[ \"$1\" = --json-output ] || exit 2\ncat '{FIXTURES}/inf2.48xlarge_old.json'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    chips, name = cores.probe(tmp_path)
    assert (len(chips), name) == (12, "inf2.48xlarge")
    assert cores.this_node(None, 24, 192, tmp_path) == INSTANCES["inf2.48xlarge"]
    tool.write_text("#!/bin/sh\necho 'no driver' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="code 1: no driver; is the Neuron driver loaded"):
        cores.probe(tmp_path)
    tool.write_bytes(os.urandom(16))
    with pytest.raises(ConfigError, match="could not be run"):
        cores.probe(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", (0,)), ("0,1,2", (0, 1, 2)), ("4-7", (4, 5, 6, 7)), ("0-3,4", (0, 1, 2, 3, 4)), (" 8 , 9 - 10 ", (8, 9, 10)), ("3-3", (3,))],
)
def test_every_written_form_is_read(text: str, expected: tuple[int, ...]) -> None:
    assert parse_visible(text) == expected
    assert visible(parse_visible(text)) == ",".join(map(str, expected))


@pytest.mark.parametrize("text", ["", ",", "a", "0,,1", "3-1", "-1", "0-", "0;1", "1.5", "0-99999999", "٣"])
def test_no_list_of_cores(text: str) -> None:
    with pytest.raises(ConfigError, match="write 0,1,2,3"):
        parse_visible(text)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "is unset: the Neuron runtime would take all 24 cores"),  # O-1, BR-01
        ("", "is empty: the Neuron runtime would take all 24 cores"),
        ("0,1,4,5", "not contiguous and ascending.*write 0,1,2,3"),  # O-4, BR-04
        ("8,9,6,7", "not contiguous and ascending"),
        ("0,0", "not contiguous and ascending"),
        ("2-5", "must start at a multiple of 4, not at 2; write 0,1,2,3"),
        ("16-31", "names core 31, but inf2.48xlarge has cores 0-23"),
    ],
)
def test_claims_the_runtime_would_misread_are_refused(value: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_claim(value, INSTANCES["inf2.48xlarge"])


def test_good_claims_pass() -> None:
    assert check_claim("4-7", INSTANCES["inf2.48xlarge"]) == (4, 5, 6, 7)
    assert check_claim("12,13,14,15,16,17,18,19,20,21,22,23", INSTANCES["inf2.48xlarge"]) == tuple(range(12, 24))
    assert check_claim("0", declared(1, vcpus=2)) == (0,)


def test_cores_chosen_by_hand_are_refused() -> None:  # O-2, BR-03
    cores.refuse_hand_set({"OMP_NUM_THREADS": "4"}, "runtime_env of llama")
    with pytest.raises(ConfigError, match="runtime_env of llama sets NEURON_RT_VISIBLE_CORES='7'.*write tensor_parallel: N"):
        cores.refuse_hand_set({"NEURON_RT_VISIBLE_CORES": "7"}, "runtime_env of llama")
    with pytest.raises(ConfigError, match="NEURON_RT_NUM_CORES"):
        cores.refuse_hand_set({"NEURON_RT_NUM_CORES": "2"}, "runtime_env of llama")


def test_raylet_starts_with_the_comma_form() -> None:  # O-3
    environment = cores.raylet_environment({"NEURON_RT_VISIBLE_CORES": "4-7", "HOME": "/root"})
    assert environment == {"NEURON_RT_VISIBLE_CORES": "4,5,6,7", "HOME": "/root", "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1"}
    assert "NEURON_RT_VISIBLE_CORES" not in cores.raylet_environment({})
    with pytest.raises(ConfigError, match="not contiguous"):
        cores.raylet_environment({"NEURON_RT_VISIBLE_CORES": "0-1,4-5"})
    with pytest.raises(ConfigError, match="NEURON_RT_NUM_CORES=4 does not say which cores.*NEURON_RT_VISIBLE_CORES"):
        cores.raylet_environment({"NEURON_RT_NUM_CORES": "4"})


def test_cores_nobody_can_use() -> None:
    with pytest.raises(ConfigError, match="declare at least 1"):
        declared(0, vcpus=2)
    with pytest.raises(ConfigError, match="reads as all cores"):
        visible(())


def listed(kind: Instance, devices: Sequence[int], *, ids: bool = True, links: str = "all", first: int = 0) -> str:
    """What neuron-ls prints where only some devices of a node are there; renumbered, as a container may do, from `first` on."""
    each = len(device_cores(kind, 0))
    entries = []
    for place, device in enumerate(devices):
        there = first + place if first else device
        near = {"all": kind.neighbours(device), "visible": [d for d in kind.neighbours(device) if d in devices], "none": None}[links]
        entries.append(
            {
                "neuron_device": there, "nc_count": each, "memory_size": kind.device_memory_bytes, "connected_to": near and list(near),
                **({"neuroncore_ids": list(range(there * each, (there + 1) * each))} if ids else {}),
                **({"logical_neuroncore_config": kind.lnc} if len(kind.lncs) > 1 else {}),
            }
        )  # fmt: skip
    return json.dumps(entries)


@pytest.mark.parametrize("links", ["all", "visible", "none"])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(
    "devices", [[0], [5], [0, 1], [4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2, 3], [8, 9, 10, 11], [0, 1, 2, 3, 4, 5]], ids=str
)
def test_a_container_with_some_of_the_devices(devices: list[int], ids: bool, links: str) -> None:
    """Counted, whether the type is named in the file, in the DMI, or told by the links and CPUs alone; and TP is what these cores allow."""
    kind = INSTANCES["inf2.48xlarge"]
    chips = parse_neuron_ls(listed(kind, devices, ids=ids, links=links))
    own = frozenset(core for device in devices for core in device_cores(kind, device))
    for facts in (Facts("inf2.48xlarge", chips), Facts(None, chips, "inf2.48xlarge")):
        assert detect(facts) == kind and cores.left(kind, chips, None) == own
    guessed = detect(Facts(None, chips, None, vcpus=192))
    assert guessed.family in ("inf2", "trn1") and cores.left(guessed, chips, None) == own
    with pytest.raises(ConfigError, match=r"names trn2\.48xlarge but neuron-ls shows"):
        detect(Facts("trn2.48xlarge", chips))


def test_links_tell_a_part_of_one_type_from_the_whole_of_another() -> None:
    chips = parse_neuron_ls(listed(INSTANCES["inf2.48xlarge"], range(6)))  # as many as an inf2.24xlarge has, but 0 is linked to 11
    assert detect(Facts(None, chips, vcpus=96)).name == "inf2.48xlarge"
    whole = parse_neuron_ls(listed(INSTANCES["inf2.24xlarge"], range(6)))
    assert detect(Facts(None, whole, vcpus=192)).name == "inf2.24xlarge"
    with pytest.raises(ConfigError, match="names inf2.24xlarge but neuron-ls shows 12 devices"):
        detect(Facts("inf2.24xlarge", parse_neuron_ls(listed(INSTANCES["inf2.48xlarge"], range(12)))))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("", "is empty: Ray reads that as no core and the runtime as all 24; unset it, or write 0-7"),
        ("6-9", "names cores 8-9, but inf2.48xlarge has cores 0-7 in this container"),
        ("0,1,4,5", "not contiguous"),
        ("5,4", "not contiguous"),
        ("4..7", "no list of cores"),
    ],
)
def test_lists_that_leave_what_is_not_there(said: str, says: str) -> None:
    kind = INSTANCES["inf2.48xlarge"]
    with pytest.raises(ConfigError, match=says):
        cores.left(kind, parse_neuron_ls(listed(kind, range(4))), said)


def test_what_is_left_of_this_machine(tmp_path: Path) -> None:
    kind = INSTANCES["inf2.48xlarge"]
    assert cores.left_here(kind, None, tmp_path) == set(range(24)) and cores.left_here(kind, "4-7", tmp_path) == {4, 5, 6, 7}
    neuron_ls(tmp_path, listed(kind, [2, 3, 4]))
    assert cores.left_here(kind, None, tmp_path) == set(range(4, 10)) and cores.left_here(kind, "8,9", tmp_path) == {8, 9}
    assert cores.left_here(INSTANCES["trn2.48xlarge"], None, tmp_path) == set(range(64)), "a plan for another machine"
    with Ledger(tmp_path / "node", kind).take(4, "a", allowed=cores.left_here(kind, None, tmp_path)) as grant:
        assert grant.cores == (4, 5, 6, 7)
    with pytest.raises(
        ConfigError, match="no aligned run of 8 cores in 4-9 of inf2.48xlarge, all that is here or left.*write tensor_parallel: 4"
    ):
        Ledger(tmp_path / "node", kind).take(8, "a", allowed=cores.left_here(kind, None, tmp_path))


def neuron_ls(root: Path, prints: str) -> None:
    """A neuron-ls below `root` that prints so."""
    tool = root / cores.NEURON_LS
    tool.parent.mkdir(parents=True, exist_ok=True)
    (root / "devices.json").write_text(prints)
    tool.write_text(f"#!/bin/sh\ncat '{root}/devices.json'\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    "entries",
    [
        [{"neuron_device": 0, "nc_count": 0, "memory_size": 1}],
        [{"neuron_device": -1, "nc_count": 2, "memory_size": 1}],
        [{"neuron_device": 0, "nc_count": 2, "memory_size": 1}] * 2,
        [{"neuron_device": 0, "nc_count": 2, "memory_size": 1}, {"neuron_device": 1, "nc_count": 8, "memory_size": 1}],
        [{"neuron_device": d, "nc_count": 2, "memory_size": 1, "neuroncore_ids": [0, 1]} for d in (0, 1)],
        [{"neuron_device": 0, "nc_count": 10**12, "memory_size": 1}],
        [{"neuron_device": float("inf"), "nc_count": 2, "memory_size": 1}],
    ],
)  # fmt: skip
def test_devices_that_cannot_be_those_of_a_node(entries: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="neuron-ls printed something else"):
        parse_neuron_ls(json.dumps(entries))


# Properties, over whatever anybody may write or mount.

SPACE = st.sampled_from(["", " ", "  ", "\t"])


@st.composite
def spellings(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A spelling of NEURON_RT_VISIBLE_CORES and the cores it means, written part by part."""
    text, means = [], []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, 127))
        last = draw(st.none() | st.integers(first, 127))
        zeros = "0" * draw(st.integers(0, 2))
        parts = [f"{zeros}{first}"] if last is None else [f"{zeros}{first}", "-", str(last)]
        text.append("".join(word for part in parts for word in (draw(SPACE), part, draw(SPACE))))
        means += range(first, (first if last is None else last) + 1)
    return ",".join(text), means


@given(spellings())
def test_every_spelling_means_what_it_says(spelling: tuple[str, list[int]]) -> None:
    text, means = spelling
    assert list(parse_visible(text)) == means
    kind, run = instance("trn2.48xlarge:lnc1"), means == list(range(means[0], means[0] + len(means)))
    if not run:
        for refuse in (
            lambda: cores.left(kind, (), text),
            lambda: cores.raylet_environment({cores.COUNT: "", "NEURON_RT_VISIBLE_CORES": text}),
        ):
            with pytest.raises(ConfigError, match="not contiguous and ascending"):
                refuse()
        return
    assert cores.left(kind, (), text) == set(means)
    said = cores.raylet_environment({"NEURON_RT_VISIBLE_CORES": text})["NEURON_RT_VISIBLE_CORES"]
    assert said.split(",") == [str(core) for core in means], "what Ray counts, an entry a core"


@given(st.text(alphabet="0123456789,- \t;.+xe٣\n\x00", max_size=20))
def test_no_text_is_read_otherwise_than_the_runtime_would(text: str) -> None:
    """Refused as ours, or read as a plain reader of lists and ranges reads it (an independent one: by splitting)."""
    try:
        found = parse_visible(text)
    except ConfigError as refused:
        assert "NEURON_RT_VISIBLE_CORES" in refused.message
        return
    plain = []
    for part in text.split(","):
        first, _, last = (word.strip() for word in part.partition("-"))
        assert first.isascii() and first.isdigit()
        plain += list(range(int(first), int(last or first) + 1))
    assert list(found) == plain != []


@given(
    kind=st.sampled_from([*INSTANCES.values(), INSTANCES["trn2.48xlarge"].logical(1)]),
    data=st.data(), ids=st.booleans(), links=st.sampled_from(["all", "visible", "none"]),
)  # fmt: skip
def test_any_part_of_any_node(kind: Instance, data: st.DataObject, ids: bool, links: str) -> None:
    """Cores are those of the listed devices; whatever the ledger's rule gives lies within them, and it gives what fits."""
    first = data.draw(st.integers(0, kind.devices - 1))
    devices = data.draw(
        st.just(list(range(first, data.draw(st.integers(first + 1, kind.devices)))))
        | st.sets(st.integers(0, kind.devices - 1), min_size=1).map(sorted)
    )
    chips = parse_neuron_ls(listed(kind, devices, ids=ids, links=links))
    named = f"{kind.name}:lnc{kind.lnc}" if len(kind.lncs) > 1 else kind.name
    assert detect(Facts(named, chips)) == kind == detect(Facts(None, chips, kind.name))
    own = {core for device in devices for core in device_cores(kind, device)}
    here = cores.left(kind, chips, None)
    assert here == own
    for size in kind.degrees:
        start = packing.choose(here, size, kind.cores, kind.kept)
        fitting = [s for s in range(0, kind.cores - size + 1, size) if set(range(s, s + size)) <= own]
        assert (start in fitting) if fitting else start is None
    some = data.draw(st.sampled_from(sorted(own)))
    assert cores.left(kind, chips, str(some)) == {some}
    absent = set(range(kind.cores)) - own
    if absent:
        with pytest.raises(ConfigError, match="in this container"):
            cores.left(kind, chips, str(min(absent)))


FIELDS = ("neuron_device", "nc_count", "memory_size", "connected_to", "logical_neuroncore_config", "neuroncore_ids", "neuron_processes")
WRONG = st.sampled_from(
    [None, True, -1, 0, 1, 2, 10**30, 1.5, float("inf"), float("nan"), "", "1", "x", [], [0], [[]], ["x"], {}, {"pid": "x"}, [{}]]
)


@given(field=st.sampled_from(FIELDS), value=WRONG | st.just(...), device=st.integers(0, 2), cut=st.integers(0, 300))
def test_damaged_output_of_neuron_ls_is_refused_as_such(field: str, value: Any, device: int, cut: int) -> None:
    entries = json.loads(listed(INSTANCES["trn2.48xlarge"], range(3)))
    if value is ...:
        entries[device].pop(field, None)
    else:
        entries[device][field] = value
    text = json.dumps(entries)
    for said in (text, text[:cut], text + "]", "warning: old driver\n" + text, "[" * 100_000):
        try:
            chips = parse_neuron_ls(said)
        except ConfigError as refused:
            assert "neuron-ls printed something else" in refused.message
            continue
        numbers = [core for chip in chips for core in chip.numbers]
        assert len(numbers) == len(set(numbers)) == sum(chip.cores for chip in chips) and all(core >= 0 for core in numbers)


def test_a_container_without_neuron_ls_has_the_devices_whose_files_it_has(tmp_path: Path) -> None:
    """`docker run --device=/dev/neuron2 --device=/dev/neuron3` of an image without the tools."""
    kind = INSTANCES["inf2.48xlarge"]
    assert cores.left_here(kind, None, tmp_path) == set(range(24)), "no device, no container: planned elsewhere"
    (tmp_path / "dev").mkdir()
    for number in (2, 3):
        (tmp_path / "dev" / f"neuron{number}").touch()
    assert cores.left_here(kind, None, tmp_path) == {4, 5, 6, 7} and cores.left_here(kind, "6,7", tmp_path) == {6, 7}
    with pytest.raises(ConfigError, match="names cores 0-1, but inf2.48xlarge has cores 4-7 in this container"):
        cores.left_here(kind, "0,1", tmp_path)
    assert cores.left_here(declared(8, 8), None, tmp_path) == set(range(8))
    (tmp_path / "dev" / "neuron7").symlink_to("/dev/null")  # as a pod's renamed file: its minor number, 3, is the device
    (tmp_path / "dev" / "neuron3").unlink()
    assert cores.left_here(kind, None, tmp_path) == {4, 5, 6, 7}
