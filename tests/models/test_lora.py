"""Adapters of PEFT: every family and target equals transformers with the adapter merged, and what cannot be served is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayneuron import models
from rayneuron.errors import CheckpointError
from rayneuron.models import adaptable, hub, lora
from rayneuron.models.collectives import Solo
from tests.models import adapters, cases
from tests.models.cases import Runner, Saved

BOUND = 1e-4  # of logits of order 1
QUICK = ("llama", "gpt2", "phi3", "gpt_bigcode", "qwen2_moe")
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in cases.CONFIGS]


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return cases.save(cases.CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_every_family_equals_transformers_with_merged_weights(saved: Saved, tmp_path: Path) -> None:
    """One row with the second of two adapters, one without any; heads cut over ranks, padded and replicated."""
    first, second = adapters.write(tmp_path / "a", saved.path), adapters.write(tmp_path / "b", saved.path, r=3, seed=1)
    want = adapters.merged(saved.path, second, saved.ids)
    assert (want - saved.logits).abs().max() > 0.05

    for ranks in (1, 2):
        for own in ([1, 1, -1], [1, -1, -1]):
            def work(comm: Any, own: list[int] = own) -> torch.Tensor:
                runner = adapters.with_tables(saved.path, Runner.open(saved.path, comm), [first, second], own)
                return cases.run(runner, saved.ids, 16)

            for got in cases.on_ranks(ranks, work):
                expected = torch.stack([want[0], (want if own[1] == 1 else saved.logits)[1]])
                assert (got - expected).abs().max() < BOUND, (ranks, own)


@pytest.mark.parametrize("saved", ["bloom_six_heads"], indirect=True)
def test_ranks_that_do_not_divide_the_heads(saved: Saved, tmp_path: Path) -> None:
    folder = adapters.write(tmp_path / "a", saved.path)
    want = adapters.merged(saved.path, folder, saved.ids)

    def work(comm: Any) -> torch.Tensor:
        return cases.run(adapters.with_tables(saved.path, Runner.open(saved.path, comm), [folder], [0, 0, -1]), saved.ids, 16)

    assert all((got - want).abs().max() < BOUND for got in cases.on_ranks(4, work))


TARGETS: list[tuple[list[str], dict[str, Any]]] = [
    (["q_proj"], {}), (["v_proj", "o_proj"], {}), (["gate_proj"], {}), (["up_proj", "down_proj"], {"use_rslora": True}),
    (["q_proj", "down_proj"], {"rank_pattern": {"layers.1.mlp.down_proj": 7, "q_proj": 2}, "alpha_pattern": {"q_proj": 20}}),
]  # fmt: skip


@pytest.mark.parametrize(("chosen", "said"), TARGETS)
@pytest.mark.parametrize(("saved", "fused"), [("llama", True), ("llama", False)], indirect=["saved"])
def test_targets_scales_and_patterns(saved: Saved, fused: bool, chosen: list[str], said: dict[str, Any], tmp_path: Path) -> None:
    names = [n for n in adapters.products(saved.path) if n.rsplit(".", 1)[-1] in chosen]
    folder = adapters.write(tmp_path / "a", saved.path, names, **said)
    runner = Runner.open(saved.path, Solo(), fused=fused)
    with torch.no_grad():
        got = cases.run(adapters.with_tables(saved.path, runner, [folder], [0, 0, -1]), saved.ids, 16)
    assert (got - adapters.merged(saved.path, folder, saved.ids)).abs().max() < BOUND


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_a_slot_holds_nothing_of_what_was_in_it(saved: Saved, tmp_path: Path) -> None:
    """An adapter of all products and rank 8 leaves; one of a single product and rank 2 comes."""
    large = adapters.write(tmp_path / "a", saved.path, r=8)
    names = [n for n in adapters.products(saved.path) if n.endswith("layers.1.self_attn.k_proj")]
    small = adapters.write(tmp_path / "b", saved.path, names, r=2, layers_to_transform=[1])
    runner = adapters.with_tables(saved.path, Runner.open(saved.path, Solo()), [large], [0, 0, -1])
    adapters.adapted.put(runner.weights["layers"], 0, adapters.RANK, adapters.cut(saved.path, runner, [small])[0])
    with torch.no_grad():
        got = cases.run(runner, saved.ids, 16)
    assert (got - adapters.merged(saved.path, small, saved.ids)).abs().max() < BOUND


def read(saved: Saved, folder: Path) -> lora.Adapter:
    raw = hub.read_config(saved.path)
    arch = models.architecture(raw)
    return lora.read(folder, arch, adaptable.modules_of(arch, models.family(raw)), max_rank=8)


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_an_adapter_is_known_by_its_content(saved: Saved, tmp_path: Path) -> None:
    one, same, other = (read(saved, adapters.write(tmp_path / n, saved.path, seed=s)) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert one.identity == same.identity != other.identity
    assert one.rank == 4
    assert read(saved, adapters.write(tmp_path / "d", saved.path, lora_alpha=7)).identity != one.identity


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_reading_rests_after_every_little_piece(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a file's header, which is one piece of Python's own work: steps would wait for the interpreter that long."""
    save_file({f"t{i}": torch.zeros(1) for i in range(500)}, tmp_path / "many.safetensors")
    calls, worst = 0, 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += 1

    def rest() -> None:
        nonlocal calls, worst
        worst, calls = max(worst, calls), 0

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        hub.SafeFile(tmp_path / "many.safetensors", rest)
    finally:
        sys.setprofile(before)
    assert 0 < worst < 100

    told = []
    monkeypatch.setattr(lora, "SafeFile", lambda path, rest: told.append(rest) or hub.SafeFile(path, rest))
    folder = adapters.write(tmp_path / "a", saved.path)
    raw = hub.read_config(saved.path)
    arch = models.architecture(raw)
    lora.read(folder, arch, adaptable.modules_of(arch, models.family(raw)), max_rank=8, rest=rest)
    assert told == [rest]


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type: 'IA3'"), ({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias: 'all'"),
    ({"lora_bias": True}, "lora_bias"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"use_qalora": True}, "use_qalora"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"), ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"target_parameters": ["mlp.experts"]}, "target_parameters"), ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"), ({"init_lora_weights": "loftq"}, "loftq"),
    ({"use_bdlora": True}, "use_bdlora"), ({"some_new_thing": 3}, "some_new_thing"), ({"r": 0}, "the rank r: 0"),
    ({"r": True}, "the rank r: True"), ({"lora_alpha": None}, "lora_alpha"), ({"rank_pattern": {"q_proj": 1.5}}, "the rank q_proj"),
    ({"rank_pattern": [3]}, "rank_pattern"), ({"target_modules": []}, "target_modules"),
    ({"target_modules": "("}, "no regular expression"), ({"target_modules": [3]}, "target_modules"), ({"r": 16}, "max_lora_rank"),
    ({"layers_to_transform": "0"}, "layers_to_transform"), ({"r": 5}, r"lora_A \(4, 112\)"),
    ({"target_modules": ["q_proj"]}, "does not name"), ({"exclude_modules": ["v_proj"]}, "does not name"),
    ({"layers_to_transform": [0]}, "does not name"),
]  # fmt: skip


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
@pytest.mark.parametrize(("said", "why"), CONFIGS)
def test_what_a_config_may_not_say(saved: Saved, said: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = adapters.write(tmp_path / "a", saved.path)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    with pytest.raises(CheckpointError, match=why):
        read(saved, folder)


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_what_an_adapters_files_may_not_be(saved: Saved, tmp_path: Path) -> None:
    layer = "base_model.model.model.layers.0."
    one = {f"{layer}self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}
    wide = {f"{layer}self_attn.q_proj.lora_{s}.weight": torch.zeros(shape) for s, shape in (("A", (4, 32)), ("B", (64, 4)))}
    alone = {f"{layer}mlp.experts.3.w1.lora_{s}.weight": torch.zeros(4, 4) for s in "AB"}
    head = {f"base_model.model.lm_head.lora_{s}.weight": torch.zeros(4, 4) for s in "AB"}
    other = {f"base_model.model.transformer.h.0.attn.c_attn.lora_{s}.weight": torch.zeros(4, 4) for s in "AB"}
    pair = {f"{layer}self_attn.q_proj.lora_A.weight": torch.zeros(4, 64), f"{layer}self_attn.q_proj.lora_B.weight": torch.zeros(64, 4)}
    rows: list[tuple[dict[str, torch.Tensor], str]] = [
        (one, "lora_A of '.*q_proj' alone"), (wide, "made for another base"), (alone, "adapters of experts"), (head, "embeddings and head"),
        (other, "no such product"), ({**pair, f"{layer}self_attn.q_proj.lora_magnitude_vector": torch.zeros(4)}, "lora_magnitude_vector"),
        ({**pair, "base_model.model.lm_head.weight": torch.zeros(4)}, "lm_head.weight"), (pair, "no tensors for"), ({}, "no tensors for"),
        ({name: t + float("nan") for name, t in pair.items()}, "finite"), ({name: t.to(torch.int32) for name, t in pair.items()}, "int32"),
    ]  # fmt: skip
    folder = adapters.write(tmp_path / "a", saved.path)
    for tensors, why in rows:
        save_file(tensors, folder / lora.TENSORS)
        with pytest.raises(CheckpointError, match=why):
            read(saved, folder)
    whole = adapters.write(tmp_path / "a", saved.path)
    missing = load_file(whole / lora.TENSORS)
    for side in "AB":
        del missing[f"base_model.model.model.layers.1.mlp.up_proj.lora_{side}.weight"]
    save_file(missing, whole / lora.TENSORS)
    with pytest.raises(CheckpointError, match=r"no tensors for 'model.layers.1.mlp.up_proj'"):
        read(saved, whole)
    (whole / lora.TENSORS).write_bytes((whole / lora.TENSORS).read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="truncated"):
        read(saved, whole)
    (whole / lora.TENSORS).unlink()
    (whole / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="safe_serialization"):
        read(saved, whole)
    (whole / lora.CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        read(saved, whole)
    with pytest.raises(CheckpointError, match="is no adapter"):
        read(saved, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["llama", "gpt2", "phi3"], indirect=True)
def test_equals_what_peft_itself_merges(saved: Saved, tmp_path: Path) -> None:
    """Saved and merged by peft, where that is installed."""
    peft = pytest.importorskip("peft")
    names = sorted({n.rsplit(".", 1)[-1] for n in adapters.products(saved.path)})
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=names, use_rslora=True, rank_pattern={f".*1.*{names[0]}": 3}, alpha_pattern={names[-1]: 2},
        init_lora_weights=False, task_type="CAUSAL_LM", fan_in_fan_out="c_attn" in names,
    )  # fmt: skip
    torch.manual_seed(3)
    model = peft.get_peft_model(adapters.load(saved.path), config)
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        want = model.merge_and_unload()(saved.ids.long(), use_cache=False).logits
        runner = adapters.with_tables(saved.path, Runner.open(saved.path, Solo()), [tmp_path / "a"], [0, 0, -1])
        got = cases.run(runner, saved.ids, 16)
    assert (want - saved.logits).abs().max() > 0.01
    assert (got - want).abs().max() < BOUND
