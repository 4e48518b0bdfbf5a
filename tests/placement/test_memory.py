"""Memory by arithmetic equals what the loader holds (every family, degree, stage), model cards, and what the vendor's guide says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rayneuron import devices, models
from rayneuron.config import Deployment, parse
from rayneuron.devices.cpu.device import Cpu
from rayneuron.engine.buckets import Capacity, capacity
from rayneuron.engine.shelf import Resident
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import adaptable, head_layers, heads, hub, shard, weights, words
from rayneuron.models.memory import kv_shape, parameters
from rayneuron.models.quantization import Quantization
from rayneuron.placement.fitting import Wanted, stage_memory
from rayneuron.placement.memory import memory
from rayneuron.placement.plan import read_draft
from tests.models import cases, published
from tests.models.checkpoint import checkpoint_shapes

GB = 1e9
LLAMA_3_70B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_31_8B = LLAMA_3_70B | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_31_405B = LLAMA_3_70B | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
MIXTRAL_8X7B = LLAMA_31_8B | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "max_position_embeddings": 40960,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


def small(rows: int = 4, length: int = 64) -> Capacity:
    return capacity(rows=rows, length=length, chunk=32)


def deployment(**settings: Any) -> Deployment:
    return parse({"model": {"path": "/m"}, **settings})


@pytest.mark.parametrize(
    ("config", "published"),
    [
        # parameter counts as the model cards and papers give them, to the digit where they do
        (LLAMA_31_8B, 8_030_261_248),
        (LLAMA_3_70B, 70_553_706_496),
        (LLAMA_31_405B, 405_853_388_800),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (GPT2, 124_439_808),
    ],
    ids=["llama-3.1-8b", "llama-3-70b", "llama-3.1-405b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2"],
)
def test_published_parameter_counts(config: dict[str, Any], published: int) -> None:
    count = parameters(models.architecture(config), models.family(config))
    assert count.products + count.others == published


@pytest.fixture(scope="module", params=cases.PARAMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of each family, written by transformers."""
    made = cases.tf.AutoModelForCausalLM.from_config(cases.CONFIGS[request.param]())
    path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    return path


CONSTANTS = ("embed.first", "rope.freq", "rope.local", "slopes")


def loaded(
    folder: Path, ranks: int, stage: int, stages: int, quantization: Quantization | None = None, dtype: torch.dtype = torch.float32
) -> int:  # fmt: skip
    """Bytes of the distinct tensors the loader makes for rank 0, constants that are not parameters aside."""
    raw = hub.read_config(folder)
    arch = models.architecture(raw)
    made = weights.load(
        arch,
        models.family(raw),
        hub.Checkpoint(folder),
        dtype=dtype,
        ranks=ranks,
        stage=stage,
        stages=stages,
        quantization=quantization,
    )
    tensors = [t for part in (made["top"], *made["layers"]) for name, t in part.items() if name not in CONSTANTS]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2])
def test_weights_are_what_the_loader_allocates(folder: Path, ranks: int, stages: int) -> None:
    raw = hub.read_config(folder)
    arch = models.architecture(raw)
    for stage in range(stages):
        layers = shard.stage_layers(arch.layers, stage, stages)
        made = memory(deployment(dtype="fp32"), raw, small(), ranks, layers, first=stage == 0, last=stage == stages - 1)
        assert made.weights == loaded(folder, ranks, stage, stages)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("targets", [None, 1], ids=["all", "one"])
def test_adapters_are_what_their_tables_take(folder: Path, ranks: int, targets: int | None) -> None:
    """On Neuron, of each stage: of A and B only one is shared by ranks."""
    raw = hub.read_config(folder)
    arch, family, how = models.architecture(raw), models.family(raw), weights.cut_for(models.architecture(raw), 0, ranks)
    chosen = None if targets is None else [list(adaptable.modules_of(arch, family))[-1].rsplit(".", 1)[-1]]
    modules = adaptable.modules_of(arch, family, chosen)
    for layers in (range(arch.layers), range(1, arch.layers)):
        held: dict[str, Any] = {"layers": [{} for _ in layers]}
        Resident([held], arch, modules, [how], layers, torch.float32, slots=3, rank=5)
        tables = sum(t.nbytes for layer in held["layers"] for t in layer.values())
        lora = {"max_loras": 3, "max_lora_rank": 5, "target_modules": chosen}
        made, without = (
            memory(deployment(dtype="fp32", device="neuron", **more), raw, small(), ranks, layers) for more in ({"lora": lora}, {})
        )
        assert made.adapters == tables == made.weights - without.weights > 0 == without.adapters
        assert made.total - without.total == tables


