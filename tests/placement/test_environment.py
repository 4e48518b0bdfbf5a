"""The environment of a worker: golden tables typed from the public guides, and what must never happen."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from rayneuron import devices, settings
from rayneuron.devices.neuron import releases
from rayneuron.errors import ConfigError
from rayneuron.placement.environment import Endpoints, Host, environment, fork_safe
from rayneuron.placement.instances import declared, instance
from rayneuron.placement.layout import Layout, layout

SPMD = 1024
AL2023 = Host(kernel="6.1.112-122.189.amzn2023.x86_64")
ALWAYS = {"RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1", "NEURON_RT_EXEC_TIMEOUT": "600"}


def cores(first: int, count: int) -> str:
    return ",".join(str(core) for core in range(first, first + count))


def all_of(made: Layout, kind: str, endpoints: Endpoints, host: Host = AL2023, deployment: str = "llama") -> list[dict[str, str]]:
    node = instance(kind)
    return [environment(made, w, node, range(len(w.ranks)), endpoints, host, deployment) for w in made.workers]


def test_one_node_tp() -> None:
    made = layout(32, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    assert all_of(made, "trn1.32xlarge", Endpoints(("10.1.201.64",), (63423,), 8989)) == [
        ALWAYS | {
            "NEURON_RT_VISIBLE_CORES": cores(0, 32),
            "NEURON_RT_NUM_CORES": "32",
            "NEURON_RT_ROOT_COMM_ID": "10.1.201.64:63423",  # a single node gets one too (BR-12)
            "NEURON_PROCESS_TAG": "llama",
            "OMP_NUM_THREADS": "128",
        }
    ]  # fmt: skip


def test_async_mode_queues_two_steps() -> None:
    """As NxD Inference sets them with async_mode; without it the runtime's own defaults stay."""
    made = layout(2, ranks_per_process=SPMD, instance=instance("inf2.xlarge"))
    endpoints = Endpoints(("10.1.201.64",), (63423,), 8989)
    (plain,) = all_of(made, "inf2.xlarge", endpoints)
    (queued,) = all_of(made, "inf2.xlarge", endpoints, Host(AL2023.kernel, async_mode=True))
    assert queued == plain | {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "2", "NEURON_RT_IO_RING_CACHE_SIZE": "2"}
    assert not {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "NEURON_RT_IO_RING_CACHE_SIZE"} & plain.keys()


