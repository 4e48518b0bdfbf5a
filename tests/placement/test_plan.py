"""Plans: placement of whole deployment files, memory limits, refusals that say what fits; every file in deployments/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayneuron import deployment_file
from rayneuron.config import parse
from rayneuron.engine.buckets import capacity
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.group.assignment import Common, begins
from rayneuron.group.messages import Placed
from rayneuron.placement.fitting import Wanted, capacity_of, check_host, drafting, graphs_of
from rayneuron.placement.instances import INSTANCES, declared, instance
from rayneuron.placement.layout import group_layout
from rayneuron.placement.ledger import Ledger
from rayneuron.placement.listing import describe, format
from rayneuron.placement.memory import float8
from rayneuron.placement.plan import PlacementPlan, plan, read_raw, target
from tests.placement.test_cores import listed, neuron_ls
from tests.placement.test_memory import LLAMA_3_70B, LLAMA_31_8B, LLAMA_31_405B

ROOT = Path(__file__).resolve().parents[2]
SPMD = 1024
INF2, TRN1 = instance("inf2.48xlarge"), instance("trn1.32xlarge")


def want(raw: dict[str, Any] = LLAMA_31_8B, processes: int = SPMD, **settings: Any) -> Wanted:
    return Wanted(parse({"model": {"path": "/m"}, "dtype": "bf16", "max_model_len": 4096, "max_num_seqs": 8, **settings}), raw, processes)


def placed(made: PlacementPlan) -> list[tuple[str, int, int, str]]:
    """(group, node, stage, cores) of each worker."""
    return [
        (f"{g.name}{g.replica}", p.node, p.worker.stage, f"{p.cores[0]}-{p.cores[-1]}") for g in made.groups for p in g.places
    ]  # fmt: skip


def test_two_models_on_one_host_get_exact_disjoint_cores() -> None:  # BR-11
    made = plan({"a": want(tensor_parallel=2), "b": want(tensor_parallel=8)}, INF2)
    assert placed(made) == [("b0", 0, 0, "0-7"), ("a0", 0, 0, "8-9")]
    assert made.free == (frozenset(range(10, 24)),)
    assert made.groups[1].places[0].environment["NEURON_RT_VISIBLE_CORES"] == "8,9"


def test_the_planned_environment_is_that_of_the_start() -> None:
    """What the file tells the runtime is in the plan too, steps in flight included."""
    for said in ({}, {"compile": {"async_mode": True}}, {"kv_dtype": "f8e4m3"}):
        wanted = want(tensor_parallel=2, **said)  # type: ignore[arg-type]
        planned = plan({"a": wanted}, INF2).groups[0].places[0].environment
        config = wanted.config.model_copy(update={"instance": INF2.name})
        made = group_layout(config, 1024)
        common = Common(capacity_of(config, wanted.raw), "bf16", 1, "m", float8(config, wanted.raw))
        (begin,) = begins(config, made, [Placed(cores=(0, 1), ports=(20000, 20001))], ("198.18.0.1",), {0: (1, 1)}, common)
        assert {**planned, "NEURON_PROCESS_TAG": ""} == {**begin.environment, "NEURON_PROCESS_TAG": ""}


GEMMA_2 = {**LLAMA_31_8B, "model_type": "gemma2", "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
DEVICE = {"device": "cpu"}


@pytest.mark.parametrize(
    ("raw", "settings", "verify"),
    [
        (LLAMA_31_8B, DEVICE, 9),
        (LLAMA_31_8B, {**DEVICE, "tensor_parallel": 2, "dtype": "fp32"}, 9),
        (LLAMA_31_8B, {**DEVICE, "speculative_config": None}, 0),
        (LLAMA_31_8B, {**DEVICE, "speculative_config": {"num_speculative_tokens": 3}}, 4),
        (LLAMA_31_8B, {"device": "neuron"}, 0),
        (LLAMA_31_8B, {**DEVICE, "pipeline_parallel": 2}, 0),
        (LLAMA_31_8B, {**DEVICE, "compile": {"async_mode": True}}, 0),
        (LLAMA_31_8B, {**DEVICE, "kv_dtype": "f8e4m3"}, 0),
        (LLAMA_31_8B, {**DEVICE, "dtype": "fp16"}, 0),
        (LLAMA_31_8B, {**DEVICE, "tensor_parallel": 16, "shard_over_sequence": True}, 0),
        (GEMMA_2, DEVICE, 0),
        (GEMMA_2, {**DEVICE, "speculative_config": {}}, 9),
    ],
)
def test_where_nothing_is_said_drafts_are_looked_up_wherever_that_is_exact_to_the_bit(raw, settings, verify) -> None:
    wanted = want(raw, **settings)
    assert capacity_of(wanted.config, raw).verify == verify
    assert (drafting(wanted.config, raw) is not None) == bool(verify)


def test_what_an_autoscaler_may_take_is_reserved() -> None:  # BR-11
    scaling = {"serving": {"autoscaling": {"min_replicas": 0, "max_replicas": 4}}}
    made = plan({"a": want(tensor_parallel=2, **scaling), "b": want(tensor_parallel=8, serving={"num_replicas": 2})}, INF2)
    assert placed(made) == [
        ("b0", 0, 0, "0-7"), ("b1", 0, 0, "8-15"),
        ("a0", 0, 0, "16-17"), ("a1", 0, 0, "18-19"), ("a2", 0, 0, "20-21"), ("a3", 0, 0, "22-23"),
    ]  # fmt: skip
    assert made.free == (frozenset(),)
    tags = [group.places[0].environment["NEURON_PROCESS_TAG"] for group in made.groups]
    assert tags == ["b#0", "b#1", "a#0", "a#1", "a#2", "a#3"]
    roots = [group.places[0].environment["NEURON_RT_ROOT_COMM_ID"] for group in made.groups]
    assert len(set(roots)) == 6, "no two groups of a node meet at one port (BR-13)"


def test_groups_over_nodes_are_in_node_order() -> None:  # BR-12
    made = plan({"big": want(LLAMA_31_405B, tensor_parallel=64, nodes=2, max_num_seqs=1), "small": want(tensor_parallel=8)}, TRN1, 3)
    assert placed(made) == [("big0", 0, 0, "0-31"), ("big0", 1, 0, "0-31"), ("small0", 2, 0, "0-7")]
    first, second = (place.environment for place in made.groups[0].places)
    assert first["NEURON_RT_ROOT_COMM_ID"] == second["NEURON_RT_ROOT_COMM_ID"]
    assert (first["NEURON_RANK_ID"], second["NEURON_RANK_ID"]) == ("0", "1")


def test_stages_on_one_and_on_several_nodes() -> None:
    config = {"tensor_parallel": 8, "pipeline_parallel": 3}
    assert placed(plan({"m": want(LLAMA_3_70B, **config)}, INF2)) == [("m0", 0, 0, "0-7"), ("m0", 0, 1, "8-15"), ("m0", 0, 2, "16-23")]
    made = plan({"m": want(LLAMA_3_70B, **config, nodes=3)}, INF2)
    assert placed(made) == [("m0", 0, 0, "0-7"), ("m0", 1, 1, "0-7"), ("m0", 2, 2, "0-7")]
    ends = [place.environment["NEURON_RT_ROOT_COMM_ID"].split(":")[0] for place in made.groups[0].places]
    assert len(set(ends)) == 3, "each stage meets on its own node"
    held = [place.memory.weights for place in made.groups[0].places]
    assert held[0] > held[1] and held[2] > held[1], "the embedding is on the first stage, the head on the last"


def test_small_models_fill_the_fullest_node() -> None:
    models = {"a": want(tensor_parallel=24), "b": want(tensor_parallel=8), "c": want(tensor_parallel=8), "d": want(tensor_parallel=4)}
    assert placed(plan(models, INF2, 2)) == [("a0", 0, 0, "0-23"), ("b0", 1, 0, "0-7"), ("c0", 1, 0, "8-15"), ("d0", 1, 0, "16-19")]


def test_one_rank_a_process_divides_the_run() -> None:
    made = plan({"m": want(processes=1, tensor_parallel=4)}, INF2)
    assert [p.cores for p in made.groups[0].places] == [(0,), (1,), (2,), (3,)]
    assert made.groups[0].layout.bundles == ({"CPU": 4.0, "neuron_cores": 4},)


REFUSED = [
    ({"m": want(tensor_parallel=32)}, INF2, None, "m: tensor_parallel 32 is not possible on inf2.48xlarge.*write tensor_parallel: 24"),
    (
        {"a": want(tensor_parallel=8), "b": want(tensor_parallel=24)},
        INF2, None,
        r"a: replica 0 wants 8 cores, left are node 0: none of 1 x inf2.48xlarge; all .* want 32 cores of 24; write --nodes 2",
    ),
    (
        {"a": want(tensor_parallel=8, serving={"num_replicas": 4})},
        INF2, None,
        r"replica 3 wants 8 cores.*want 32 cores of 24; write --nodes 2, or num_replicas: 3 for a",
    ),
    (
        {"a": want(tensor_parallel=12), "b": want(tensor_parallel=8), "c": want(tensor_parallel=8)},
        INF2, None,
        r"c: replica 0 wants 8 cores, left are node 0: 12-15.*write --nodes 2, or tensor_parallel: 4 for c",
    ),
    (
        {"m": want(LLAMA_31_405B, tensor_parallel=128, nodes=4, max_num_seqs=1)},
        TRN1, 2,
        r"wants 32 cores on each of 4 nodes.*write --nodes 4",
    ),
    (
        {"m": want(LLAMA_3_70B, tensor_parallel=8)},
        INF2, None,
        r"m: needs 18\.\d\d GiB a core \(weights 16\.4.* has 16.00; write tensor_parallel: 24, or quantization: int8",
    ),
    (
        {"m": want(tensor_parallel=1, max_num_seqs=64)},
        instance("trn2.3xlarge"), None,
        r"needs 4\d\.\d\d GiB a core .*; write tensor_parallel: 4, or max_num_seqs: \d+, or max_model_len: \d+",
    ),
    (
        {"m": want(tensor_parallel=2, max_num_seqs=4, device="neuron", lora={"max_loras": 64, "max_lora_rank": 64})},
        INF2, None,
        r"needs 2\d\.\d\d GiB a core \(weights 7\.48 \+ adapters 13\.50 \+ KV .* has 16.00; write .*lora.max_loras: 2\d",
    ),
    ({"m": want(tensor_parallel=64)}, instance("trn2.48xlarge"), None, "more than the model's 32 attention heads; write .*: 32"),
    ({"m": want(pipeline_parallel=33)}, declared(40, 8), None, "leaves a stage without any of the 32 layers"),
    ({"m": want({"model_type": "lama"})}, INF2, None, "m: model_type 'lama' is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "kind", "nodes", "says"), REFUSED, ids=lambda value: str(value)[:30])
def test_refusals_say_what_would_fit(wanted: dict[str, Wanted], kind: Any, nodes: int | None, says: str) -> None:  # BR-07, BR-09, BR-93
    with pytest.raises((ConfigError, CheckpointError), match=says):
        plan(wanted, kind, nodes)


@pytest.mark.parametrize("setting", ["max_num_seqs", "max_model_len", "tensor_parallel"])
def test_what_a_refusal_suggests_does_fit(setting: str) -> None:
    settings = {"tensor_parallel": 2, "max_num_seqs": 96, "max_model_len": 4096}
    with pytest.raises(ConfigError) as refused:
        plan({"m": want(**settings)}, INF2)
    advice = str(refused.value).split("; write ")[1]
    value = next(part.split(": ")[1] for part in advice.split(", or ") if part.startswith(setting))
    plan({"m": want(**{**settings, setting: int(value)})}, INF2)
    if setting == "max_num_seqs":
        with pytest.raises(ConfigError):
            plan({"m": want(**{**settings, setting: int(value) + 1})}, INF2)


def test_the_guides_example_of_8b_on_a_small_instance() -> None:
    """'requires about 16GB memory ... a trn1.2xlarge with 32GB device memory is sufficient' (feature guide), batch 1, bf16."""
    made = plan({"m": want(tensor_parallel=2, max_num_seqs=1)}, instance("trn1.2xlarge"))
    assert 16e9 < 2 * (made.groups[0].places[0].memory.weights + made.groups[0].places[0].memory.kv) < 18e9
    with pytest.raises(ConfigError, match="write tensor_parallel: 2"):
        plan({"m": want(tensor_parallel=1, max_num_seqs=1)}, instance("trn1.2xlarge"))


def test_the_text_says_everything() -> None:
    text = format(plan({"m": want(tensor_parallel=4)}, TRN1))
    for part in (
        "1 x trn1.32xlarge: 32 cores of 16.00 GiB",
        "m replica 0: tensor_parallel 4 x pipeline_parallel 1 on 1 node",
        "bundles [{CPU: 1, neuron_cores: 4}] STRICT_PACK",
        "worker 0: node 0, stage 0, ranks 0-3, cores 0-3",
        "GiB a core: weights 3.",
        "    NEURON_RT_VISIBLE_CORES=0,1,2,3\n",
        "node 0 free: 4-31",
        "note: m: TP 4 on Trn1 needs Neuron runtime 2.23",
    ):
        assert part in text, part


def test_the_instance_to_plan_for() -> None:
    files = {"a": want(instance="inf2.48xlarge"), "b": want(instance="trn1.32xlarge")}
    with pytest.raises(ConfigError, match="different instances .*say which one with --instance inf2.48xlarge"):
        target(files, None, 2, 8 * 2**30)
    assert target(files, "trn2.48xlarge", 2, 8 * 2**30) is INSTANCES["trn2.48xlarge"]
    assert target({"a": files["a"]}, None, 2, 8 * 2**30).name == "inf2.48xlarge"
    plain = target({"a": want(tensor_parallel=4)}, None, 2, 8 * 2**30)
    assert (plain.name, plain.cores, plain.core_memory_bytes, plain.vcpus) == ("this machine", 4, 8 * 2**30, 2)
    assert any(
        "the file says instance: inf2.48xlarge" in note
        for note in plan({"a": want(instance="inf2.48xlarge", tensor_parallel=8)}, TRN1).notes
    )


def test_config_of_the_model(tmp_path: Path) -> None:
    inline = parse({"model": {"path": "/nowhere", "config": LLAMA_31_8B}})
    assert read_raw(inline) == LLAMA_31_8B
    with pytest.raises(CheckpointError, match="inline as model.config"):
        read_raw(parse({"model": {"path": str(tmp_path)}}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_raw(parse({"model": {"path": str(tmp_path)}})) == {"model_type": "llama"}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        read_raw(parse({"model": {"path": str(tmp_path)}}))


def demo(path: str) -> Path:
    """A directory with the demo model's config.json: what `rayneuron.demo` writes, without making the weights."""
    from rayneuron import demo as demos

    return demos.resolve(path)


