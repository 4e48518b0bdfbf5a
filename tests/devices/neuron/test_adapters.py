"""Adapters on `device: neuron` over the stand-in: the CPU device's tokens and transformers' with merged weights, whoever shares the batch;
what is compiled for them, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rayneuron import LLM, SamplingParams, loading, models
from rayneuron.compiling import compile_ahead
from rayneuron.config import parse
from rayneuron.devices.neuron import releases
from rayneuron.engine.adapters import Adapters
from rayneuron.engine.shelf import Resident
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.group.adopting import adopt
from rayneuron.group.messages import Adopt
from rayneuron.models import adaptable, hub
from rayneuron.models.weights import cut_for
from rayneuron.types import Request
from tests.devices.neuron.test_device import OPTIONS, cores
from tests.devices.neuron.test_groups import GROUPS, Nodes, nodes  # noqa: F401
from tests.devices.neuron.test_groups import SMALL as IN_GROUPS
from tests.engine.test_adapters import asked, audit, greedy, prompts, run
from tests.models import adapters as made
from tests.models import cases
from tests.serve.real import serving
from tests.serve.test_adapters import IDS, lora, post, tokens

NAMES = ("a", None, "b", "c", "a", "d", None, "b")
ROWS = {**OPTIONS, "max_num_seqs": 3, "buckets": {**OPTIONS["buckets"], "batch": [3]}, "seed": 5}
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 1}, {"logprobs": 2}, {"n": 2, "temperature": 1.0, "seed": 2}]


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of different ranks; c is of two kinds of modules, one layer of which has none of d's."""
    root, every = tmp_path_factory.mktemp("adapters"), made.products(tiny)
    some = {"c": [n for n in every if n.endswith(("v_proj", "down_proj"))], "d": [n for n in every if ".0." in n and n.endswith("q_proj")]}
    folders = {}
    for i, name in enumerate("abcd"):
        folders[name] = str(made.write(root / name, tiny, some.get(name), r=1 + i, seed=i, size=0.4))
    return folders


def said(folders: dict[str, str], **words: Any) -> dict[str, Any]:
    return {"lora_modules": folders, "max_lora_rank": 4, **words}


def told(llm: LLM, **more: Any) -> list[list[int]]:
    """Tokens of eight requests, beside each other on three rows; two choices of one as a pair."""
    ids = prompts(len(NAMES), 3)
    found = run(llm, *[asked(llm, p, n, **WAYS[i % 4], **more) for i, (p, n) in enumerate(zip(ids, NAMES, strict=True))])
    audit(llm)
    return [sorted(tokens) if "n" in WAYS[i % 4] else tokens for i, tokens in enumerate(found)]


@pytest.fixture(scope="module")
def want(tiny: Path, folders: dict[str, str]) -> list[list[int]]:
    """What the CPU says, where four adapters share two slots."""
    with LLM(str(tiny), lora=said(folders, max_loras=2), **ROWS) as cpu:
        return told(cpu)


SMALL = {"block_size": 16, "enable_prefix_caching": True}
KINDS: list[dict[str, Any]] = [
    {}, {"tensor_parallel": 2}, {**SMALL, "compile": {"async_mode": True}},
    {"lora": {"max_loras": 6, "max_lora_rank": 9}, "fused_qkv": False},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}},
]  # fmt: skip
SLOW: list[dict[str, Any]] = [
    {**SMALL, "tensor_parallel": 2}, {"compile": {"async_mode": True}}, {"tensor_parallel": 2, "sequence_parallel": True},
    {"block_size": 32},
    {"speculative_config": {"method": "draft_model", "quantization": "int8", "adaptive": False}},
]  # fmt: skip