def test_two_node_tp_64_is_as_the_developer_guide_starts_it() -> None:
    made = layout(64, 1, 2, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    both = ALWAYS | {
        "NEURON_RT_VISIBLE_CORES": cores(0, 32),
        "NEURON_RT_NUM_CORES": "32",
        "NEURON_RT_ROOT_COMM_ID": "10.1.201.64:63423",
        "NEURON_LOCAL_TP": "32",
        "NEURON_PROCESS_TAG": "llama",
        "OMP_NUM_THREADS": "128",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
    }
    assert all_of(made, "trn1.32xlarge", Endpoints(("10.1.201.64", "10.1.201.65"), (63423,), 8989)) == [
        both | {"NEURON_RANK_ID": "0"},
        both | {"NEURON_RANK_ID": "1"},
    ]


STAGES = {
    "NEURON_RT_VISIBLE_CORES": cores(0, 32),
    "NEURON_RT_NUM_CORES": "32",
    "NEURON_PP_STAGES": "2",
    "CPU_COMM_ID": "10.1.201.64:8989",
    "OMP_NUM_THREADS": "128",
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
}


def test_two_stages_meet_each_on_their_own_node() -> None:
    made = layout(32, 2, 2, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    assert all_of(made, "trn1.32xlarge", Endpoints(("10.1.201.64", "10.1.201.65"), (63423, 63424), 8989)) == [
        ALWAYS | STAGES | {"NEURON_RT_ROOT_COMM_ID": "10.1.201.64:63423", "NEURON_RANK_ID": "0", "NEURON_PROCESS_TAG": "llama/stage0"},
        ALWAYS | STAGES | {"NEURON_RT_ROOT_COMM_ID": "10.1.201.65:63424", "NEURON_RANK_ID": "1", "NEURON_PROCESS_TAG": "llama/stage1"},
    ]


def test_three_models_on_one_inf2_48xlarge() -> None:
    """The guide's example: several models a host, each with its own cores and its share of the host's CPUs."""
    node = instance("inf2.48xlarge")
    shares = []
    for i, (name, first) in enumerate((("chat", 0), ("code", 8), ("sum", 16))):
        made = layout(8, ranks_per_process=SPMD, instance=node)
        endpoints = Endpoints(("10.0.0.7",), (62000 + i,), 8000 + i)
        shares.append(environment(made, made.workers[0], node, range(first, first + 8), endpoints, AL2023, name))
    assert shares == [
        ALWAYS | {
            "NEURON_RT_VISIBLE_CORES": cores(first, 8),
            "NEURON_RT_NUM_CORES": "8",
            "NEURON_RT_ROOT_COMM_ID": f"10.0.0.7:{port}",
            "NEURON_PROCESS_TAG": name,
            "OMP_NUM_THREADS": "64",
        }
        for name, first, port in (("chat", 0, 62000), ("code", 8, 62001), ("sum", 16, 62002))
    ]  # fmt: skip
    taken = [core for share in shares for core in share["NEURON_RT_VISIBLE_CORES"].split(",")]
    assert taken == [str(core) for core in range(24)]
    assert sum(int(share["OMP_NUM_THREADS"]) for share in shares) == node.vcpus


def test_the_guides_thread_rule() -> None:
    """192 CPUs, four models of 8 cores on 32: 48 threads each (source document, "running inference with multiple models")."""
    node = instance("trn1.32xlarge")
    made = layout(8, ranks_per_process=SPMD, instance=node)
    made_for = environment(made, made.workers[0], node, range(8), Endpoints(("10.0.0.7",), (1,), 2), Host("6.1.0", vcpus=192), "m")
    assert made_for["OMP_NUM_THREADS"] == "48"


def test_one_rank_a_process_shares_the_nodes_cores() -> None:
    node = declared(4, vcpus=2)
    made = layout(4, 1, 2, ranks_per_process=1, instance=node)
    endpoints = Endpoints(("127.0.0.2", "127.0.0.3"), (5000,), 5001)
    out = [environment(made, w, node, [w.offset], endpoints, AL2023, "tiny") for w in made.workers]
    assert [(e["NEURON_RT_VISIBLE_CORES"], e["NEURON_RANK_ID"], e["NEURON_LOCAL_TP"]) for e in out] == [
        ("0", "0", "2"), ("1", "0", "2"), ("0", "1", "2"), ("1", "1", "2"),
    ]  # fmt: skip
    assert {e["OMP_NUM_THREADS"] for e in out} == {"1"}, "never 0"
    assert not any(key.startswith("FI_") for e in out for key in e), "no EFA, no EFA variables (BR-17)"
    assert {e["NEURON_RT_ROOT_COMM_ID"] for e in out} == {"127.0.0.2:5000"}


def test_logical_core_config_and_cache() -> None:
    node = instance("trn2.48xlarge")
    made = layout(64, ranks_per_process=SPMD, instance=node)
    host = Host("6.8.0", cache_url="s3://bucket/neuron")
    out = environment(made, made.workers[0], node, range(64), Endpoints(("10.0.0.7",), (1,), 2), host, "m")
    assert (out["NEURON_LOGICAL_NC_CONFIG"], out["NEURON_COMPILE_CACHE_URL"]) == ("2", "s3://bucket/neuron")
    assert "NEURON_LOGICAL_NC_CONFIG" not in all_of(layout(2), "inf2.xlarge", Endpoints(("10.0.0.7",), (1,), 2))[0]


@pytest.mark.parametrize(
    ("kernel", "safe"),
    [
        ("5.10.226-214.880.amzn2.x86_64", False),  # Amazon Linux 2
        ("4.14.355-275.570.amzn2.x86_64", False),
        ("5.14.0", False),
        ("5.15.0-1071-aws", True),
        ("6.1.112-122.189.amzn2023.x86_64", True),
        ("10.0", True),
        ("unknown", False),
    ],
)
def test_fork_safe_flag_follows_the_kernel(kernel: str, safe: bool) -> None:
    assert fork_safe(kernel) is safe
    node = instance("trn1.32xlarge")
    made = layout(64, 1, 2, ranks_per_process=SPMD, instance=node)
    out = environment(made, made.workers[1], node, range(32), Endpoints(("10.0.0.1", "10.0.0.2"), (1,), 2), Host(kernel), "m")
    assert out.get("FI_EFA_FORK_SAFE") == (None if safe else "1")


def test_one_core_needs_no_meeting_place() -> None:
    assert "NEURON_RT_ROOT_COMM_ID" not in all_of(layout(1), "inf2.xlarge", Endpoints(("10.0.0.7",), (1,), 2))[0]


def test_values_are_ray_env_vars() -> None:
    made = layout(32, 2, 2, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    for out in all_of(made, "trn1.32xlarge", Endpoints(("fd00::1", "fd00::2"), (63423, 63424), 8989)):
        assert all(isinstance(value, str) and re.fullmatch(r"[A-Z_0-9]+", key) for key, value in out.items())
        assert re.fullmatch(r"\[fd00::[12]\]:6342[34]", out["NEURON_RT_ROOT_COMM_ID"])


@pytest.mark.parametrize(
    ("nodes", "roots", "host", "says"),
    [
        (("trn1-node-0.internal",), (1,), 2, "no IP address.*NodeManagerAddress"),  # names longer than 63 characters fail in the runtime
        (("0.0.0.0",), (1,), 2, "no address of one node: unspecified"),
        (("0.1.2.3",), (1,), 2, "no address of one node: unspecified"),
        (("::",), (1,), 2, "no address of one node: unspecified"),
        (("224.0.0.1",), (1,), 2, "multicast"),
        (("ff02::1",), (1,), 2, "multicast"),
        (("10.0.0.1", "169.254.7.7"), (1,), 2, "169.254.7.7 is no address of one node: link-local"),
        (("fe80::1",), (1,), 2, "link-local"),
        (("fe80::1%eth0",), (1,), 2, "known on one host only"),
        (("fd00::1%eth0",), (1,), 2, "known on one host only"),
        (("255.255.255.255",), (1,), 2, "broadcast"),
        (("240.0.0.1",), (1,), 2, "reserved"),
        (("::10.0.0.1",), (1,), 2, "reserved"),
        (("::ffff:10.0.0.1",), (1,), 2, "carries the IPv4 address 10.0.0.1; write that one"),
        (("::ffff:127.0.0.1",), (1,), 2, "carries the IPv4 address 127.0.0.1"),
        (("2002:a00:1::1",), (1,), 2, "carries the IPv4 address 10.0.0.1"),
        (("10.0.0.01",), (1,), 2, "no IP address"),
        (("10.0.0.1:80",), (1,), 2, "no IP address"),
        (("[fd00::1]",), (1,), 2, "no IP address"),
        (("10.0.0.1", "127.0.0.1"), (1,), 2, "127.0.0.1 cannot be reached from the other nodes"),  # BR-20
        (("10.0.0.1",), (0,), 8, "lie in 1-65535"),  # port 0 is bound first, then published
    ],
)
def test_endpoints_nobody_could_reach_are_refused(nodes: tuple[str, ...], roots: tuple[int, ...], host: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Endpoints(nodes, roots, host)


@pytest.mark.parametrize(
    "ip", ["10.0.0.1", "172.16.0.9", "192.168.1.1", "198.18.0.1", "8.8.8.8", "127.0.0.2", "::1", "fd00::1", "2600:1f18::7"]
)
def test_endpoints_of_a_node_are_taken(ip: str) -> None:
    assert Endpoints((ip,), (1,), 2).nodes == (ip,)


def test_float8_and_long_contexts_are_told_to_the_runtime_as_to_the_compiler() -> None:
    """NxD Inference: inference_demo.py (float8), runtime_env.py (scratchpad); the runtime guide: one number on both sides."""
    made, ends = layout(2, ranks_per_process=SPMD, instance=instance("inf2.xlarge")), Endpoints(("10.0.0.7",), (1,), 2)
    (plain,) = all_of(made, "inf2.xlarge", ends)
    for host, more in (
        (Host("6.1", float8=True), {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}),
        (Host("6.1", length=releases.LONG_CONTEXT - 1), {}),
        (Host("6.1", length=releases.LONG_CONTEXT), {"NEURON_SCRATCHPAD_PAGE_SIZE": "1024"}),
        (Host("6.1", flags="--hbm-scratchpad-page-size=512 --verbose=35"), {"NEURON_SCRATCHPAD_PAGE_SIZE": "512"}),
    ):
        assert all_of(made, "inf2.xlarge", ends, host) == [plain | more]
    node = instance("trn2.48xlarge")
    made = layout(64, ranks_per_process=SPMD, instance=node)
    out = environment(made, made.workers[0], node, range(64), ends, Host("6.1", length=65536), "m")
    assert out["NEURON_RT_DBG_SCRATCHPAD_ON_SINGLE_CORE"] == "1"
    for flags in ("", "--hbm-scratchpad-page-size=2048"):
        compiled = releases.arguments("decode", 65536, "trn2", 2, False, releases.CompilerOptions(flags=flags))
        (page,) = re.findall(r"--hbm-scratchpad-page-size=(\d+)", compiled)
        assert page == releases.variables(float8=False, length=65536, lnc=2, async_mode=False, flags=flags)["NEURON_SCRATCHPAD_PAGE_SIZE"]


OURS = ALWAYS | {"NEURON_RT_VISIBLE_CORES": "0,1", "NEURON_LOGICAL_NC_CONFIG": "2", "XLA_HANDLE_SPECIAL_SCALAR": "1", "NEURON_RANK_ID": "0"}


@pytest.mark.parametrize(
    ("said", "changed", "notes"),
    [
        ({}, {}, 0),
        (
            {"NEURON_RT_LOG_LEVEL": "DEBUG", "NEURON_RT_INSPECT_ENABLE": "1", "NEURON_RT_INSPECT_OUTPUT_DIR": "/p"},
            {},
            0,
        ),  # never exported by us
        ({"NEURON_RT_VISIBLE_CORES": "0-7", "OMP_NUM_THREADS": "1"}, {}, 0),
        ({"NEURON_RT_EXEC_TIMEOUT": "30", "NEURON_PROCESS_TAG": ""}, {"NEURON_RT_EXEC_TIMEOUT": "30"}, 1),
        ({"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, {}, 0),
        ({"NEURON_RANK_ID": "7"}, {}, 1),  # ours holds, and it is said
    ],
)
def test_what_the_operator_set_is_honoured(said: dict[str, str], changed: dict[str, str], notes: int) -> None:
    values, told = releases.agreed(OURS, said.get)
    assert values == OURS | changed and len(told) == notes
    assert all(any(f"{name}={value}" in note for name, value in said.items()) for note in told)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, "NEURON_LOGICAL_NC_CONFIG=1 contradicts the deployment.*write the instance with :lnc1"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, "NEURON_RT_VIRTUAL_CORE_SIZE=1 contradicts"),
        (
            {"XLA_HANDLE_SPECIAL_SCALAR": "0"},
            "XLA_HANDLE_SPECIAL_SCALAR=0 contradicts how the graphs are compiled, which needs 1; unset it",
        ),
        ({"NEURON_SCRATCHPAD_PAGE_SIZE": "512"}, "compile.flags: --hbm-scratchpad-page-size=512"),
    ],
)
def test_what_contradicts_the_graphs_is_refused_by_name(said: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        releases.agreed(OURS, said.get)


def test_compiler_flags_of_the_environment_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", " --enable-saturate-infinity ")
    with pytest.raises(ConfigError, match="NEURON_CC_FLAGS=.* write compile.flags: '--enable-saturate-infinity'"):
        devices.check("neuron")
    releases.refuse_flags(None), releases.refuse_flags(" ")


@pytest.mark.parametrize(
    ("chip", "said", "lnc"),
    [("inf2", {}, 1), ("trn2", {}, 2), ("trn2", {"A": "1"}, 1), ("inf2", {"A": "1", "B": ""}, 1), ("trn3", {"A": "2", "B": "2"}, 2)],
)
def test_logical_cores_without_an_instance(chip: str, said: dict[str, str | None], lnc: int) -> None:
    assert releases.logical(chip, said) == lnc


@pytest.mark.parametrize(
    ("chip", "said"), [("inf2", {"A": "2"}), ("trn2", {"A": "3"}), ("trn2", {"A": "1", "B": "2"}), ("trn1", {"A": "x"})]
)
def test_logical_cores_the_chip_has_not(chip: str, said: dict[str, str | None]) -> None:
    with pytest.raises(ConfigError, match=f"A=.* is not possible on {chip}; write"):
        releases.logical(chip, said)


def test_what_was_there_before_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second model of the process must not take what the first exported for the operator's word; nor must a child process."""
    for name in ("RAYNEURON_EXPORTED", "RAYNEURON_RUNTIME", "NEURON_PROCESS_TAG"):
        monkeypatch.setenv(name, "")  # taken back at the end
    monkeypatch.delenv("NEURON_PROCESS_TAG")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
    for cores in ("4,5", "6,7"):
        settings.export({"NEURON_RT_VISIBLE_CORES": cores, "NEURON_PROCESS_TAG": f"m{cores}"})
        assert (settings.visible_cores(), settings.given("NEURON_RT_VISIBLE_CORES"), settings.given("NEURON_PROCESS_TAG")) == (
            cores,
            "4-7",
            None,
        )
    code = "from rayneuron import settings; print(settings.given('NEURON_RT_VISIBLE_CORES'), settings.bound_cores())"
    settings.bind("6,7", "m")
    assert settings.bound_cores() == ("6,7", "m")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "4-7 None\n"
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")  # somebody says so now
    assert settings.given("NEURON_RT_VISIBLE_CORES") == "0-1"
    settings.bind("0,1", "other")
    assert settings.bound_cores() == ("6,7", "m"), "the runtime reads it once"


def test_cores_must_fit_the_ranks() -> None:
    node = instance("inf2.48xlarge")
    made = layout(8, ranks_per_process=SPMD, instance=node)
    ends = Endpoints(("10.0.0.7",), (1,), 2)
    with pytest.raises(ConfigError, match="drives 8 ranks but was given 4 cores"):
        environment(made, made.workers[0], node, range(4), ends, AL2023, "m")
    with pytest.raises(ConfigError, match="not contiguous"):
        environment(made, made.workers[0], node, [0, 1, 2, 3, 4, 5, 6, 8], ends, AL2023, "m")


@pytest.mark.parametrize(("roots", "host", "free"), [((7, 7), 8, True), ((7, 8), 7, False), ((7, 8), 8, True), ((9, 9), 7, True)])
def test_meeting_places_of_one_node_differ(roots: tuple[int, ...], host: int, free: bool) -> None:  # BR-13
    """Two stages on two nodes: each node has its own ports; the host's messages meet on the first."""
    made = layout(2, 2, 2, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    endpoints = Endpoints(("10.0.0.1", "10.0.0.2"), roots, host)
    if free:
        assert all_of(made, "trn1.32xlarge", endpoints)[1]["NEURON_RT_ROOT_COMM_ID"] == f"10.0.0.2:{roots[1]}"
    else:
        with pytest.raises(ConfigError, match="10.0.0.1:7, 10.0.0.2:8, 10.0.0.1:7 of one group must differ"):
            all_of(made, "trn1.32xlarge", endpoints)
    both = layout(2, 2, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    with pytest.raises(ConfigError, match="must differ"):
        all_of(both, "trn1.32xlarge", Endpoints(("10.0.0.1",), (7, 7), 8))
