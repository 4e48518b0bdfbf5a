"""Instances against the documented table, neuron-ls fixtures, detection order, NEURON_RT_VISIBLE_CORES in every form."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from rayneuron.errors import ConfigError
from rayneuron.placement import cores
from rayneuron.placement.cores import Facts, check_claim, detect, parse_neuron_ls, parse_visible, visible
from rayneuron.placement.instances import INSTANCES, declared, instance

FIXTURES = Path(__file__).parent / "neuron_ls"

# research/neuron.md G1, G2, typed by hand: name -> devices, logical cores, GiB a core, vCPUs, host GiB, EFA interfaces, TP degrees.
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


def test_table_covers_every_instance() -> None:
    assert set(INSTANCES) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_instance_is_as_documented(name: str) -> None:
    kind, (devices, count, gib, vcpus, host, efa, _) = INSTANCES[name], TABLE[name]
    assert (kind.devices, kind.cores, kind.vcpus, kind.efa) == (devices, count, vcpus, efa)
    assert kind.core_memory_bytes == gib * 2**30
    assert kind.host_memory_bytes == host * 2**30
    assert [c for d in range(devices) for c in kind.device_cores(d)] == list(range(count))


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


@pytest.mark.parametrize("name", [n for n in TABLE if INSTANCES[n].devices > 1])
def test_ring_visits_every_device_over_links(name: str) -> None:
    kind = INSTANCES[name]
    ring = kind.ring
    assert sorted(ring) == list(range(kind.devices))
    assert all(after in kind.neighbours(before) for before, after in zip(ring, ring[1:] + ring[:1], strict=True))


def test_logical_core_config() -> None:
    one = instance("trn2.48xlarge:lnc1")
    assert (one.cores, one.core_memory_bytes) == (128, 12 * 2**30)
    assert instance("trn2.48xlarge").lnc == 2
    with pytest.raises(ConfigError, match="lnc1 or trn2.48xlarge:lnc2"):
        instance("trn2.48xlarge:two")
    with pytest.raises(ConfigError, match="not possible on inf2.xlarge; write 1"):
        instance("inf2.xlarge", lnc=2)
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
    assert chips[0].pids == (4711,)


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


def test_cores_nobody_can_use() -> None:
    with pytest.raises(ConfigError, match="declare at least 1"):
        declared(0, vcpus=2)
    with pytest.raises(ConfigError, match="reads as all cores"):
        visible(())