@pytest.mark.parametrize("more", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)], ids=str)
def test_tokens_are_the_cpu_devices(
    standin: Path, tiny: Path, folders: dict[str, str], want: list[list[int]], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several adapters beside base rows; chunked prompts, drawn rows, logprobs, two choices of a prompt."""
    cores(monkeypatch, more.get("tensor_parallel", 1))
    with LLM(str(tiny), device="neuron", **{**ROWS, **more, "lora": said(folders, **more.get("lora", {}))}) as llm:
        assert told(llm) == want
        assert told(llm) == want, "and again, of what is cached"


def test_tokens_are_those_of_merged_weights(standin: Path, tiny: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers', with their log-probabilities, and a base row's those of a device without adapters."""
    cores(monkeypatch, 1)
    ids = prompts(5, 6)
    with LLM(str(tiny), device="neuron", lora=said(folders), **ROWS) as llm, LLM(str(tiny), device="neuron", **ROWS) as plain:
        got = run(llm, *[asked(llm, p, n) for p, n in zip(ids, ("a", "b", "c", "d", None), strict=True)])
        assert got[4] == run(plain, asked(plain, ids[4], None))[0]
        for prompt, name in zip(ids, "abcd", strict=False):
            (told,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0.0, max_tokens=4, logprobs=1), adapter=name)
            made_of, (choice,) = torch.tensor([[*prompt, *told.outputs[0].token_ids]]), told.outputs
            want = made.merged(tiny, Path(folders[name]), made_of)[0].log_softmax(-1)
            for i, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs or (), strict=True), len(prompt) - 1):
                assert abs(found[token].logprob - float(want[i, token])) < 1e-4
    assert got == [greedy(tiny, folders.get(n), p, 8) for n, p in zip((*"abcd", ""), ids, strict=True)]
    assert got[0] != greedy(tiny, None, ids[0], 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "f8e4m3"])
