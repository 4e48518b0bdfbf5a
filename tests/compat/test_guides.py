"""The steps of the guides' code blocks on small checkpoints, with nothing but the import changed; the reference is transformers itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from rayneuron import demo
from rayneuron.compat import nxdi, transformers_neuronx
from rayneuron.compat.nxdi import HuggingFaceGenerationAdapter, LlamaInferenceConfig, NeuronLlamaForCausalLM, OnDeviceSamplingConfig
from rayneuron.compat.transformers_neuronx import (
    GQA,
    GenerationConfig,
    HuggingFaceGenerationModelAdapter,
    LlamaForSampling,
    NeuronAutoModelForCausalLM,
    NeuronConfig,
    QuantizationConfig,
    SpeculativeGenerator,
)
from rayneuron.errors import ConfigError, RequestError
from tests.engine.test_adapters import greedy as merged
from tests.models import adapters

TEXT = "Hello, I'm a language model,"
ARGMAX = NeuronConfig(on_device_generation=GenerationConfig(do_sample=False))
ON: dict[str, Any] = {"device": "cpu", "threads": 1}  # which these programs need not say on a machine with Neuron


@pytest.fixture(scope="module")
def path() -> str:
    return str(demo.resolve("demo:random:tiny"))


@pytest.fixture(scope="module")
def ids(path: str) -> torch.Tensor:
    found: torch.Tensor = AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt").input_ids
    return found


@pytest.fixture(scope="module")
def greedy(path: str, ids: torch.Tensor) -> list[int]:
    """Twelve more tokens, as transformers makes them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0)[0].tolist()


class Counter:
    """A streamer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_the_automatic_class_and_generate(path: str, ids: torch.Tensor, greedy: list[int]) -> None:
    """from_pretrained with the first block's keywords, to_neuron, the generate() adapter; left padding as the guide has it."""
    config = NeuronConfig(fuse_qkv=True, attention_layout="BSH", group_query_attention=GQA.SHARD_OVER_HEADS)
    words = {"batch_size": 2, "n_positions": 128, "amp": "f32", "context_length_estimate": 64, "unroll": None}
    model = NeuronAutoModelForCausalLM.from_pretrained(path, **words, neuron_config=config, tp_degree=1, **ON)
    with pytest.raises(RequestError, match=r"call to_neuron\(\) first"):
        model.sample(ids, sequence_length=64)
    assert any("attention_layout" in note for note in model.notes)
    model.to_neuron()
    adapter = HuggingFaceGenerationModelAdapter(AutoConfig.from_pretrained(path), model)
    adapter.reset_generation()
    padded = torch.cat([torch.zeros_like(ids), ids], 1)
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], 1)
    made = adapter.generate(input_ids=padded, attention_mask=mask, do_sample=False, max_new_tokens=12)
    assert made[0, ids.shape[1] :].tolist() == greedy
    sampled = adapter.generate(input_ids=padded, attention_mask=mask, do_sample=True, temperature=0.7, max_length=padded.shape[1] + 5)
    assert sampled.shape[1] <= padded.shape[1] + 5
    model.llm.close()  # type: ignore[union-attr]


def test_sampling_on_the_device_streamers_and_criteria(path: str, ids: torch.Tensor, greedy: list[int]) -> None:
    """on_device_generation, per_batch_line with an update, a streamer, a stopping criterion, save and load."""
    length = ids.shape[1] + 12
    generation = GenerationConfig(max_length=128, dynamic=True, per_batch_line=True, do_sample=True, top_k=[1, 1], top_p=[1.0, 1.0])
    words = {"batch_size": 2, "n_positions": 128, "amp": "f32", **ON}
    model = LlamaForSampling.from_pretrained(path, **words, neuron_config=NeuronConfig(on_device_generation=generation))
    model.to_neuron()
    both = torch.cat([ids, ids])
    assert [row.tolist() for row in model.sample(both, sequence_length=length)] == [greedy, greedy]
    streamer = Counter()
    model.sample(ids, sequence_length=length, start_ids=None, streamer=streamer)
    assert streamer.ended and streamer.tokens == greedy

    class After(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **words: Any) -> bool:
            return bool(input_ids.shape[1] >= ids.shape[1] + 3)

    stopped = model.sample(ids, sequence_length=length, stopping_criteria_list=StoppingCriteriaList([After()]))
    assert stopped[0].tolist() == greedy[: ids.shape[1] + 3]
    generation.top_k, generation.temperature = [1, 20], [1.0, 0.9]
    model.update_generation_config(generation)
    made = model.sample(both, sequence_length=length)
    assert made.shape[0] == 2 and made[0, :length].tolist() == greedy
    again = model.sample(ids, sequence_length=length, top_k=1, no_repeat_ngram_size=2)[0, ids.shape[1] :].tolist()
    assert len(set(zip(again, again[1:], strict=False))) == len(again) - 1
    model.llm.close()  # type: ignore[union-attr]


