"""How graphs become a model: what is compiled again and what is not, what a failure leaves, and for which world it is made."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayneuron import LLM, SamplingParams
from rayneuron.compile_cache.cache import Cache
from rayneuron.devices.base import LOGITS, SCORES, Shape
from rayneuron.devices.neuron import pipeline, releases, slots
from rayneuron.devices.neuron.ending import Ticker, Unwanted
from rayneuron.devices.neuron.releases import CompilerOptions
from rayneuron.devices.neuron.sdk import InGraph, sdk
from rayneuron.devices.neuron.targets import name
from rayneuron.errors import CompileError, ConfigError
from rayneuron.models import hub
from rayneuron.placement import instances
from tests.devices.neuron.test_device import OPTIONS, PARAMS, PROMPTS, cores, opened, silent, tokens
from tests.devices.neuron.test_groups import sleeping
from tests.models import cases

DECODE, PREFILL = Shape("decode", 2, 1, 32, LOGITS), Shape("prefill", 1, 16, 32, LOGITS)
MOVES = ["kv_copy_n16", "kv_export_n16", "kv_import_n16"]


@pytest.fixture
def compiled(cold: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the compiler was asked for, by name, and how often."""
    from neuronx_distributed.trace import functions

    asked: Counter[str] = Counter()
    for verb in ("compile", "compile_wlo"):
        original = getattr(functions, verb)

        def count(*args: Any, original: Any = original) -> Any:
            asked[args[-1]] += 1
            return original(*args)

        monkeypatch.setattr(functions, verb, count)
    return asked


def build(standin: Path, tiny: Path, shapes: list[Shape], ranks: int = 1, **options: Any) -> Path:
    device, program, _, _ = opened(standin, tiny, ranks, **options)
    return device.artifact(program, device.targets(shapes), silent)


