"""The names that NxD Inference's guides use, over `LLM`: change the import, keep the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rayneuron import hf
from rayneuron.compat import by_row, device
from rayneuron.errors import RequestError
from rayneuron.llm import LLM
from rayneuron.options import adapters, nxdi
from rayneuron.options.words import Translation, tell
from rayneuron.validation import override

FILE = "neuron_config.json"


OnDeviceSamplingConfig = LoraServingConfig = SimpleNamespace  # what they hold is checked with the NeuronConfig that holds them


class FusedSpecNeuronConfig(SimpleNamespace):
    """What drafts beside a model, the InferenceConfig's `fused_spec_config`; checked with the model that has it."""

    def __init__(self, worker_cls: Any, draft_config: InferenceConfig | None = None, draft_model_path: str | None = None) -> None:
        super().__init__(worker_cls=worker_cls, draft_config=draft_config, draft_model_path=draft_model_path)


class NeuronConfig:
    """Its words are checked against the table at once. They stay its attributes, with NxD's defaults of the lengths."""

    def __init__(self, **words: Any) -> None:
        tell(Translation(), nxdi.NEURON_CONFIG, words, lambda name: f"NeuronConfig({name}=...)", "NeuronConfig")
        self.__dict__.update(words)
        self.seq_len = words.get("seq_len", 128)
        self.batch_size = words.get("batch_size", 1)
        self.max_length = words.get("max_length", self.seq_len)

    def told(self, **beside: Any) -> dict[str, Any]:
        """Our dotted keys. `beside`: words that stand outside of it."""
        out = Translation()
        tell(out, nxdi.NEURON_CONFIG, {**vars(self), **beside}, lambda name: f"NeuronConfig({name}=...)", "NeuronConfig")
        return out.assigned


class InferenceConfig:
    """A NeuronConfig, and what `load_config` says of the model."""

    def __init__(self, neuron_config: NeuronConfig, load_config: Callable[[InferenceConfig], None] | None = None, **words: Any) -> None:
        self.neuron_config = neuron_config
        if load_config is not None:
            load_config(self)
        self.__dict__.update(words)

    def save(self, folder: str) -> None:
        """As neuron_config.json, which `rayneuron translate` reads."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / FILE).write_text(json.dumps(vars(self), default=_written))

    @classmethod
    def load(cls, folder: str) -> InferenceConfig:
        """What `save` wrote."""
        held = json.loads((Path(folder) / FILE).read_text())
        return cls(NeuronConfig(**held.pop("neuron_config")), **held)


def load_pretrained_config(path: str) -> Callable[[InferenceConfig], None]:
    """A hook that gives an InferenceConfig what the model's config.json says."""

    def load(config: InferenceConfig) -> None:
        config.__dict__.update(json.loads((Path(path) / "config.json").read_text()), _name_or_path=str(path))

    return load


class NeuronBaseForCausalLM:
    """A model: `compile` makes its graphs, `load` loads it. `device` and further keys of a deployment file come as keywords."""

    _model_cls = SimpleNamespace  # named by guides as what drafts, where the file of the draft says which family it is of

    def __init__(self, path: str, config: InferenceConfig | None = None, neuron_config: NeuronConfig | None = None, **options: Any) -> None:
        held = Path(path) / FILE
        self.config = config or (InferenceConfig.load(path) if held.is_file() else InferenceConfig(neuron_config or NeuronConfig()))
        self.neuron_config = self.config.neuron_config
        self.path = getattr(self.config, "_name_or_path", path) if config is None else path
        fused = getattr(self.config, "fused_spec_config", None)
        told = self.neuron_config.told(fused_spec_config=fused)
        self.options = override({"device": device(), "model": {"path": self.path}, **options}, told)
        self.llm: LLM | None = None

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        """The InferenceConfig of any family."""
        return InferenceConfig

    def compile(self, folder: str, debug: bool = False) -> None:
        """Graphs are kept in `folder`, beside what made them."""
        self.options = override(self.options, {"compile.cache": str(folder)})
        vars(self.config).update(_name_or_path=str(self.path))
        self.config.save(folder)

    def load(self, folder: str | None = None) -> None:
        """Load weights and graphs."""
        self.options = override(self.options, {"compile.cache": str(folder)} if folder else {})
        self.llm = self.llm or LLM(None, **self.options)

    def reset(self) -> None:
        """Nothing to reset: every call has its own KV."""

    @staticmethod
    def save_quantized_state_dict(path: str, config: InferenceConfig) -> None:
        """Nothing to save: weights are quantised as they are read; `rayneuron quantize` writes them."""


class HuggingFaceGenerationAdapter(hf.HuggingFaceGenerationAdapter):
    """`generate()` of a loaded model. `sampling_params` [B, 3]: top_k, top_p and temperature of each row."""

    def __init__(self, model: NeuronBaseForCausalLM) -> None:
        if model.llm is None:
            raise RequestError("the model is not loaded; call load() first", param="model")
        super().__init__(model.llm)
        self.plain = hf.HuggingFaceGenerationAdapter(model.llm)
        self.neuron_config = model.neuron_config

    def generate(self, input_ids: Tensor, *args: Any, sampling_params: Tensor | None = None, **words: Any) -> Any:
        """As the other adapter's. Raises RequestError where NxD would take the first of several LoRA adapters without a word."""
        lora = getattr(self.neuron_config, "lora_config", None)
        if lora and words.get("adapter_ids") is None and not adapters.words_of(lora).get("enable_base_model_only"):
            said = "adapter_ids names the LoRA adapter of each prompt; write it, or LoraServingConfig(enable_base_model_only=True) for none"
            raise RequestError(said, param="adapter_ids")
        if sampling_params is None:
            return super().generate(input_ids, *args, **words)
        each = [
            {"do_sample": top_k != 1, "top_k": int(top_k), "top_p": top_p, "temperature": temperature}
            for top_k, top_p, temperature in sampling_params.tolist()
        ]
        return by_row(self.plain, input_ids, each, words.pop("attention_mask", None), **words)


def _written(value: Any) -> Any:
    """A part of a config as JSON holds it."""
    return str(value) if isinstance(value, torch.dtype | type) else vars(value)


LlamaInferenceConfig = MixtralInferenceConfig = DbrxInferenceConfig = InferenceConfig
LlamaNeuronConfig = MoENeuronConfig = DbrxNeuronConfig = NeuronConfig
NeuronLlamaForCausalLM = NeuronMixtralForCausalLM = NeuronDbrxForCausalLM = NeuronBaseForCausalLM
