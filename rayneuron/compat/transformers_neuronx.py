"""The names that transformers-neuronx's guide uses, over `LLM`: change the import, keep the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rayneuron import sources
from rayneuron.compat import by_row, device
from rayneuron.config import parse
from rayneuron.errors import RequestError
from rayneuron.hf import HuggingFaceGenerationAdapter
from rayneuron.llm import LLM
from rayneuron.models import presharded
from rayneuron.options import tnx
from rayneuron.options.words import Translation, tell
from rayneuron.validation import override

SAMPLED = ("top_k", "top_p", "temperature")


# What they hold is checked against the table where a model is made of them. Of a GenerationConfig values may be lists of one a sequence.
NeuronConfig = QuantizationConfig = ContinuousBatchingConfig = GenerationConfig = SimpleNamespace


class GQA:
    """How KV heads meet the cores."""

    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"


class NeuronAutoModelForCausalLM:
    """A model that is loaded by `to_neuron`. `device` and further keys of a deployment file come beside the guide's keywords."""

    def __init__(self, path: str, words: dict[str, Any]) -> None:
        config = words.get("neuron_config") or NeuronConfig()
        self.generation_config: Any = vars(config).get("on_device_generation")
        theirs = {name: value for name, value in words.items() if name in tnx.PRETRAINED and name != "neuron_config"}
        told = Translation()
        tell(told, tnx.PRETRAINED, theirs, lambda name: f"from_pretrained({name}=...)", "from_pretrained")
        tell(told, tnx.NEURON_CONFIG, vars(config), lambda name: f"NeuronConfig({name}=...)", "NeuronConfig")
        ours = {name: value for name, value in words.items() if name not in tnx.PRETRAINED}
        self.options = override({"device": device(), "model": {"path": path}, **ours}, told.assigned)
        self.notes = told.notes
        self.llm: LLM | None = None
        self.drafts = 0

    @classmethod
    def from_pretrained(cls, path: str, **words: Any) -> NeuronAutoModelForCausalLM:
        """A model directory or a hub's id, with the guide's keywords. Raises ConfigError for one that has no meaning here."""
        return cls(str(path), words)

    def enable_speculative_decoder(self, count: int) -> None:
        """So many drafts are verified at once: it is loaded by the SpeculativeGenerator, together with what drafts."""
        self.drafts = count

    def to_neuron(self) -> None:
        """Load it, and make every shape ready; what another is to draft for waits for that."""
        if not self.drafts or "speculative_config" in self.options:
            self.llm = self.llm or LLM(None, **self.options)

    def save(self, folder: str, sharded_weights: bool = False) -> None:
        """Where compiled graphs are kept from now on. `sharded_weights`: also the weights, cut for its ranks, as `rayneuron shard` cuts
        them; then `folder` must be new, and `from_pretrained` takes it."""
        if sharded_weights:
            c = parse(self.options)
            presharded.shard(
                sources.resolve(c.model.path).path, c.tensor_parallel, folder, dtype=c.dtype, quantization=c.quantization,
                fused_qkv=c.fused_qkv, group_query_attention=c.group_query_attention, shard_over_sequence=c.shard_over_sequence,
            )  # fmt: skip
        self.load(folder)

    def load(self, folder: str) -> None:
        """Where compiled graphs are looked for, and kept."""
        self.options = override(self.options, {"compile.cache": str(folder)})

    def update_generation_config(self, config: Any) -> None:
        """How the next sequences are sampled."""
        self.generation_config = config

    def sample(
        self,
        input_ids: Tensor,
        sequence_length: int,
        start_ids: Tensor | None = None,
        streamer: Any = None,
        stopping_criteria_list: Iterable[Callable[..., Any]] | None = None,
        **words: Any,
    ) -> Any:
        """[B, L] -> [B, at most sequence_length]: sampled as `on_device_generation` says, else from the 50 likeliest."""
        if start_ids is not None:
            raise RequestError("start_ids is not supported; send an attention_mask to generate()", param="start_ids")
        if self.llm is None:
            raise RequestError("the model is not loaded; call to_neuron() first", param="model")
        each = [self._sampling(row, words) for row in range(len(input_ids))]
        adapter = HuggingFaceGenerationAdapter(self.llm)
        ends = {"max_length": sequence_length, "streamer": streamer, "stopping_criteria": stopping_criteria_list}
        return by_row(adapter, input_ids, each, None, **ends)

    def _sampling(self, row: int, words: dict[str, Any]) -> dict[str, Any]:
        config = self.generation_config
        if config is None:
            return {"do_sample": True, "top_k": 50, **words}  # the guide's default
        of = {name: getattr(config, name, None) for name in SAMPLED}
        own = {name: value[row] if isinstance(value, list) else value for name, value in of.items() if value is not None}
        return {"do_sample": bool(getattr(config, "do_sample", False)), **own, **words}


class SpeculativeGenerator:
    """One model drafts `count` tokens at a time for another, which verifies them; both are loaded as one."""

    def __init__(self, draft: NeuronAutoModelForCausalLM, target: NeuronAutoModelForCausalLM, count: int) -> None:
        said = {"method": "draft_model", "model": draft.options["model"]["path"], "num_speculative_tokens": count}
        for model in (draft, target):  # loaded without the other
            if model.llm is not None:
                model.llm.close()
                model.llm = None
        target.options = override(target.options, {"speculative_config": said})
        target.to_neuron()
        self.target = target

    def sample(self, input_ids: Tensor, sequence_length: int, **words: Any) -> Any:
        """As the target's: drafts change no token."""
        return self.target.sample(input_ids, sequence_length, **words)


class HuggingFaceGenerationModelAdapter(HuggingFaceGenerationAdapter):
    """`generate()` of a loaded model; what transformers' config says is in the model directory too."""

    def __init__(self, config: Any, model: NeuronAutoModelForCausalLM) -> None:
        if model.llm is None:
            raise RequestError("the model is not loaded; call to_neuron() first", param="model")
        super().__init__(model.llm)
        self.config = config


BloomForSampling = GPT2ForSampling = GPT2ForSamplingWithContextBroadcasting = GPTJForSampling = NeuronAutoModelForCausalLM
GPTNeoXForSampling = LlamaForSampling = MistralForSampling = MixtralForSampling = OPTForSampling = NeuronAutoModelForCausalLM