def test_a_checkpoint_holds_what_the_rules_say(folder: Path) -> None:
    """Names and shapes as transformers wrote them, from config.json alone: what `rayneuron quantize` and the HLO gate go by."""
    raw, held = hub.read_config(folder), hub.Checkpoint(folder)
    said = dict(checkpoint_shapes(models.architecture(raw), models.family(raw)))
    assert {name: tuple(held[name].shape) for name in said} == said


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_kv_is_what_the_engine_allocates(folder: Path, ranks: int) -> None:
    raw = hub.read_config(folder)
    arch, c = models.architecture(raw), small()
    device = devices.open("cpu", dtype=torch.bfloat16)
    device.load({"top": {}, "layers": []}, kv_shape(arch, c.space, ranks))
    made = memory(deployment(dtype="bf16"), raw, c, ranks, range(arch.layers))
    assert made.kv == device.kv_read(range(c.space.total)).nbytes


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_quantised_weights(name: str, ranks: int, tmp_path: Path) -> None:
    cases.tf.AutoModelForCausalLM.from_config(cases.CONFIGS[name]()).save_pretrained(tmp_path)
    raw = hub.read_config(tmp_path)
    made = memory(deployment(dtype="fp32", quantization="int8"), raw, small(), ranks, range(2))
    assert made.weights == loaded(tmp_path, ranks, 0, 1, Quantization(torch.int8, "per_channel"))


def test_the_sources_example_of_padding() -> None:
    plan = shard.head_plan(56, 8, 32)
    assert (plan.q_heads, plan.kv_heads) == (2, 1)  # 64 query and 32 KV heads over 32 ranks
    config = LLAMA_31_8B | {"num_attention_heads": 9, "num_key_value_heads": 3}
    with pytest.raises(ConfigError, match="more than the model's 9 attention heads; write tensor_parallel: 9 or less"):
        memory(deployment(), config, small(), 16, range(32))


def test_flash_decoding_holds_a_part_of_the_positions() -> None:
    """4 KV heads over 8 ranks: two ranks share a group's positions, beside a block that is no row's."""
    config = LLAMA_31_8B | {"num_key_value_heads": 4}

    def kv(on: bool) -> int:
        return memory(deployment(dtype="bf16", shard_over_sequence=on, tensor_parallel=8), config, small(), 8, range(32)).kv

    copied, shared = kv(False), kv(True)
    assert copied == 32 * 2 * 5 * 64 * 128 * 2 and shared == 32 * 2 * 5 * 32 * 128 * 2


def test_the_guides_example_of_70b() -> None:
    """'requires about 148GB memory ... can run on 16 NeuronCores' (feature guide): weights and KV, batch 1, bf16."""
    c = capacity(rows=1, length=8192, chunk=512)
    made = memory(deployment(dtype="bf16"), LLAMA_3_70B, c, 16, range(80))
    # The guide counts 148 GB for the whole group; KV heads are copied twice at TP 16, so ours is a little above the bare weights.
    assert 140 * GB < 16 * (made.weights + made.kv) < 156 * GB
    assert made.total < 16 * 2**30


def test_scratch_covers_what_the_largest_step_must_hold() -> None:
    c = capacity(rows=8, length=2048, chunk=512)
    made = memory(deployment(dtype="bf16"), LLAMA_31_8B, c, 1, range(32))
    scores = 512 * 32 * 2048 * 4  # [H,T,L] in float32
    assert scores < made.scratch < 2 * scores
    later = memory(deployment(dtype="bf16"), LLAMA_31_8B, c, 1, range(16), last=False)
    assert later.scratch < made.scratch, "no logits on an inner stage"


