"""The environment of a worker: golden tables typed from the public guides, and what must never happen."""

from __future__ import annotations

import re

import pytest

from rayneuron.errors import ConfigError
from rayneuron.placement.environment import Endpoints, Host, environment, fork_safe
from rayneuron.placement.instances import declared, instance
from rayneuron.placement.layout import Layout, layout

SPMD = 1024
AL2023 = Host(kernel="6.1.112-122.189.amzn2023.x86_64")
ALWAYS = {"RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1", "NEURON_RT_EXEC_TIMEOUT": "600", "MALLOC_ARENA_MAX": "64"}


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


def test_two_stages_in_the_compatible_mode_are_as_the_developer_guide_starts_them() -> None:
    made = layout(32, 2, 2, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"), style="transformers-neuronx")
    one_root = ALWAYS | STAGES | {"NEURON_RT_ROOT_COMM_ID": "10.1.201.64:63423"}
    assert all_of(made, "trn1.32xlarge", Endpoints(("10.1.201.64", "10.1.201.65"), (63423, 63424), 8989)) == [
        one_root | {"NEURON_RANK_ID": "0", "NEURON_PROCESS_TAG": "llama/stage0"},
        one_root | {"NEURON_RANK_ID": "1", "NEURON_PROCESS_TAG": "llama/stage1"},
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
        (("0.0.0.0",), (1,), 2, "no address of one node"),
        (("10.0.0.1", "127.0.0.1"), (1,), 2, "127.0.0.1 cannot be reached from the other nodes"),  # BR-20
        (("10.0.0.1",), (29500,), 29500, "must differ from each other"),  # BR-13
        (("10.0.0.1", "10.0.0.2"), (7, 7), 8, "must differ from each other"),
        (("10.0.0.1",), (0,), 8, "lie in 1-65535"),  # port 0 is bound first, then published
    ],
)
def test_endpoints_nobody_could_reach_are_refused(nodes: tuple[str, ...], roots: tuple[int, ...], host: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Endpoints(nodes, roots, host)


def test_cores_must_fit_the_ranks() -> None:
    node = instance("inf2.48xlarge")
    made = layout(8, ranks_per_process=SPMD, instance=node)
    ends = Endpoints(("10.0.0.7",), (1,), 2)
    with pytest.raises(ConfigError, match="drives 8 ranks but was given 4 cores"):
        environment(made, made.workers[0], node, range(4), ends, AL2023, "m")
    with pytest.raises(ConfigError, match="not contiguous"):
        environment(made, made.workers[0], node, [0, 1, 2, 3, 4, 5, 6, 8], ends, AL2023, "m")
