"""`device: neuron` end to end over the stand-in: the CPU device's tokens, cached graphs, KV moves, gates and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rayneuron import LLM, SamplingParams, devices
from rayneuron.constraints import Beams
from rayneuron.devices.base import LIKELIEST, SAMPLED, Shape
from rayneuron.devices.neuron import artifact, releases
from rayneuron.devices.neuron.releases import CompilerOptions
from rayneuron.errors import Busy, CompileError, ConfigError, DeviceError
from rayneuron.models.kv import KvSpace

OPTIONS = {
    "max_model_len": 64, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "dtype": "fp32", "threads": 1,
    "buckets": {"context_encoding": [16], "token_generation": [64], "batch": [2]},
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [5, 9, 100, 3]}, {"prompt_token_ids": list(range(20, 45))}, {"prompt_token_ids": [7]}]
PARAMS = [SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=8, temperature=0.9, seed=4, top_p=0.8),
          SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2)]  # fmt: skip


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def want(tiny: Path) -> list[list[int]]:
    """What the CPU says."""
    with LLM(str(tiny), **OPTIONS) as cpu:
        return tokens(cpu)


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", f"0-{count - 1}" if count > 1 else "0")


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_the_cpu_devices(standin: Path, tiny: Path, want: list[list[int]], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, ranks)
    with LLM(str(tiny), device="neuron", tensor_parallel=ranks, **OPTIONS) as llm:
        assert tokens(llm) == want


def test_prefix_buckets(standin: Path, tiny: Path, want: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for prefill x prefix, listed by `compile`, served by a deployment that may build nothing; the same tokens."""
    from rayneuron.compiling import compile_ahead
    from rayneuron.config import parse

    cores(monkeypatch, 1)
    options = OPTIONS | {"device": "neuron", "buckets": {**OPTIONS["buckets"], "prefix": [16, 32]}}
    said: list[str] = []
    compile_ahead(parse({"model": {"path": str(tiny)}, **options}), None, said.append, lambda done, total: None)
    listed = "\n".join(said).split()
    assert [f"b1_t16_l{n}_sampled_logits_last" in listed for n in (16, 32, 48, 64)] == [True] * 4
    assert "b2_t16_l64_sampled_logits_last" not in listed
    with LLM(str(tiny), compile={"required": True}, **options) as llm:
        assert tokens(llm) == want


@pytest.mark.parametrize("more", [{}, {"compile": {"async_mode": True}}, {"block_size": 16, "tensor_parallel": 2}], ids=str)
def test_a_prefix_cache_where_it_is_asked_for(standin: Path, tiny: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, shared: the same tokens as without, and what is known is found. By default it is off, a row is one block."""
    cores(monkeypatch, more.get("tensor_parallel", 1))
    shared = list(range(30, 72))
    prompts = [{"prompt_token_ids": shared[:n] + [5] * more_ids} for n, more_ids in ((32, 0), (33, 0), (40, 3), (32, 9))]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(str(tiny), device="neuron", **{**OPTIONS, **{k: v for k, v in more.items() if k == "tensor_parallel"}}) as llm:
        assert not llm.engine.scheduler.caching and llm.engine.capacity.block == llm.engine.capacity.length
        want = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    with LLM(str(tiny), device="neuron", enable_prefix_caching=True, **{**OPTIONS, **more}) as llm:
        assert llm.engine.capacity.block == more.get("block_size", 32)
        for known in ([None] * 4, [31, 32, 32, 32]):
            told = llm.generate(prompts, params)
            assert [o.outputs[0].token_ids for o in told] == want
            assert known[0] is None or [o.num_cached_tokens for o in told] == known


@pytest.mark.parametrize("more", [{}, pytest.param({"tensor_parallel": 2, "block_size": 16}, marks=pytest.mark.slow)], ids=str)
def test_drafts_change_no_token(standin: Path, tiny: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a text says again is tried at once, by one graph: what the CPU says without any. Some rows end before others, so that the rest
    sit at KV rows with gaps between; the ways to sample are among them."""
    cores(monkeypatch, more.get("tensor_parallel", 1))
    options = OPTIONS | {"max_num_seqs": 3, "buckets": {**OPTIONS["buckets"], "batch": [3]}} | more
    prompts = [{"prompt_token_ids": [*range(20 + i, 24 + i)] * 3} for i in range(5)]
    ways: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"temperature": 1.0, "seed": 4, "top_p": 0.5}, {}, {"frequency_penalty": 0.5}]
    params = [SamplingParams(**({"temperature": 0.0, "max_tokens": 8 + 10 * i, "ignore_eos": True} | way)) for i, way in enumerate(ways)]
    with LLM(str(tiny), **options) as cpu:
        want = [o.outputs[0].token_ids for o in cpu.generate(prompts, params)]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(tiny), device="neuron", speculative_config=speculative, **options) as llm:
        assert llm.engine.timing is not None and [rows for rows, _ in llm.engine.timing.fixed.verify] == [3]
        drafts: list[tuple[int, int]] = []
        step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda: (step(), drafts.extend(llm.engine.info.drafts))[0])
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == want
    tried, true = map(sum, zip(*drafts, strict=True))
    assert 10 < true < tried - 10