def test_what_failed_alone_is_compiled_again(standin: Path, tiny: Path, compiled: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph fails: the log is where the error says, the others are kept, and the next attempt compiles what is missing."""
    one = CompilerOptions(workers=1)
    monkeypatch.setenv("STANDIN_FAIL_GRAPH", "kv_import")
    with pytest.raises(CompileError) as failed:
        build(standin, tiny, [DECODE, PREFILL], options=one, model="chat")
    text = str(failed.value)
    assert text.startswith("chat: graph kv_import_n16 (16 KV blocks) could not be compiled: ") and "[F137]" in text
    log = Path(re.search(r"The compiler's log is (\S+log-neuron-cc\.txt)\.", text)[1])  # type: ignore[index]
    assert "[F137]" in log.read_text() and log.parents[1].name == "kv_import_n16"
    first = {name(DECODE), name(PREFILL), "kv_export_n16", "kv_import_n16"}
    assert compiled == Counter(first), "one worker: what came after the failure was not begun"
    assert "3 of 5 graphs are compiled and kept" in text
    monkeypatch.delenv("STANDIN_FAIL_GRAPH")
    compiled.clear()
    built = build(standin, tiny, [DECODE, PREFILL], options=one)
    assert compiled == Counter(["kv_import_n16", "kv_copy_n16"])
    assert not log.exists(), "the next attempt works in a new folder, and leaves none behind"
    assert sorted(f.name for f in built.iterdir()) == ["manifest.json", "model.pt", "neuron_config.json"]


def test_a_longer_list_compiles_what_is_new(standin: Path, tiny: Path, compiled: Counter[str]) -> None:
    build(standin, tiny, [DECODE])
    compiled.clear()
    build(standin, tiny, [DECODE, PREFILL])
    assert compiled == Counter([name(PREFILL)])
    compiled.clear()
    build(standin, tiny, [DECODE, PREFILL], options=CompilerOptions(optimization=3))
    assert set(compiled) == {name(DECODE), name(PREFILL), *MOVES}, "other flags, other graphs"


def test_a_model_is_made_for_the_ranks_of_one_process(standin: Path, tiny: Path, compiled: Counter[str]) -> None:
    """Most graphs are the same for one node and for two; what is saved of them is not, and the runtime would not take it."""
    from neuronx_distributed.trace.nxd_model.nxd_model import NxDModel

    both = build(standin, tiny, [DECODE], ranks=2)
    compiled.clear()
    half = build(standin, tiny, [DECODE], ranks=2, local_ranks=1)
    assert half != both and set(compiled) <= {name(DECODE)}, "which returns the candidates of every rank where it cannot see all"
    for folder, count in ((both, 2), (half, 1)):
        assert set(NxDModel.load(str(folder / "model.pt"), 0, count).built_for.values()) == {count}


def test_weights_are_laid_out_for_all_graphs_or_for_none(
    cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-in's priority graph wants half of the matrices transposed: graphs that were not told compute nonsense."""
    from neuronx_distributed.trace import hlo_utils
    from neuronx_distributed.trace.nxd_model.nxd_model import NxDModel

    def turned(folder: Path) -> dict[str, frozenset[str]]:
        return {n: g.turned for n, g in NxDModel.load(str(folder / "model.pt"), 0, 1).graphs.items()}

    with_all = turned(build(cold, tiny, [DECODE, PREFILL]))
    assert len(with_all[name(DECODE)]) > 3 and with_all[name(DECODE)] == with_all[name(PREFILL)]
    assert not any(with_all[move] for move in MOVES), "they have no weights, for which the SDK refuses them"
    laid = []
    monkeypatch.setattr(hlo_utils, "apply_layout_transformation", lambda *args: laid.append(args[-1]))
    build(cold, tiny, [PREFILL, Shape("prefill", 1, 16, 32, SCORES)])
    assert not laid, "no decode graph: weights stay as they are"
    monkeypatch.setattr(pipeline._Compiler, "_laid", lambda *args: pytest.fail("laid out"))
    traced = {graph: SimpleNamespace(weight_name_to_idx={weight: 0}) for graph, weight in ((name(DECODE), "a"), ("other", "b"))}
    job, stop = pipeline.Job("m", [DECODE], [], [""], pipeline.World(1, 1, 1), 1), Unwanted()
    with caplog.at_level("WARNING"):
        assert pipeline._Compiler(None, None, cold, job, stop)._priority(traced) is None  # type: ignore[arg-type]
    assert "decode_b2_t1_l32_sampled_logits_last does not use b" in caplog.text


def test_logical_cores_of_two(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Trn2 graphs, layout and process agree on them: the runtime refuses a layout that was compiled for one."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    cores(monkeypatch, 2)
    with LLM(str(tiny), **OPTIONS) as cpu:
        want = tokens(cpu)
    with LLM(str(tiny), device="neuron", tensor_parallel=2, **OPTIONS) as llm:
        assert tokens(llm) == want
        model = llm.engine.runner.device._model
        assert model.layout.lnc == 2 and {g.flags["lnc"] for g in model.graphs.values()} == {2}


SMALL = [{"kv_dtype": "f8e4m3"}, *(pytest.param({"quantization": kind}, marks=pytest.mark.slow) for kind in ("f8e4m3", "int8"))]


@pytest.mark.parametrize("options", SMALL, ids=str)
def test_small_numbers(standin: Path, tiny: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in wants float8's flag where it compiles, and float8's environment where it traces and runs."""
    cores(monkeypatch, 1)
    for variable in releases.FLOAT8:
        monkeypatch.setenv(variable, "")
    how = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(str(tiny), **options, **OPTIONS) as cpu:
        want = [o.outputs[0].token_ids for o in cpu.generate(PROMPTS, how)]
    with LLM(str(tiny), device="neuron", **options, **OPTIONS) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, how)] == want


@pytest.mark.parametrize(("family", "ranks"), [("mixtral", 1), pytest.param("qwen3_moe", 2, marks=pytest.mark.slow)])
def test_experts(standin: Path, family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, ranks)
    cases.save(cases.CONFIGS[family](), tmp_path / family)
    options = {**OPTIONS, "model": {"path": str(tmp_path / family), "skip_tokenizer_init": True}}
    ids = [{"prompt_token_ids": [i % hub.read_config(tmp_path / family)["vocab_size"] for i in p["prompt_token_ids"]]} for p in PROMPTS]

    def said(**more: Any) -> list[list[int]]:
        with LLM(str(tmp_path / family), **{**options, **more}) as llm:
            return [list(o.outputs[0].token_ids) for o in llm.generate(ids, PARAMS)]

    assert said(device="neuron", tensor_parallel=ranks) == said()


def test_sums_over_ranks_are_in_float32(standin: Path) -> None:
    """As NxD's layers sum, unless the deployment says otherwise: eight bf16 summands differ by more than a rounding."""
    from neuronx_distributed.parallel_layers import mappings
    from neuronx_distributed.trace.parallel_context import NxDParallelState

    parts = (torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * 100).to(torch.bfloat16)
    exact = parts.double().sum(0)

    def error(wide: bool) -> float:
        comm, ring = InGraph(sdk(), 8, wide), mappings.Ring(8)
        out: list[Any] = [None] * 8

        def one(rank: int) -> None:
            mappings.HERE.ring, mappings.HERE.place, mappings.HERE.rank = ring, rank, rank
            out[rank] = comm.reduce(parts[rank])

        with NxDParallelState(8, tensor_model_parallel_size=8):
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(8)]
            for step in (threading.Thread.start, threading.Thread.join):
                for thread in threads:
                    step(thread)
        assert all(torch.equal(x, out[0]) for x in out) and out[0].dtype == torch.bfloat16
        return float((out[0].double() - exact).abs().sum())

    assert error(True) == float((exact.to(torch.bfloat16).double() - exact).abs().sum()) < 0.8 * error(False)


def test_as_many_compilers_as_memory_and_processors_allow(tmp_path: Path) -> None:
    gib = 2**30
    hosts = {"inf2.xlarge": 1, "inf2.8xlarge": 5, "inf2.24xlarge": 16, "inf2.48xlarge": 32, "trn1.2xlarge": 1, "trn1.32xlarge": 21}
    assert {n: releases.workers(i.host_memory_bytes, i.vcpus) for n, i in instances.INSTANCES.items() if n in hosts} == hosts
    assert releases.workers(48 * gib, 128) == 2
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert pipeline.resources(tmp_path / "memory.max")[0] == gib
    (tmp_path / "memory.max").write_text("max\n")
    assert pipeline.resources(tmp_path / "memory.max") == pipeline.resources(tmp_path / "none")


def test_models_that_compile_side_by_side_share_the_machine(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four models of TP 8 on a trn1.32xlarge started nine compilers of 24 GiB each, of 512 GiB: together as many as one alone may."""
    monkeypatch.setattr(pipeline, "resources", lambda: (2 * releases.COMPILER_BYTES, 64))
    under_way, most, made, lock = [0], [0], standin / "graph.neff", threading.Lock()
    made.write_text("")

    def slowly() -> list[Path]:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.1)
        with lock:
            under_way[0] -= 1
        return [made]

    kept: list[Path] = []

    def model(number: int) -> None:
        job = pipeline.Job(f"m{number}", [DECODE], [], [""], pipeline.World(1, 1, 1), None)
        compiler = pipeline._Compiler(sdk(), Cache(str(standin / f"cache{number}")), standin / "work", job, Unwanted())
        begun = [threading.Thread(target=lambda i=i: kept.append(compiler._kept("neff", slowly, graph=i))) for i in range(3)]
        [one.start() for one in begun], [one.join() for one in begun]

    models = [threading.Thread(target=model, args=(number,)) for number in range(3)]
    [one.start() for one in models], [one.join() for one in models]
    assert len({*kept}) == 9 and most[0] == 2


def test_a_slot_that_nobody_frees_is_waited_for_until_nobody_wants_it(tmp_path: Path) -> None:
    stop = Unwanted()
    with slots.slot(tmp_path / "compilers", 1, stop.check) as first:
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(CompileError, match="nobody waits"), slots.slot(tmp_path / "compilers", 1, stop.check):
            raise AssertionError("two had one slot")
        with slots.slot(tmp_path / "compilers", 2, stop.check) as second:
            assert (first, second) == (0, 1)
    with slots.slot(tmp_path / "compilers", 1, stop.check) as again:
        assert again == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written.*RAYNEURON_LEDGER"), slots.slot(tmp_path / "file", 1, stop.check):
        pass


@pytest.mark.parametrize("where", ["copied", "joined"])
def test_a_full_disk_says_what_to_do(where: str, cold: Path, tiny: Path, compiled: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is kept, and when they are joined: one sentence, what was compiled stays, and with room again it goes on."""
    target, name = (pipeline.shutil, "copy2") if where == "copied" else (pipeline.Path, "write_text")
    original, calls = getattr(target, name), [0]

    def full(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if where == "joined" and not str(args[0]).endswith("neuron_config.json"):
            return original(*args, **more)
        if where == "copied" and calls[0] <= 8:
            return original(*args, **more)
        raise OSError(28, "No space left on device", str(args[-1] if where == "copied" else args[0]))

    with monkeypatch.context() as patched:
        patched.setattr(target, name, full)
        with pytest.raises(CompileError) as failed:
            build(cold, tiny, [DECODE, PREFILL], options=CompilerOptions(workers=1))
    text = str(failed.value)
    assert text.count("No space left on device") == 1 and text.count("compile.cache") == 1 and "make room, or name another folder" in text
    done = sum(compiled.values())
    build(cold, tiny, [DECODE, PREFILL])
    assert sum(compiled.values()) - done in (range(1, 5) if where == "copied" else [0]), compiled


def test_what_nobody_wants_is_not_compiled(cold: Path, tiny: Path, compiled: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler under way is killed, and no other begun. What progress raises (the loss of a group, Ctrl-C) does the same."""
    monkeypatch.setenv("STANDIN_COMPILE_S", "900.25")
    device, program, _, _ = opened(cold, tiny, 1, options=CompilerOptions(workers=1))

    def begun() -> bool:
        return bool(sleeping("900.25"))

    def end() -> None:
        while not begun():
            time.sleep(0.02)
        device.abort()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(CompileError, match=r"kv_export_n16 \(.*could not be compiled.* was forcibly killed"):
        device.artifact(program, device.targets([]), silent)
    ending.join()
    assert not begun() and compiled == Counter(["kv_export_n16"])
    again, program, _, _ = opened(cold, tiny, 1, options=CompilerOptions(workers=1))

    def interrupted(done: int, total: int) -> None:
        if begun():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again.artifact(program, again.targets([]), interrupted)
    assert not begun() and compiled == Counter({"kv_export_n16": 2})


def test_what_a_ticker_is_told_to_say_may_fail() -> None:
    """A group that is lost while the compiler works: the work is ended by what its progress raised, after the compiler."""

    def lost() -> None:
        raise ConfigError("lost")

    ticker = Ticker(lost)
    with pytest.raises(ConfigError, match="lost"), ticker:
        ticker._thread.join(60)