def test_beside_small_weights(standin: Path, tiny: Path, folders: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters stay in what the model computes in."""
    cores(monkeypatch, 1)
    for variable in releases.FLOAT8:
        monkeypatch.setenv(variable, "")
    with LLM(str(tiny), quantization=kind, lora=said(folders), **ROWS) as cpu:
        want = told(cpu)
    with LLM(str(tiny), device="neuron", quantization=kind, lora=said(folders), **ROWS) as llm:
        assert told(llm) == want
        parameters = dict(llm.engine.runner.device._compiled[0].fields)["parameters"]
        assert parameters["layers.0.q.lora_a"][1] == "float32" and parameters["layers.0.qkv.w"][1] in ("int8", "float8_e4m3fn")


@pytest.mark.slow
def test_eight_ranks_in_one_process(standin: Path, wide: Path, tmp_path: Path) -> None:
    """Padded to none, each with an eighth of B where it has one of the outputs, of A where it has one of the inputs."""
    modules = {name: str(made.write(tmp_path / name, wide, r=2 + i, seed=i, size=0.4)) for i, name in enumerate("abcd")}
    with LLM(str(wide), lora=said(modules, max_lora_rank=8), **ROWS) as cpu:
        want = told(cpu)
    with LLM(str(wide), device="neuron", tensor_parallel=8, lora=said(modules, max_lora_rank=8), **ROWS) as llm:
        assert told(llm) == want


FAMILIES = ["phi3", "gpt_bigcode"]


@pytest.mark.parametrize("family", [FAMILIES[1], *(pytest.param(n, marks=pytest.mark.slow) for n in (FAMILIES[0], "gpt2", "qwen2_moe"))])
def test_products_that_are_one_in_the_checkpoint(standin: Path, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v, gate and up; two ranks that share one KV head; a mixture whose experts have no adapters."""
    cores(monkeypatch, 2)
    base = cases.save(cases.CONFIGS[family](), tmp_path / family).path
    vocab, modules = hub.read_config(base)["vocab_size"], {}
    for i, name in enumerate("abcd"):
        modules[name] = str(made.write(tmp_path / name, base, r=1 + i, seed=i, size=0.4))
    options = {**ROWS, "model": {"path": str(base), "skip_tokenizer_init": True}, "lora": said(modules)}

    def ids(llm: LLM) -> list[list[int]]:
        names = ("a", None, "b", "c")
        return run(llm, *[asked(llm, [t % vocab for t in p], n) for p, n in zip(prompts(4, 3), names, strict=True)])

    with LLM(str(base), **options) as cpu:
        want = ids(cpu)
    with LLM(str(base), device="neuron", tensor_parallel=2, **options) as llm:
        assert ids(llm) == want


def engine_tokens(model: Path, processes: Any = None, **options: Any) -> list[list[int]]:
    """Tokens of six requests of an engine, which may be a group's."""
    engine = loading.open_engine(parse({"model": {"path": str(model)}, **IN_GROUPS, **options}), processes=processes).engine
    try:
        for i, (prompt, name) in enumerate(zip(prompts(6, 3), ("a", None, "b", "c", "a", "d"), strict=True)):
            identity = None if name is None else engine.adapters.names[name]
            engine.add(Request(id=str(i), prompt_ids=prompt, params=GREEDY, adapter=identity))
        out: dict[str, list[int]] = {str(i): [] for i in range(6)}
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                out[delta.request_id] += delta.token_ids
        engine.check_ledger()
        return list(out.values())
    finally:
        engine.close()


GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
GROUPED = ("tp8 over two nodes", "two stages of tp2 on two nodes", "two stages in three micro-batches", "tp4 over two nodes, ahead")


@pytest.mark.parametrize("name", [n if n == GROUPED[1] else pytest.param(n, marks=pytest.mark.slow) for n in GROUPED])
def test_groups(name: str, nodes: Path, wide: Path, tmp_path: Path) -> None:  # noqa: F811
    """Every process reads the adapters itself and fills its slots with its share, before it loads."""
    modules = {name: str(made.write(tmp_path / name, wide, r=1 + i, seed=i, size=0.4)) for i, name in enumerate("abcd")}
    want = engine_tokens(wide, lora=said(modules))
    assert engine_tokens(wide, Nodes(nodes), device="neuron", lora=said(modules), **GROUPS[name]) == want


def test_what_another_process_has_read(tiny: Path, folders: dict[str, str]) -> None:
    """Each says what it has by path: another content is a fault of that node's folder, and what is not there is not loaded now."""
    shelf = _shelf(tiny, folders, {})
    assert adopt(shelf, Adopt(folders["a"], shelf.identities[folders["a"]])).wrong == ""
    assert "holds another adapter there" in adopt(shelf, Adopt(folders["a"], shelf.identities[folders["b"]])).wrong
    with pytest.raises(CheckpointError, match="is none of lora.lora_modules, and on this device no others are loaded while it runs"):
        shelf.read(str(tiny))
    twice = _shelf(tiny, {**folders, "again": folders["a"]}, {})
    assert twice.places == shelf.places and sorted(shelf.places.values()) == [0, 1, 2, 3], "one content, one slot"
    assert Adapters(8, 32, shelf.drop, shelf.places).states() == {"free": 0, "idle": 4, "used": 0}


def _shelf(tiny: Path, folders: dict[str, str], weights: dict[str, Any]) -> Resident:
    raw = hub.read_config(tiny)
    arch = models.architecture(raw)
    weights.setdefault("layers", [{} for _ in range(arch.layers)])
    modules, how = adaptable.modules_of(arch, models.family(raw)), cut_for(arch, 0, 1)
    shelf = Resident([weights], arch, modules, [how], range(arch.layers), torch.float32, slots=4, rank=4)
    for path in folders.values():
        shelf.fill(path)
    return shelf


def test_what_is_compiled_is_for_any_adapters_of_these_shapes(
    cold: Path, tiny: Path, folders: dict[str, str], want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rayneuron compile --out` needs no adapter; what it writes serves these and others, and is refused for other slots or ranks."""
    cores(monkeypatch, 1)
    options = {"model": {"path": str(tiny)}, "device": "neuron", **ROWS}
    absent = {"lora_modules": {name: "/nowhere" for name in "abcd"}, "max_lora_rank": 4}
    room = {"max_loras": 4, "max_lora_rank": 4}
    out, alike, plain = (
        compile_ahead(parse({**options, **more}), folder, lambda text: None, lambda done, total: None)
        for more, folder in (({"lora": absent}, cold / "out"), ({"lora": room}, None), ({}, None))
    )
    keys = [json.loads((folder / "neuron_config.json").read_text())["key"] for folder in (out, alike, plain)]
    assert keys[0] == keys[1] and keys[0].keys() - keys[2].keys() == {"lora_rank"}
    assert not [name for name in keys[2]["parameters"] if "lora" in name] and keys[2]["parameters"].items() < keys[0]["parameters"].items()
    ready = {**options, "compile": {"artifact": str(out), "required": True}}
    with LLM(**ready, lora=said(folders)) as llm:
        assert told(llm) == want
    others = {name: str(made.write(cold / name, tiny, r=4, seed=9 + i, size=0.4)) for i, name in enumerate("abcd")}
    with LLM(**ready, lora=said(others)) as llm:
        assert run(llm, asked(llm, [5, 9], "a")) == [greedy(tiny, others["a"], [5, 9], 8)]
    with pytest.raises(ConfigError, match="do not fit this deployment: lora_rank is 4 there, 8 here"):
        LLM(**ready, lora=said(folders, max_loras=2, max_lora_rank=8, lora_modules={"a": folders["a"]}))
    with pytest.raises(ConfigError, match="lora_rank is only there|parameters"):
        LLM(**ready)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"allow_runtime_updating": True, "directory": "/x"}, "lora goes without allow_runtime_updating on this device"),
    ({"directory": "/x"}, "lora goes without directory on this device, where adapters lie from the start on and stay; leave it out"),
    ({"max_cpu_loras": 8}, "lora goes without max_cpu_loras on this device"),
    ({"max_loras": 3}, "lora goes without max_loras 3 on this device, where all 4 of lora_modules lie at once; leave it out"),
    ({"lora_modules": {}}, "lora goes without adapters on no device|name some in lora_modules, or write max_loras to compile"),
    ({"lora_modules": {"x": "/nowhere"}}, "lora.lora_modules.x: /nowhere is no directory here"),
    ({"max_lora_rank": 2}, r"lora.lora_modules.c: .* has rank 3 at .*, and lora.max_lora_rank is 2; raise it there"),
    ({"target_modules": ["q_proj", "v_proj"]}, r"lora.lora_modules.a: .* adapts '.*', which lora.target_modules does not name"),
    ({"target_modules": ["w_proj"]}, "lora.target_modules names 'w_proj', and what adapters may have of a llama model is q_proj, k_proj"),
]


@pytest.mark.parametrize(("words", "why"), REFUSED, ids=[next(iter(words)) for words, _ in REFUSED])
def test_what_is_refused(standin: Path, tiny: Path, folders: dict[str, str], words: dict[str, Any], why: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=why):
        LLM(str(tiny), device="neuron", lora=said(folders, **words), **ROWS)


@pytest.mark.parametrize("chosen", [["v_proj", "down_proj"], ["q_proj"], ["k_proj", "up_proj"]], ids=str)
def test_room_for_some_modules_alone(
    standin: Path, tiny: Path, chosen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is multiplied at once some parts have none; the same on the CPU, which refuses others alike."""
    cores(monkeypatch, 2)
    every = made.products(tiny)
    one = str(made.write(tmp_path / "one", tiny, [n for n in every if n.endswith(tuple(chosen))], size=0.4))
    lora = {"lora_modules": {"one": one}, "target_modules": chosen}
    with LLM(str(tiny), device="neuron", tensor_parallel=2, lora=lora, **ROWS) as llm:
        assert run(llm, asked(llm, [5, 9, 30], "one")) == [greedy(tiny, one, [5, 9, 30], 8)]
        names = dict(llm.engine.runner.device._compiled[0].fields)["parameters"]
        assert {n.split(".")[-2] for n in names if n.endswith("lora_a")} == {n.removesuffix("_proj") for n in chosen}
    with LLM(str(tiny), lora=lora, **ROWS) as cpu:
        assert run(cpu, asked(cpu, [5, 9, 30], "one")) == [greedy(tiny, one, [5, 9, 30], 8)]
    other = str(made.write(tmp_path / "other", tiny, size=0.4))
    with pytest.raises(CheckpointError, match="which lora.target_modules does not name"):
        LLM(str(tiny), lora={**lora, "lora_modules": {"other": other}}, **ROWS)


async def test_clients_choose_as_on_the_cpu(standin: Path, tiny: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As model, adapters (LMI's too) or adapter_id; the list of models; and none comes or goes."""
    cores(monkeypatch, 1)
    words = {**ROWS, "lora": said({name: folders[name] for name in "ab"})}
    async with serving(tiny, device="neuron", **words) as server:
        a, base = await tokens(server, "a"), await tokens(server)
        assert a == greedy(tiny, folders["a"], IDS, 6) and base == greedy(tiny, None, IDS, 6) != a
        assert await tokens(server, adapters=["a"]) == await tokens(server, adapter_id="a") == a
        asked = {"inputs": "some words", "parameters": {"max_new_tokens": 5, "do_sample": False}}
        assert (await post(server, "/invocations", **asked))[1] != (await post(server, "/invocations", **asked, adapters="b"))[1]
        assert [card["id"] for card in server.server.now.cards()][-2:] == ["a", "b"]
        assert lora(server)[0] == {("free",): 0, ("idle",): 2, ("used",): 0}
        for change in ({"lora_name": "x", "lora_path": folders["c"]}, {"lora_name": "a", "lora_path": folders["c"], "load_inplace": True}):
            status, reply = await post(server, "/v1/load_lora_adapter", **change)
            assert status == 400 and "may not change its adapters (name all in lora.lora_modules)" in reply["error"]["message"]
        assert (await post(server, "/v1/unload_lora_adapter", lora_name="a"))[0] == 400
        assert (await post(server, "/v1/completions", prompt=IDS, model="c"))[0] == 404
        assert await tokens(server, "a") == a