@pytest.mark.parametrize("path", sorted((ROOT / "deployments").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_deployment_file_has_a_plan(path: Path, request: pytest.FixtureRequest) -> None:  # BR-09
    if "demo:smollm2" in path.read_text():
        request.getfixturevalue("smollm2")
    read = deployment_file.read(path)
    text = describe(read.deployments, vcpus=2, ranks_per_process=lambda device: 1 if device == "cpu" else SPMD, resolve=demo)
    assert all(f"{name} replica 0" in text for name in read.deployments)


def test_the_named_files() -> None:
    made = {}
    wide = [(f"llama405b_trn1x4{more}", TRN1, 4) for more in ("", "_pp")]
    for name, kind, nodes in (("llama70b", TRN1, 1), *wide, ("inf2_three_models", INF2, 1)):
        read = deployment_file.read(ROOT / f"deployments/{name}.yaml")
        made[name] = plan({n: Wanted(d, read_raw(d), SPMD) for n, d in read.deployments.items()}, kind, nodes)
    assert placed(made["llama70b"]) == [("llama70b0", 0, 0, "0-31")]
    assert placed(made["llama405b_trn1x4"]) == [("llama405b0", n, 0, "0-31") for n in range(4)]
    assert placed(made["llama405b_trn1x4_pp"]) == [("llama405b0", n, n, "0-31") for n in range(4)], "a stage a host"
    assert placed(made["inf2_three_models"]) == [("chat0", 0, 0, "0-7"), ("mistral0", 0, 0, "8-15"), ("qwen0", 0, 0, "16-23")]
    assert all(len(group.graphs) <= 12 for one in made.values() for group in one.groups), "each graph is minutes of compiling"


@pytest.mark.parametrize("path", sorted((ROOT / "deployments").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_command_takes_under_two_seconds_and_no_torch(path: Path, request: pytest.FixtureRequest) -> None:
    if "demo:smollm2" in path.read_text():
        request.getfixturevalue("smollm2")
    arguments = ["plan", str(path), *(["--nodes", "2"] if path.stem == "llama70b_pools" else [])]
    code = (
        f"import sys, time; from rayneuron.cli import main; code = main({arguments!r})\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules); print(time.process_time()); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stderr
    *lines, took_s = ran.stdout.splitlines()
    assert " replica 0: tensor_parallel " in "\n".join(lines)
    assert float(took_s) < 2.0, "of its own CPU, not of a clock that others' work makes later; a tenth of it where this was written"


def test_a_plain_machine_is_told_what_will_happen_there() -> None:
    """No instance, so nothing is counted or exported, and all ranks share the machine's memory."""
    wanted = {"a": want(processes=1), "b": want(processes=1, tensor_parallel=2)}
    text = format(plan(wanted, target(wanted, None, 4, 60 * 2**30)))
    assert text.startswith("this machine: 4 CPUs, 60.00 GiB shared by 3 ranks; no instance is named, so no cores are counted\n")
    assert "NEURON" not in text and "neuron_cores" not in text and "free" not in text
    assert "of 60.00 (" in text and "b replica 0: tensor_parallel 2" in text and "bundles [{CPU: 2}] STRICT_PACK" in text
    assert "\na replica 0: tensor_parallel 1 x pipeline_parallel 1 on 1 node" in text
    with pytest.raises(ConfigError, match=r"all 3 ranks together need 4\d\.\d\d GiB, this machine has 39\.00; write a smaller"):
        plan(wanted, target(wanted, None, 4, 39 * 2**30))
    with pytest.raises(ConfigError, match=r"a: needs 19\.7\d GiB a rank .*, this machine has 19\.50; write tensor_parallel: 2"):
        plan(wanted, target(wanted, None, 4, int(19.5 * 2**30)))


def test_the_compile_cache_reaches_the_workers() -> None:
    made = plan({"m": want(tensor_parallel=4, compile={"cache": "s3://bucket/graphs"})}, TRN1)
    assert made.groups[0].places[0].environment["NEURON_COMPILE_CACHE_URL"] == "s3://bucket/graphs"
    assert "NEURON_COMPILE_CACHE_URL" not in plan({"m": want(tensor_parallel=4)}, TRN1).groups[0].places[0].environment


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m rayneuron plan deployments/llama405b_trn1x4.yaml --set device=cpu | head -n 1"
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert ran.stdout.startswith("4 x trn1.32xlarge") and ran.stderr == ""


def test_only_what_the_operator_left_is_planned(tmp_path: Path) -> None:
    """Fault 24: cores 4-7 are ours, of every node alike; and of a container's devices as well."""
    left = frozenset(range(4, 8))
    made = plan({"a": want(tensor_parallel=2), "b": want(tensor_parallel=2)}, INF2, left=left)
    assert placed(made) == [("a0", 0, 0, "4-5"), ("b0", 0, 0, "6-7")] and made.free == (frozenset(),)
    text = format(made)
    assert "of each node only cores 4-7 are there or left to us\n" in text and "    NEURON_RT_VISIBLE_CORES=4,5\n" in text
    with pytest.raises(
        ConfigError, match=r"a: replica 0 wants 8 cores, left are node 0: 4-7 of 1 x .*want 8 cores of 4; write tensor_parallel: 4"
    ):
        plan({"a": want(tensor_parallel=8)}, INF2, left=left)
    asked = {"a": parse({"model": {"path": "/m", "config": LLAMA_31_8B}, "instance": "inf2.48xlarge", "tensor_parallel": 2})}
    said = describe(asked, vcpus=2, ranks_per_process=lambda device: 1, visible="4-7")
    assert "ranks 0, cores 4\n" in said and "node 0 free: 6-7;" in said
    with pytest.raises(ConfigError, match="NEURON_RT_VISIBLE_CORES=40 names cores 40, but inf2.48xlarge has cores 0-23"):
        describe(asked, vcpus=2, ranks_per_process=lambda device: 1, visible="40")


def test_weights_pass_through_the_hosts_memory() -> None:
    """Fault 29: 8B in bf16 is 15 GiB, on hosts of 16 and of 32 GiB whose devices are alike."""
    with pytest.raises(
        ConfigError, match=r"own memory holds them: 16\.9\d GiB .*inf2.xlarge has 16.00; write instance: inf2.8xlarge, or quan.*int8"
    ):
        plan({"m": want(tensor_parallel=2, max_num_seqs=1)}, instance("inf2.xlarge"))
    for settings, kind in (({}, "inf2.8xlarge"), ({}, "trn1.2xlarge"), ({"quantization": "int8"}, "inf2.xlarge")):
        made = plan({"m": want(tensor_parallel=2, max_num_seqs=1, **settings)}, instance(kind))
        weights = 2 * made.groups[0].places[0].memory.weights
        assert made.loading == (weights + 2 * 2**30,) and f"; host memory while loading: {made.loading[0] / 2**30:.2f} of " in format(made)
    over = plan({"m": want(LLAMA_31_405B, tensor_parallel=128, nodes=4, max_num_seqs=1)}, TRN1)
    assert all(180 < held / 2**30 < 260 for held in over.loading), "a quarter of 812 GB, and what is repeated on each"
    with pytest.raises(ConfigError, match=r"trn1.32xlarge has 512.00; write fewer models or replicas, or nodes: N"):
        check_host(600 * 2**30, 550 * 2**30, TRN1)
    assert plan({"m": want(tensor_parallel=2)}, declared(4, 8)).loading[0] > 2**34, (
        "one that only declares cores has no host to compare with"
    )


def test_a_float8_plan_sets_what_float8_needs() -> None:
    made = plan({"m": want(tensor_parallel=2, kv_dtype="f8e4m3", max_model_len=32768, max_num_seqs=1)}, INF2)
    environment = made.groups[0].places[0].environment
    assert (environment["XLA_HANDLE_SPECIAL_SCALAR"], environment["UNSAFE_FP8FNCAST"]) == ("1", "1")
    assert environment["NEURON_SCRATCHPAD_PAGE_SIZE"] == "1024"
    stored = {"quantization_config": {"quant_method": "rayneuron", "dtype": "f8e4m3", "scheme": "per_channel"}}
    assert "UNSAFE_FP8FNCAST" in plan({"m": want({**LLAMA_31_8B, **stored}, tensor_parallel=2)}, INF2).groups[0].places[0].environment
    assert "UNSAFE_FP8FNCAST" not in plan({"m": want(tensor_parallel=2, quantization="int8")}, INF2).groups[0].places[0].environment


def test_the_doctor_says_what_is_left_to_us(tmp_path: Path) -> None:
    from rayneuron.placement import doctor

    ledger = Ledger(tmp_path / "cores" / "10.0.0.7", INF2)
    with ledger.take(2, "chat", allowed=range(4, 8)):
        lines = list(doctor.report(tmp_path / "cores", "inf2.48xlarge", visible="4-7", root=tmp_path))
        assert lines[:2] == [
            "inf2.48xlarge: cores 4-7 of 24 are here and left to us",
            "cores of 10.0.0.7: held 4-5, free 6-7 of inf2.48xlarge",
        ]
        neuron_ls(tmp_path, listed(INF2, [2, 3, 11]))
        assert list(doctor.report(tmp_path / "cores", root=tmp_path))[:2] == [
            "inf2.48xlarge: cores 4-7, 22-23 of 24 are here and left to us",
            "cores of 10.0.0.7: held 4-5, free 6-7, 22-23 of inf2.48xlarge",
        ]  # fmt: skip
    assert list(doctor.report(tmp_path / "none", root=tmp_path / "bare")) == [
        f"cores: no ledger under {tmp_path / 'none'}, so nobody has taken any on this machine"
    ]


EIGHT_B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
           "rope_theta": 5e5, "torch_dtype": "bfloat16"}  # fmt: skip


def on_neuron(**options: Any) -> str:
    config = parse({"model": {"path": "x", "config": EIGHT_B}, "device": "neuron", "instance": "inf2.48xlarge", "tensor_parallel": 8,
                    "max_model_len": 8192, "max_num_seqs": 32, **options})  # fmt: skip
    return describe({"a": config}, vcpus=2, ranks_per_process=lambda device: SPMD, resolve=Path)


def test_graphs_are_listed_truly_with_what_they_take() -> None:
    """Findings 8 and 9: at most 12 for 8B at 8k, by name, the moves among them; memory by what takes it, and which figure is a guess."""
    text = on_neuron()
    assert ", 11 graphs, " in text and "  decode        4  b1_t1_l2048_sampled_logits_last " in text and "  kv_export     1  n1" in text
    assert "runtime 1.82 (a guess: 1.00 scratchpad and collectives, 0.82 code and DMA rings of the graphs)" in text
    assert "compiling, once: 11 at a time of 24.00 GiB host memory each, 2 to 13 minutes (a guess)" in text
    scores = on_neuron(buckets={"scores": True})
    assert ", 13 graphs, " in scores and "b1_t128_l8192_logits_all" in scores
    drafts = on_neuron(speculative_config={"method": "ngram"})
    assert ", 15 graphs, " in drafts and "  verify        4  b1_t9_l2048_sampled_logits_all " in drafts


def test_many_graphs_must_be_asked_for() -> None:
    many, said = capacity(rows=2, length=2**20, chunk=2**18, few=True), {"model": {"path": "x"}, "device": "neuron"}
    with pytest.raises(ConfigError, match=r"^\d\d graphs would be compiled.* more than 32 must be asked for: write buckets: \{context_enc"):
        graphs_of(parse(said), many)
    assert len(graphs_of(parse({**said, "buckets": {"context_encoding": [512]}}), many)) > 32


@pytest.mark.parametrize("candidates", [0, 1025])
def test_candidates_the_chip_cannot_choose(candidates: int) -> None:
    """Finding 17."""
    with pytest.raises(ConfigError, match=f"on_device_sampling.global_topk {candidates}: TopK takes at most 16384 .*; write 256"):
        on_neuron(on_device_sampling={"neuron_compat": True, "global_topk": candidates})