SHARED = {"enable_prefix_caching": True, "block_size": 16, "compile": {"async_mode": True}}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, SHARED, {"tensor_parallel": 2}], ids=str)
def test_beams_are_the_cpu_devices(standin: Path, tiny: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of several widths beside each other and beside a plain row: where a row is one block, its KV is computed anew for a fork."""
    cores(monkeypatch, more.get("tensor_parallel", 1))
    options = OPTIONS | {"max_num_seqs": 5, "buckets": {**OPTIONS["buckets"], "batch": [5]}} | more
    kinds = [(3, 2, 0.0), (2, 2, 1.0), (4, 1, -0.5)]
    params = [SamplingParams(n=n, max_tokens=9, beams=Beams(width=width, length_penalty=penalty)) for width, n, penalty in kinds]
    prompts, params = [*PROMPTS, {"prompt_token_ids": [30, 40]}], [*params, SamplingParams(max_tokens=9, temperature=0.0)]
    said = []
    for device in ("cpu", "neuron"):
        with LLM(str(tiny), device=device, **{**options, **({} if device == "neuron" else {"tensor_parallel": 1})}) as llm:
            said.append([[choice.token_ids for choice in o.outputs] for o in llm.generate(prompts, params)])
            assert llm.engine.scheduler.blocks.free_rows == 5
    assert said[0] == said[1] and [len(choices) for choices in said[0]] == [2, 2, 1, 1]
    assert len({tuple(ids) for choices in said[0] for ids in choices}) == 6


def test_neuron_compat_on_both_devices(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NxD's sampling rule, asked for in the deployment, draws the same on both devices, and not what the default draws."""
    cores(monkeypatch, 1)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, top_k=50, top_p=0.3)
    drawn = []
    for more in ({}, {"device": "neuron"}):
        with LLM(str(tiny), on_device_sampling={"neuron_compat": True}, **more, **OPTIONS) as llm:
            drawn.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
    with LLM(str(tiny), **OPTIONS) as llm:
        default = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    assert drawn[0] == drawn[1] != default


@pytest.mark.slow
def test_eight_ranks_in_one_process(standin: Path, wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(wide), **OPTIONS) as cpu:
        want = tokens(cpu)
    with LLM(str(wide), device="neuron", tensor_parallel=8, **OPTIONS) as llm:
        assert tokens(llm) == want
    from neuronx_distributed.trace import functions

    def traces(*_: object, **__: object) -> None:
        raise AssertionError("traced although it was cached")

    monkeypatch.setattr(functions, "trace", traces)
    with LLM(str(wide), device="neuron", tensor_parallel=8, **{**OPTIONS, "seed": 3}) as llm:
        assert tokens(llm) == want