def test_eight_bits_and_artifacts(path: str, ids: torch.Tensor, tmp_path: Path) -> None:
    config = NeuronConfig(quant=QuantizationConfig(quant_dtype="s8", dequant_dtype="bf16"))
    model = LlamaForSampling.from_pretrained(path, amp="bf16", n_positions=64, neuron_config=config, **ON)
    model.save(str(tmp_path / "artifacts"))
    model.load(str(tmp_path / "artifacts"))
    model.to_neuron()
    assert model.llm is not None and model.llm.config.quantization == "int8"
    assert model.llm.config.compile.cache == str(tmp_path / "artifacts")
    assert model.sample(ids, sequence_length=ids.shape[1] + 4).shape[1] <= ids.shape[1] + 4
    model.llm.close()


def test_weights_are_cut_beside_the_graphs(path: str, ids: torch.Tensor, greedy: list[int], tmp_path: Path) -> None:
    """save(sharded_weights=True), then from_pretrained of that folder."""
    folder, words = str(tmp_path / "artifacts"), {"n_positions": 128, "tp_degree": 2, "amp": "f32", "neuron_config": ARGMAX, **ON}
    model = LlamaForSampling.from_pretrained(path, **words)
    model.save(folder, sharded_weights=True)
    cut = LlamaForSampling.from_pretrained(folder, **words)
    cut.load(folder)
    cut.to_neuron()
    assert len(list(Path(folder).rglob("*rank*.safetensors")) or list(Path(folder).rglob("tp*.safetensors"))) == 2
    assert cut.sample(ids, sequence_length=len(greedy))[0].tolist() == greedy
    cut.llm.close()  # type: ignore[union-attr]