def test_dtype_and_small_kv() -> None:
    c = small()
    wide, narrow = (memory(deployment(dtype=d), LLAMA_31_8B, c, 2, range(32)) for d in ("fp32", "bf16"))
    assert wide.weights == 2 * narrow.weights and wide.kv == 2 * narrow.kv
    assert memory(deployment(dtype="bf16", kv_dtype="f8e4m3"), LLAMA_31_8B, c, 2, range(32)).kv * 2 == narrow.kv
    assert words.compute("auto", LLAMA_31_8B) == "bf16" and words.compute("auto", GPT2) == "fp32" and words.compute("fp16", GPT2) == "fp16"


def test_unreadable_configs_name_what_is_wrong() -> None:
    with pytest.raises(CheckpointError, match="model_type 'lama' is not supported; did you mean 'llama'\\? supported: arcee"):
        memory(deployment(), {"model_type": "lama"}, small(), 1, range(2))
    with pytest.raises(CheckpointError, match="config.json of a llama model lacks 'vocab_size'"):
        memory(deployment(), {n: v for n, v in LLAMA_31_8B.items() if n != "vocab_size"}, small(), 1, range(2))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("method", "make"),
    [("medusa", published.medusa), ("eagle", published.eagle), ("eagle3", lambda raw: published.eagle3(raw, known=300))],
    ids=["medusa", "eagle", "eagle3"],
)
def test_heads_count(ranks: int, method: str, make: Any, tiny: Path, tmp_path: Path) -> None:
    """What their loader and the device make for them, beside the model's own, as `rayneuron plan` says it."""
    raw, c = hub.read_config(tiny), capacity(rows=4, length=128, chunk=32, block=16)
    folder = published.write(tmp_path, *make(raw))
    config = deployment(dtype="fp32", speculative_config={"method": method, "model": str(folder)})
    data = read_draft(config, raw)
    assert isinstance(data, heads.Heads)
    (held,) = stage_memory(Wanted(config, raw, draft=data), c, ranks, 1)
    (plain,) = stage_memory(Wanted(deployment(dtype="fp32"), raw), c, ranks, 1)
    made = head_layers.load(data, hub.Checkpoint(folder), dtype=torch.float32, ranks=ranks)
    constants = ("rope.freq", "embed.first")
    assert held.weights - plain.weights == sum(t.nbytes for w in (made["top"], *made["layers"]) for n, t in w.items() if n not in constants)
    device = Cpu(dtype=torch.float32, native=False)
    shape = kv_shape(data.arch, c.space, ranks, data.layers)
    device.load({"top": {}, "layers": [], "draft": made}, dataclasses.replace(shape, layers=0, draft=shape, features=data.width))
    assert device.kv is not None and device.kv.draft is not None and device.kv.features is not None
    kept = sum(t.nbytes for pair in device.kv.draft.layers for t in pair) + device.kv.features.nbytes
    assert held.kv - plain.kv == kept and (held.scratch, held.runtime) == (plain.scratch, plain.runtime)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drafting", [{"method": "draft_model", "quantization": "int8"}, {"model": "/other"}], ids=["int8", "other"])
def test_a_draft_model_counts(ranks: int, drafting: dict[str, Any], tmp_path: Path) -> None:
    """What its loader and the device make for it, beside the model's own."""
    for name in ("llama", "qwen2"):
        cases.tf.AutoModelForCausalLM.from_config(cases.CONFIGS[name]()).save_pretrained(tmp_path / name)
    raw, other = hub.read_config(tmp_path / "llama"), None if "quantization" in drafting else hub.read_config(tmp_path / "qwen2")
    config, c = deployment(dtype="fp32", speculative_config=drafting), small()
    (held,) = stage_memory(Wanted(config, raw, draft=other), c, ranks, 1)
    (plain,) = stage_memory(Wanted(deployment(dtype="fp32"), raw), c, ranks, 1)
    kind, how = (torch.float32, None) if other else (torch.bfloat16, Quantization(torch.int8, "per_channel"))
    folder, arch = (tmp_path / "qwen2", models.architecture(other)) if other else (tmp_path / "llama", models.architecture(raw))
    assert held.weights - plain.weights == loaded(folder, ranks, 0, 1, how, kind)
    assert held.kv - plain.kv == kv_shape(arch, c.space, ranks).elements * kind.itemsize
    assert (held.scratch, held.runtime) == (plain.scratch, plain.runtime)
