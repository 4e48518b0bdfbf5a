"""The environment of every worker of every instance type, whole: a table by hand from the instance pages and the guides."""

from __future__ import annotations

import pytest

from rayneuron.devices.neuron import releases
from rayneuron.errors import ConfigError
from rayneuron.placement.environment import Endpoints, Host, environment
from rayneuron.placement.instances import INSTANCES, instance
from rayneuron.placement.layout import layout
from tests.placement.test_environment import AL2023, ALWAYS, OURS, SPMD, all_of, cores

EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
EVERY_TYPE = [  # instance, tp, pp, nodes, first core -> cores, threads, ranks of nodes and stages, LNC; by hand, from the instance pages
    ("inf2.xlarge", 2, 1, 1, 0, "0,1", 4, {}),
    ("inf2.xlarge", 1, 1, 1, 1, "1", 2, {}),
    ("inf2.8xlarge", 2, 1, 1, 0, "0,1", 32, {}),
    ("inf2.24xlarge", 8, 1, 1, 0, "0,1,2,3,4,5,6,7", 64, {}),
    ("inf2.24xlarge", 4, 1, 1, 8, "8,9,10,11", 32, {}),
    ("inf2.24xlarge", 12, 1, 1, 0, "0,1,2,3,4,5,6,7,8,9,10,11", 96, {}),
    ("inf2.48xlarge", 8, 1, 1, 16, "16,17,18,19,20,21,22,23", 64, {}),
    ("inf2.48xlarge", 12, 1, 1, 12, cores(12, 12), 96, {}),
    ("inf2.48xlarge", 24, 1, 1, 0, cores(0, 24), 192, {}),
    ("inf2.48xlarge", 24, 2, 2, 0, cores(0, 24), 192, {"NEURON_PP_STAGES": "2"}),  # no EFA there: stages alone may span nodes
    ("trn1.2xlarge", 2, 1, 1, 0, "0,1", 8, {}),
    ("trn1.32xlarge", 8, 1, 1, 24, "24,25,26,27,28,29,30,31", 32, {}),
    ("trn1.32xlarge", 16, 1, 1, 16, cores(16, 16), 64, {}),
    ("trn1.32xlarge", 128, 1, 4, 0, cores(0, 32), 128, EFA | {"NEURON_LOCAL_TP": "32"}),
    ("trn1.32xlarge", 32, 4, 4, 0, cores(0, 32), 128, EFA | {"NEURON_PP_STAGES": "4"}),
    ("trn1.32xlarge", 64, 2, 4, 0, cores(0, 32), 128, EFA | {"NEURON_LOCAL_TP": "32", "NEURON_PP_STAGES": "2"}),
    ("trn1n.32xlarge", 64, 1, 2, 0, cores(0, 32), 128, EFA | {"NEURON_LOCAL_TP": "32"}),
    ("trn2.3xlarge", 4, 1, 1, 0, "0,1,2,3", 12, {"NEURON_LOGICAL_NC_CONFIG": "2"}),
    ("trn2.3xlarge:lnc1", 8, 1, 1, 0, "0,1,2,3,4,5,6,7", 12, {"NEURON_LOGICAL_NC_CONFIG": "1"}),
    ("trn2.48xlarge", 64, 1, 1, 0, cores(0, 64), 192, {"NEURON_LOGICAL_NC_CONFIG": "2"}),
    ("trn2.48xlarge", 16, 1, 1, 48, cores(48, 16), 48, {"NEURON_LOGICAL_NC_CONFIG": "2"}),
    ("trn2.48xlarge:lnc1", 64, 1, 1, 64, cores(64, 64), 96, {"NEURON_LOGICAL_NC_CONFIG": "1"}),
    ("trn2.48xlarge", 128, 1, 2, 0, cores(0, 64), 192, EFA | {"NEURON_LOCAL_TP": "64", "NEURON_LOGICAL_NC_CONFIG": "2"}),
    ("trn2u.48xlarge", 64, 2, 2, 0, cores(0, 64), 192, EFA | {"NEURON_PP_STAGES": "2", "NEURON_LOGICAL_NC_CONFIG": "2"}),
]


@pytest.mark.parametrize(("kind", "tp", "pp", "nodes", "first", "listed", "threads", "more"), EVERY_TYPE, ids=lambda v: str(v)[:18])
def test_every_type(kind: str, tp: int, pp: int, nodes: int, first: int, listed: str, threads: int, more: dict[str, str]) -> None:
    """All that every worker is given, and nothing else: what is not in the table is not set."""
    node, made = instance(kind), layout(tp, pp, nodes, ranks_per_process=SPMD, instance=instance(kind))
    ips, a_stage = tuple(f"10.0.0.{i + 1}" for i in range(nodes)), max(1, nodes // pp)
    ends = Endpoints(ips, tuple(62182 + i for i in range(pp)), 62199)
    assert len(made.workers) == nodes
    for i, worker in enumerate(made.workers):
        stage = i // a_stage
        mine = {
            "NEURON_RT_VISIBLE_CORES": listed, "NEURON_RT_NUM_CORES": str(len(listed.split(","))), "OMP_NUM_THREADS": str(threads),
            "NEURON_PROCESS_TAG": "m" if pp == 1 else f"m/stage{stage}",
        }  # fmt: skip
        mine |= {"NEURON_RT_ROOT_COMM_ID": f"{ips[stage * a_stage]}:{62182 + stage}"} if tp > 1 else {}
        mine |= {"NEURON_RANK_ID": str(i)} if nodes > 1 else {}
        mine |= {"CPU_COMM_ID": "10.0.0.1:62199"} if pp > 1 else {}
        run = range(first, first + len(worker.ranks))
        assert environment(made, worker, node, run, ends, AL2023, "m") == ALWAYS | mine | more


def test_variables_of_another_way_to_run_are_refused() -> None:
    """torch-xla's one process a core, as training starts it: its client would wait for processes that are none of ours."""
    for name in ("NEURON_PJRT_PROCESSES_NUM_DEVICES", "NEURON_PJRT_PROCESS_INDEX", "NEURON_PJRT_WORLD_SIZE"):
        with pytest.raises(ConfigError, match=f"{name}=2 is for one process a core.*unset it"):
            releases.agreed(OURS, {name: "2"}.get)
        assert releases.agreed(OURS, {name: ""}.get)[0] == OURS
    made = layout(64, 2, 4, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    ends = Endpoints(("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), (1, 2), 3)
    for given in all_of(made, "trn1.32xlarge", ends, Host("6.1", float8=True, length=65536, async_mode=True, cache_url="s3://b/p")):
        assert not [name for name in given if name.startswith(("NEURON_PJRT", "NEURON_RT_INSPECT", "NEURON_CC", "NEURON_RT_RESET"))]


def test_no_type_is_forgotten() -> None:
    assert {kind.partition(":")[0] for kind, *_ in EVERY_TYPE} == set(INSTANCES)


def test_degrees_follow_the_logical_cores() -> None:
    """One chip of Trn2 has eight physical cores: at LNC 1 they make a group, which a list cut to the four logical ones refused."""
    assert instance("trn2.3xlarge").degrees == (1, 2, 4) and instance("trn2.3xlarge:lnc1").degrees == (1, 2, 4, 8)
    assert instance("trn2.48xlarge:lnc1").degrees == instance("trn2.48xlarge").degrees == (1, 2, 4, 8, 16, 32, 64)
    assert instance("trn2.3xlarge:lnc1").logical(2) == instance("trn2.3xlarge")
    for kind in INSTANCES.values():
        assert max(kind.degrees) <= kind.cores