def test_a_model_that_drafts_for_another(path: str, ids: torch.Tensor, greedy: list[int]) -> None:
    """The guide's SpeculativeGenerator, with both models loaded as it loads them."""
    words = {"n_positions": 128, "batch_size": 1, "amp": "f32", "neuron_config": ARGMAX, **ON}
    draft, target = (LlamaForSampling.from_pretrained(path, **words) for _ in range(2))
    draft.to_neuron()
    target.enable_speculative_decoder(4)
    target.to_neuron()
    generator = SpeculativeGenerator(draft, target, 4)
    assert generator.sample(input_ids=ids, sequence_length=len(greedy))[0].tolist() == greedy
    said = target.llm.config.speculative_config  # type: ignore[union-attr]
    assert said is not None and (said.method, said.num_speculative_tokens) == ("draft_model", 4) and draft.llm is None
    target.llm.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: LlamaForSampling.from_pretrained(path, tp_degree="two"), "from_pretrained(tp_degree=...): tp_degree must be"),
        (lambda path: LlamaForSampling.from_pretrained(path, trust_remote_code=True), "never run; leave it out"),
        (lambda path: LlamaForSampling.from_pretrained(path, neuron_config=NeuronConfig(quant="x")), "must have the quant_dtype"),
        (lambda path: LlamaForSampling.from_pretrained(path, neuron_config=NeuronConfig(fuze_qkv=True)), "did you mean fuse_qkv?"),
        (lambda path: nxdi.NeuronConfig(speculation_length=5), "a draft model is speculative_config"),
        (lambda path: nxdi.NeuronConfig(lora_config=nxdi.LoraServingConfig(dynamic_multi_lora=True)), "write all in lora_ckpt_paths"),
        (lambda path: nxdi.NeuronConfig(tp_degre=2), "did you mean tp_degree?"),
    ],
)
def test_what_has_no_meaning_here_is_refused_at_once(path: str, make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(path)
    assert said in caught.value.message


def test_nxds_steps(path: str, ids: torch.Tensor, greedy: list[int], tmp_path: Path) -> None:
    """Configure, compile into a folder, load from it in another object, generate, with dynamic sampling for each row."""
    neuron_config = nxdi.NeuronConfig(
        batch_size=2,
        max_context_length=64,
        seq_len=128,
        torch_dtype=torch.float32,
        enable_bucketing=True,
        context_encoding_buckets=[64],
        token_generation_buckets=[128],
        on_device_sampling_config=OnDeviceSamplingConfig(dynamic=True, global_topk=64),
        fused_qkv=True,
        is_continuous_batching=True,
    )
    config = LlamaInferenceConfig(neuron_config, load_config=nxdi.load_pretrained_config(path))
    assert config.hidden_size == AutoConfig.from_pretrained(path).hidden_size  # type: ignore[attr-defined]
    model = NeuronLlamaForCausalLM(path, config, **ON)
    with pytest.raises(RequestError, match=r"call load\(\) first"):
        HuggingFaceGenerationAdapter(model)
    model.compile(str(tmp_path / "traced"))
    model.load(str(tmp_path / "traced"))
    again = NeuronLlamaForCausalLM(str(tmp_path / "traced"), **ON)
    assert (again.path, again.options["max_model_len"], again.options["dtype"]) == (path, 128, "fp32")
    adapter = HuggingFaceGenerationAdapter(model)
    words = {"attention_mask": torch.ones_like(ids), "max_length": ids.shape[1] + 12}
    assert adapter.generate(ids, do_sample=False, **words)[0].tolist() == greedy
    both = torch.cat([ids, ids])
    params = torch.tensor([[1, 1.0, 1.0], [50, 0.5, 0.75]])
    made = adapter.generate(both, attention_mask=torch.ones_like(both), max_length=ids.shape[1] + 12, sampling_params=params)
    assert made.shape[0] == 2 and made[0, : len(greedy)].tolist() == greedy
    assert model.llm is not None and model.llm.config.on_device_sampling.global_topk == 64
    model.llm.close()
    assert transformers_neuronx.MistralForSampling is LlamaForSampling


def test_nxds_adapters(path: str, ids: torch.Tensor, greedy: list[int], tmp_path: Path) -> None:
    """Multi-LoRA serving as the feature guide has it, and of the model that was saved: each prompt with its adapter, rows sampled apart."""
    folders = {name: str(adapters.write(tmp_path / name, Path(path), r=2 + i, seed=i, size=0.4)) for i, name in enumerate("ab")}
    prompt = ids[0].tolist()
    wanted = [*(prompt + merged(Path(path), folders[name], prompt, 6) for name in "ab"), greedy[: len(prompt) + 6]]
    lora = nxdi.LoraServingConfig(max_loras=2, max_lora_rank=4, lora_ckpt_paths=folders)
    neuron_config = nxdi.NeuronConfig(batch_size=3, seq_len=64, torch_dtype=torch.float32, lora_config=lora)
    config = LlamaInferenceConfig(neuron_config, load_config=nxdi.load_pretrained_config(path))
    NeuronLlamaForCausalLM(path, config, **ON).compile(str(tmp_path / "traced"))
    model = NeuronLlamaForCausalLM(str(tmp_path / "traced"), **ON)
    model.load(str(tmp_path / "traced"))
    three, adapter = ids.repeat(3, 1), HuggingFaceGenerationAdapter(model)
    words = {"attention_mask": torch.ones_like(three), "max_new_tokens": 6}
    assert adapter.generate(three, adapter_ids=["a", "b", None], do_sample=False, **words).tolist() == wanted
    each = torch.tensor([[1, 1.0, 1.0], [1, 1.0, 1.0], [1, 1.0, 0.5]])
    assert adapter.generate(three, adapter_ids=["a", "b", None], sampling_params=each, **words).tolist() == wanted
    wrong = {None: "adapter_ids names the LoRA adapter of each prompt", ("a", "b"): "must be a list of 3 names", ("c",) * 3: "'c'"}
    for names, said in wrong.items():
        with pytest.raises(RequestError, match=said):
            adapter.generate(three, adapter_ids=names, do_sample=False, **words)
    model.llm.close()  # type: ignore[union-attr]


def test_nxds_fused_speculation(path: str, ids: torch.Tensor, greedy: list[int], tmp_path: Path) -> None:
    """The guide's steps with a draft model that is fused; the same tokens, also of the model that was saved."""
    neuron_config = nxdi.NeuronConfig(
        batch_size=1, seq_len=64, torch_dtype=torch.float32, enable_fused_speculation=True, speculation_length=3, trace_tokengen_model=False
    )
    config = NeuronLlamaForCausalLM.get_config_cls()(neuron_config, load_config=nxdi.load_pretrained_config(path))
    draft_neuron_config = copy.deepcopy(neuron_config)
    draft_neuron_config.trace_tokengen_model, draft_neuron_config.enable_fused_speculation = True, False
    draft_config = LlamaInferenceConfig(draft_neuron_config, load_config=nxdi.load_pretrained_config(path))
    config.fused_spec_config = nxdi.FusedSpecNeuronConfig(  # type: ignore[attr-defined]
        NeuronLlamaForCausalLM._model_cls, draft_config=draft_config, draft_model_path=path
    )
    model = NeuronLlamaForCausalLM(path, config, **ON)
    model.compile(str(tmp_path / "traced"))
    again = NeuronLlamaForCausalLM(str(tmp_path / "traced"), **ON)
    for loaded in (model, again):
        loaded.load(str(tmp_path / "traced"))
        assert loaded.llm is not None
        said = loaded.llm.config.speculative_config
        assert said is not None and (said.method, said.model, said.num_speculative_tokens) == ("draft_model", path, 3)
        adapter = HuggingFaceGenerationAdapter(loaded)
        assert adapter.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0].tolist() == greedy
        loaded.llm.close()