def test_cores_from_the_ledger(standin: Path, tiny: Path, want: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that names its instance takes its cores from the node's ledger and exports them before the SDK is imported."""
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("RAYNEURON_LEDGER", str(standin / "ledger"))
    with LLM(str(tiny), device="neuron", instance="inf2.xlarge", tensor_parallel=2, **OPTIONS) as llm:
        assert os.environ["NEURON_RT_VISIBLE_CORES"] == "0,1"
        assert tokens(llm) == want


SPACE = KvSpace(rows=2, limit=32, blocks=8, block=8)


def opened(standin: Path, tiny: Path, ranks: int, **options):
    """A loaded device of two graphs, beside its weights."""
    from functools import partial

    from rayneuron import models
    from rayneuron.engine.step import step
    from rayneuron.models import hub, weights
    from rayneuron.models.memory import kv_shape

    raw = hub.read_config(tiny)
    arch = models.architecture(raw)
    device = devices.open("neuron", ahead=devices.Ahead(ranks=ranks, **{"length": 32, **options}), dtype=torch.float32)
    loaded = [weights.load(arch, models.family(raw), hub.Checkpoint(tiny), dtype=torch.float32, rank=r, ranks=ranks) for r in range(ranks)]
    device.load({**loaded[0], "ranks": loaded}, kv_shape(arch, SPACE, ranks))
    shapes = [Shape("decode", 2, 1, 32, LIKELIEST), Shape("decode", 2, 1, 32, SAMPLED)]
    return device, partial(step, arch), shapes, arch


def silent(done: int, total: int) -> None:
    return None


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_kv_goes_out_and_comes_back(standin: Path, tiny: Path, wide: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In more parts than one graph moves, without touching other blocks; every rank holds its own heads."""
    cores(monkeypatch, ranks)
    monkeypatch.setattr("rayneuron.devices.neuron.targets.MOVED_POSITIONS", 16)
    device, program, shapes, arch = opened(standin, wide if ranks == 8 else tiny, ranks)
    device.compile(program, shapes, silent)
    values = torch.randn(arch.layers, 3, arch.kv_heads, 2, 8, arch.head_dim, generator=torch.Generator().manual_seed(0))
    device.kv_write([5, 0, 3], values)
    device.kv_copy([(5, 1), (5, 2), (0, 4)])
    want = torch.zeros(arch.layers, 9, *values.shape[2:])
    want[:, [0, 1, 2, 3, 4, 5]] = values[:, [1, 0, 0, 2, 1, 0]]
    assert torch.equal(device.kv_read(range(9)), want)
    for rank, heads in enumerate(values[0, 2, :, 0].chunk(ranks)):
        assert torch.equal(device.state("kv_0_k", rank)[3], heads)


def test_an_unlisted_shape_and_a_closed_device(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayneuron.devices.idle import idle

    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(standin, tiny, 1)
    heard = []
    device.compile(program, shapes, lambda done, total: heard.append((done, total)))
    assert heard[-1] == (2, 2)
    other = Shape("decode", 1, 1, 32, LIKELIEST)
    with pytest.raises(CompileError, match="was not listed"):
        device.start(other, idle(other, SPACE))
    out = device.start(shapes[1], idle(shapes[1], SPACE)).wait()
    assert out.ids.dtype == torch.int32 and (out.logits is None) == bool(out.complete.all())
    batch = idle(shapes[1], SPACE)
    batch.top_k = torch.tensor([5, 5], dtype=torch.int32)  # the kept set is whole: nobody needs the logits, and they stay on the device
    out = device.start(shapes[1], batch).wait()
    assert out.complete.all() and out.logits is None
    device.close()
    with pytest.raises(CompileError, match="not listed|closed"):
        device.start(shapes[0], idle(shapes[0], SPACE))


def test_asynchronous_steps(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayneuron.devices.idle import idle

    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(standin, tiny, 1, async_mode=True)
    device.compile(program, shapes, silent)
    pending = [device.start(shapes[0], idle(shapes[0], SPACE)) for _ in range(2)]
    assert torch.equal(pending[0].wait().ids, pending[1].wait().ids)


def test_a_step_that_asks_for_its_rank_is_refused(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    device, _, shapes, _ = opened(standin, tiny, 2)
    with pytest.raises(CompileError, match="make it a weight"):
        device.comm.rank  # noqa: B018
    with pytest.raises(CompileError, match="cannot be part of a compile key"):
        from functools import partial

        device.compile(partial(print, object()), shapes, silent)


@pytest.mark.parametrize(
    ("visible", "said"),
    [(None, "not set.*instance: inf2.48xlarge"), ("0-3", "is not the 2 cores in a row"), ("0,2", "in a row"), ("a", "no list of cores")],
)
def test_cores_must_be_named(standin: Path, tiny: Path, visible: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    if visible is not None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    device, program, shapes, _ = opened(standin, tiny, 2)
    with pytest.raises(ConfigError, match=said):
        device.compile(program, shapes, silent)


def test_the_stand_in_refuses_what_the_runtime_refuses(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronx_distributed.trace.nxd_model import runtime

    cores(monkeypatch, 1)
    monkeypatch.setattr(runtime, "CLAIMED", {})  # claimed in another test's folder, and for good
    monkeypatch.setenv("STANDIN_CORE_BYTES", "1000")
    device, program, shapes, _ = opened(standin, tiny, 1)
    with pytest.raises(RuntimeError, match="Failed to allocate"):
        device.compile(program, shapes, silent)
    monkeypatch.delenv("STANDIN_CORE_BYTES")
    device, program, shapes, _ = opened(standin, tiny, 1)
    device.compile(program, shapes, silent)
    with pytest.raises(KeyError):
        name = "decode_b2_t1_l32_likeliest_last"
        device._model.forward(model_name=name, forward_mode="ranked", ints=[torch.zeros(1, 1, dtype=torch.int32)])
    script = "from neuronx_distributed.trace.nxd_model.runtime import claim; claim(1)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "standin")}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert ran.returncode == 1 and "0 is in use by another process" in ran.stderr


def test_a_graph_that_does_not_compile_says_which(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 30: model, bucket, flags, and a log that is still there; the next attempt starts afresh and may succeed."""
    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(cold, tiny, 1, model="chat")
    monkeypatch.setenv("STANDIN_FAIL_GRAPH", "decode_b2")
    with pytest.raises(CompileError) as failed:
        device.compile(program, shapes[:1], silent)
    text = str(failed.value)
    graph = "graph decode_b2_t1_l32_likeliest_last (bucket of 2 rows x 1 new tokens, attending 32)"
    assert text.startswith(f"chat: {graph} could not be compiled: ")
    assert "neuronx-cc: [F137] was forcibly killed" in text and ". 0 of 4 graphs are compiled and kept. " in text
    assert "Its flags; decode_b2_t1_l32_likeliest_last: --auto-cast=none --model-type=transformer" in text and " -O2 " in text
    log = Path(re.search(r"The compiler's log is (\S+log-neuron-cc\.txt)\.", text)[1])  # type: ignore[index]
    assert "-O2" in log.read_text() and log.is_relative_to(cold / "cache" / "builds")
    monkeypatch.delenv("STANDIN_FAIL_GRAPH")
    device.compile(program, shapes[:1], silent)


def test_a_graph_that_cannot_be_traced_says_which(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(cold, tiny, 1, model="chat")

    def broken(*args: object, **more: object) -> None:
        raise NotImplementedError("no such operator")

    from rayneuron.devices.neuron.graphs import Graph

    monkeypatch.setattr(Graph, "forward", broken)
    with pytest.raises(
        CompileError, match=r"chat: graph decode_b2_t1_l32_likeliest_last .* could not be traced: .*not asked yet.*flags; .*last: --auto"
    ):
        device.compile(program, shapes, silent)


def test_a_graph_that_does_not_run_says_which(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and where steps are queued, when its outputs are fetched."""
    from neuronx_distributed.trace.nxd_model import nxd_model

    from rayneuron.devices.idle import idle

    cores(monkeypatch, 1)
    for name in releases.IN_FLIGHT:
        monkeypatch.setenv(name, "")
    device, program, shapes, _ = opened(standin, tiny, 1, async_mode=True, model="chat")
    device.compile(program, shapes[:1], silent)

    def fails(graph: object) -> None:
        raise RuntimeError("NRT_EXEC_HW_ERR_NC_UE (1206)")

    monkeypatch.setattr(nxd_model, "BEFORE", [fails])
    says = r"chat: graph decode_b2_t1_l32_likeliest_last \(bucket of 2 rows .*\) on cores 0 failed: NRT_EXEC_HW_ERR_NC_UE"
    for mode in ("async", "ranked"):
        device._mode = mode
        with pytest.raises(DeviceError, match=says):
            device.start(shapes[0], idle(shapes[0], SPACE)).wait()
        with pytest.raises(DeviceError, match=r"chat: graph kv_export_n16 \(16 KV blocks\) on cores 0 failed"):
            device.kv_read([0])


def test_a_model_that_does_not_load_says_where(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    monkeypatch.setenv("STANDIN_CORE_BYTES", "1000")
    device, program, shapes, _ = opened(standin, tiny, 2, model="chat")
    said = "chat: 2 ranks could not be loaded on cores 0-1 from .*: RuntimeError: NRT_RESOURCE .*Failed to allocate"
    with pytest.raises(DeviceError, match=said):
        device.compile(program, shapes, silent)


def test_a_second_model_of_a_process_on_other_cores(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 25: the runtime is bound to the first model's cores, which a second may share but not leave; the ledger would give others."""
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("RAYNEURON_LEDGER", str(standin / "ledger"))
    options = {**OPTIONS, "device": "neuron", "instance": "inf2.24xlarge", "group": {"cores_s": 0}}
    with LLM(str(tiny), model={"path": str(tiny), "name": "first"}, **options) as first:
        want = tokens(first)
        with pytest.raises(
            ConfigError, match=r"second was given cores 10,11, .* bound to cores 8 since it loaded first, until the process ends"
        ):
            LLM(str(tiny), model={"path": str(tiny), "name": "second"}, **options, tensor_parallel=2)
        assert tokens(first) == want, "the first runs on, on its own cores"
        assert os.environ["NEURON_RT_VISIBLE_CORES"] == "8"
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    with pytest.raises(ConfigError, match="was given cores 3, but this process's Neuron runtime is bound to cores 8"):
        LLM(str(tiny), device="neuron", **OPTIONS)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "8")
    with LLM(str(tiny), device="neuron", **OPTIONS) as again:
        assert tokens(again) == want


@pytest.mark.parametrize(("left", "taken"), [("4-7", "4"), ("6", "6"), (None, "8")])
def test_cores_the_operator_left(standin: Path, tiny: Path, left: str | None, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 24, twice in a process: what the first model exports is not what the operator says."""
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.setenv("RAYNEURON_LEDGER", str(standin / "ledger"))
    if left is not None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", left)
    options = {**OPTIONS, "instance": "inf2.24xlarge", "group": {"cores_s": 0}}
    for _ in range(2):
        with LLM(str(tiny), **options):
            assert os.environ["NEURON_RT_VISIBLE_CORES"] == taken
            if left == "6":
                with pytest.raises(Busy, match=r"wants 1 of the 12 cores of inf2.24xlarge; free: none of 6, all that is left to us"):
                    LLM(str(tiny), **options)
    if left == "6":
        with pytest.raises(ConfigError, match="no aligned run of 2 cores in 6 of .* left to us.*write tensor_parallel: 1"):
            LLM(str(tiny), **options, tensor_parallel=2)


def test_float8_is_told_before_the_sdk_is_asked(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 1)
    for name in (*releases.FLOAT8, releases.SCRATCHPAD):
        monkeypatch.setenv(name, "")
    opened(standin, tiny, 1)
    assert not any(os.environ[name] for name in releases.FLOAT8)
    opened(standin, tiny, 1, float8=True)
    assert all(os.environ[name] == "1" for name in releases.FLOAT8)
    monkeypatch.setenv(releases.SCRATCHPAD, "512")
    with pytest.raises(ConfigError, match="NEURON_SCRATCHPAD_PAGE_SIZE=512 is set and the graphs are compiled without it"):
        opened(standin, tiny, 1)
    opened(standin, tiny, 1, options=CompilerOptions(flags="--hbm-scratchpad-page-size=512"))
    monkeypatch.delenv(releases.SCRATCHPAD)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(ConfigError, match="NEURON_LOGICAL_NC_CONFIG=2 is not possible on inf2"):
        opened(standin, tiny, 1)


def test_an_instance_with_another_chip(standin: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-18: graphs for Trn2 would be compiled for, or loaded on, an Inf2; and the logical cores are those of the deployment's instance."""
    from rayneuron.config import parse
    from rayneuron.group.ahead import ahead

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    made = ahead(parse({"model": {"path": str(tiny)}, "device": "neuron", "instance": "inf2.xlarge"}), 64)
    with pytest.raises(ConfigError, match="the deployment's instance has inf2, and the SDK here is for trn2; .*TARGET_OVERRIDE=inf2"):
        devices.open("neuron", ahead=made, dtype=torch.float32)
    made = ahead(parse({"model": {"path": str(tiny)}, "device": "neuron", "instance": "trn2.48xlarge"}), 64)
    assert devices.open("neuron", ahead=made, dtype=torch.float32).lnc == made.lnc == 2


def test_tensor_parallel_the_chip_does_not_know(cold: Path, wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own refusal arrives as ours."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    device, program, shapes, _ = opened(cold, wide, 4)
    cores(monkeypatch, 4)
    from neuronx_distributed.trace import parallel_context

    monkeypatch.setitem(parallel_context.LEGAL, "trn2", (1, 2))
    with pytest.raises(CompileError, match="unsupported topology"):
        device.compile(program, shapes, silent)


def test_artifact_and_flags_that_disagree(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-96: an artifact is loaded without compiling, and refused with both sides' words where it does not fit."""
    import shutil

    cores(monkeypatch, 2)
    device, program, shapes, _ = opened(cold, tiny, 2)
    folder = device.artifact(program, device.targets(shapes), silent)
    out = cold / "out"
    shutil.copytree(folder, out)
    shutil.rmtree(cold / "cache")
    again, _, _, _ = opened(cold, tiny, 2, artifact=out)
    again.compile(program, shapes, silent)
    assert not (cold / "cache").exists()
    said = json.loads((out / "neuron_config.json").read_text())["neuron_config"]
    assert said["tp_degree"] == 2 and said["token_generation_buckets"] == [32] and said["tkg_batch_size"] == 2
    more, _, _, _ = opened(cold, tiny, 2, artifact=out)
    with pytest.raises(ConfigError, match=r"do not fit this deployment: graphs has decode_b1_t1_l32_likeliest_last only here"):
        more.compile(program, [*shapes, Shape("decode", 1, 1, 32, LIKELIEST)], silent)
    cores(monkeypatch, 1)
    one, _, _, _ = opened(cold, tiny, 1, artifact=out)
    with pytest.raises(ConfigError, match="tp_degree is 2 there, 1 here"):
        one.compile(program, shapes, silent)
    (out / "model.pt").write_bytes(b"x")
    cores(monkeypatch, 2)
    broken, _, _, _ = opened(cold, tiny, 2, artifact=out)
    with pytest.raises(ConfigError, match="is damaged: model.pt"):
        broken.compile(program, shapes, silent)


def test_who_waits_for_another_compiler_gives_signs_of_life(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group ends a worker that makes no progress; waiting an hour for the node that compiles is progress."""
    import threading

    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(cold, tiny, 1)
    targets = device.targets(shapes)
    heard, found = threading.Event(), []
    with device._cache.folder.lock(device.key(program, targets).digest):
        waiting = threading.Thread(target=lambda: found.append(device.artifact(program, targets, lambda *_: heard.set())))
        waiting.start()
        assert heard.wait(60) and not found
    waiting.join(60)
    assert found and found[0].is_dir()


def test_what_is_required_and_absent(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 1)
    device, program, shapes, _ = opened(cold, tiny, 1)
    device.compile(program, shapes, silent)
    fewer, _, _, _ = opened(cold, tiny, 1, required=True)
    fewer.compile(program, shapes[::-1], silent)  # the same graphs in another order are the same
    other, _, _, _ = opened(cold, tiny, 1, required=True, options=CompilerOptions(optimization=3))
    with pytest.raises(CompileError, match=r"nearest differs: flags.decode is .*-O2.* there, .*-O3.* here"):
        other.compile(program, shapes, silent)


# The SDK and its releases, as tables.


@pytest.mark.parametrize(
    ("distributed", "chip", "sdk"),
    [
        ("0.17.26814", "inf2", "2.28"), ("0.17.26814", "trn1", "2.28"), ("0.17.26814", "trn2", "2.28"), ("0.15.22404", "inf2", None),
        ("0.18.27753", "trn2", "2.29"), ("0.18.27753", "inf2", None), ("0.19.28492", "trn1", None), ("0.16.1", "trn1", "2.27"),
        ("0.99.1", "trn1", None), ("unknown", "inf2", None), ("unknown", "trn2", None), ("0.15.9", "trn2", None), ("", "trn2", None),
    ],
)  # fmt: skip
def test_releases_and_chips(distributed: str, chip: str, sdk: str | None) -> None:
    """BR-18: SDK 2.29 and later serve models on Trn2 and newer only."""
    if sdk is not None:
        assert releases.check(distributed, chip).sdk == sdk
        return
    with pytest.raises(ConfigError, match="install SDK 2.28: pip install --extra-index-url .*neuronx-distributed==0.17.26814"):
        releases.check(distributed, chip)


def test_an_sdk_that_does_not_serve_the_chip_may_be_tried(caplog: pytest.LogCaptureFixture) -> None:
    """RAYNEURON_ANY_SDK=1: NxD's core may serve what NxD Inference no longer does."""
    with pytest.raises(ConfigError, match="and not on inf2; .*RAYNEURON_ANY_SDK=1 tries it all the same"):
        releases.check("0.18.27753", "inf2")
    with caplog.at_level("WARNING"):
        assert releases.check("0.18.27753", "inf2", anything=True).sdk == "2.29"
        assert releases.check("0.30.1", "trn1", anything=True).chips == ("trn1",)
    assert "serves models on trn2, trn3 and not on inf2, and is tried all the same" in caplog.text
    with pytest.raises(ConfigError, match="of no SDK this version knows"):
        releases.check("0.15.9", "inf2", anything=True)


@pytest.mark.parametrize(("distributed", "chip"), [("0.20.1", "trn2"), ("0.99.1+abc", "trn3"), ("1.0.0rc1", "trn2")])
def test_a_newer_sdk_on_a_chip_it_is_made_for(distributed: str, chip: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 28: tried, with a warning that says what was tested."""
    with caplog.at_level("WARNING"):
        assert releases.check(distributed, chip).chips == (chip,)
    assert f"neuronx-distributed {distributed} is newer than every SDK known here (up to 2.31" in caplog.text
    assert "tested against SDK 2.28: if it fails, pip install" in caplog.text


def test_the_pins_are_the_extra_of_the_package() -> None:
    import tomllib

    extra = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]["neuron"]
    assert extra == releases.INSTALL.split(releases.INDEX)[1].split()


BASE = (
    "--auto-cast=none --model-type=transformer "
    "--tensorizer-options='--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={} --vectorize-strided-dma ' {}"
    " --internal-hlo2tensorizer-options='{}--verify-hlo=true'"
)
SATURATED = "--enable-saturate-infinity -O"
FP8 = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3 "
LONG = " --internal-disable-fma-on-ios --hbm-scratchpad-page-size=1024 --disable-mixed-precision-accumulation"
MODULAR = "--modular-flow-mac-threshold=10 "


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("prefill", 4096, "inf2", 1, False, CompilerOptions()), BASE.format(2, SATURATED + "1", MODULAR)),
        (("decode", 4096, "inf2", 1, False, CompilerOptions()), BASE.format(1, SATURATED + "2", "")),
        (("verify", 4096, "trn2", 2, False, CompilerOptions()), BASE.format(1, "--lnc=2 -O2", "")),
        (("decode", 4096, "inf2", 1, True, CompilerOptions(optimization=1)), BASE.format(1, SATURATED + "1", FP8)),
        (("prefill", 4096, "trn2", 2, True, CompilerOptions()), BASE.format(2, "--lnc=2 -O1", MODULAR + FP8)),
        (("prefill", 32768, "trn1", 1, False, CompilerOptions(tiling=1)), BASE.format(1, SATURATED + "1", MODULAR) + LONG),
        (("decode", 4096, "inf2", 1, False, CompilerOptions(mixed_accumulation=True, flags="--verbose=35")),
         BASE.format(1, SATURATED + "2", "") + " --enable-mixed-precision-accumulation --verbose=35"),
    ],
)  # fmt: skip
def test_compiler_arguments(given: tuple, expected: str) -> None:
    """As NxD Inference's model_wrapper composes them."""
    assert releases.arguments(*given) == expected


def test_visible_cores() -> None:
    assert artifact.check_cores("8,9,10,11", 4) == "8,9,10,11"
    with pytest.raises(ConfigError, match="4 cores must start at a multiple of 4, not at 2"):
        artifact.check_cores("2-5", 4)


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "absent"])
def test_empty_and_absent_packages_say_what_to_install(empty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_neuronx", "neuronx_distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if empty else None)
    with pytest.raises(ConfigError, match="install SDK 2.28 from AWS's repository: pip install --extra-index-url https://pip.repos.neuron"):
        LLM("demo:random:tiny", device="neuron")
