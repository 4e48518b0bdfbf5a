"""Words of a deployment file about features: sampling on the device, speculation, adapters; and what does not go together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rayneuron.validation import Section

HEADS = ("eagle", "eagle3", "medusa")  # methods that read the model's hidden states
METHODS = ("ngram", "draft_model", *HEADS)  # how drafts are made
_INT8 = "draft_model with quantization: int8, a copy of the model"
_NEAREST = {"ngram_gpu": "ngram", "suffix": "ngram", "lookahead": "ngram", "custom_class": _INT8, "mlp_speculator": _INT8}  # vLLM's others
_LOOKED_UP = ("ngram", "[ngram]")  # what vLLM calls it, as a method or as a model
_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
_MAKERS = {"model": "a draft model", "heads": "what reads hidden states"}


class OnDeviceSampling(Section):
    """How the device draws: as transformers does, or as NxD Inference does with its documented edges."""

    neuron_compat: bool = Field(False, description="Drop the token that crosses top_p; top_k 0 draws evenly of the candidates; no min_p.")
    global_topk: int = Field(256, ge=0, description="With neuron_compat: candidates before all filters; 0: the whole vocabulary.")
    deterministic: bool = Field(False, description="With neuron_compat: 0.5 instead of a random number.")
    top_p_min_tokens: int = Field(1, ge=1, description="With neuron_compat: tokens top_p always keeps.")


class SpeculativeConfig(Section):
    """Tokens that may come next are tried several at once; which tokens come does not depend on it. vLLM's names. Where nothing is said
    they are looked up, wherever that is exact to the bit: on the CPU, by its kernels. false: off."""

    method: str = Field(
        default="ngram",
        description="ngram: what followed the last tokens where they occurred before; draft_model: what that says; medusa, eagle, eagle3: "
        "what such heads make of the model's hidden states.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="Where the draft model or the heads are, as model.path; same vocabulary. Default: the model itself, in int8.",
    )
    quantization: Literal["int8"] | None = Field(None, description="Of draft_model: int8 weights; it then computes in bf16.")
    draft_tensor_parallel_size: int | None = Field(None, ge=1, description="The model's own degree, by which its draft model is cut too.")
    num_speculative_tokens: int = Field(default=8, ge=1, le=64, description="The most tokens tried for a sequence in one step.")
    num_speculative_tokens_per_batch_size: list[list[int]] | None = Field(
        default=None, description="Another most, 0 too, for steps of so many sequences: [[first, last, most], ...]; vLLM's schedule."
    )
    prompt_lookup_min: int = Field(default=2, ge=1, le=64, description="Tokens that must have occurred before.")
    prompt_lookup_max: int = Field(default=4, ge=1, le=64, description="A longer match is not looked for.")
    enabled: bool = Field(default=True, description="false: off.")
    adaptive: bool = Field(default=True, description="Try as many as pay by the measured times of steps, often none; false: all there are.")

    @field_validator("method")
    @classmethod
    def _served(cls, value: str) -> str:
        if value in METHODS:
            return value
        drafts = "mtp" in value or value.startswith(("dflash", "dspark"))  # heads inside a checkpoint, and blocks of drafts
        write = _INT8 if drafts else _NEAREST.get(value) or next(iter(get_close_matches(value.lower(), METHODS, 1)), "one of them")
        raise ValueError(f"method {value[:60] or 'that is empty'} is none of {', '.join(METHODS)}; write {write}")

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, value: Any) -> Any:
        """As vLLM has it: null is as nothing said, who names a model means one that drafts, and where one end of what is looked up is said,
        the other gives way."""
        if not isinstance(value, dict):
            return value
        said = {name: v for name, v in value.items() if v is not None or name not in ("method", *_LOOKUP)}
        named = next((name for name in ("method", "model") if name in said and said[name] is not None), "")
        if named and said[named] in _LOOKED_UP:
            said = {**said, "method": "ngram", **({"model": None} if said.get("model") in _LOOKED_UP else {})}
        elif named == "model":
            said["method"] = "draft_model"
        least, most = (said.get(name) for name in _LOOKUP)
        if type(least) is int and most is None:
            said["prompt_lookup_max"] = max(least, cls.model_fields["prompt_lookup_max"].default)
        elif type(most) is int and least is None:
            said["prompt_lookup_min"] = min(most, cls.model_fields["prompt_lookup_min"].default)
        return said

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _schedule(cls, value: list[list[int]] | None) -> list[list[int]] | None:
        before = 0
        for entry in value or ():
            if len(entry) != 3 or not before < entry[0] <= entry[1] or not 0 <= entry[2] <= 64:
                said = "write [first, last, most] for each range of sequences, the smaller ranges first and none twice, most from 0 to 64"
                raise ValueError(f"{said}, got {entry}")
            before = entry[1]
        return value

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        if self.method == "ngram" and (self.model or self.quantization):
            raise ValueError("model and quantization are of a draft model; write method: draft_model, or leave them out")
        if self.by_heads and (self.model is None or self.quantization):
            raise ValueError(f"method {self.method} needs model: a directory with such heads, and no quantization: they stay as they are")
        if self.by_model and not (self.model or self.quantization):
            raise ValueError("a copy of the model saves nothing; write quantization: int8, or model: a smaller one")
        if (most := max((n for *_, n in self.schedule), default=0)) > self.num_speculative_tokens:
            said = f"num_speculative_tokens_per_batch_size tries {most}, more than num_speculative_tokens {self.num_speculative_tokens}"
            raise ValueError(f"{said}; write {most} there, or less here")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}")
        return self

    @property
    def schedule(self) -> tuple[tuple[int, int, int], ...]:
        """(first, last, most drafts a row) for steps of so many rows."""
        return tuple((first, last, most) for first, last, most in self.num_speculative_tokens_per_batch_size or ())

    @property
    def by_model(self) -> bool:
        """Whether a draft model makes them."""
        return self.method == "draft_model"

    @property
    def by_heads(self) -> bool:
        """Whether heads make them of the model's hidden states."""
        return self.method in HEADS

    @property
    def within(self) -> Literal["", "model", "heads"]:
        """What makes them inside a step, if anything."""
        return "model" if self.by_model else "heads" if self.by_heads else ""

    @property
    def dtype(self) -> str:
        """What a draft model computes in: its own, or what an int8 product is fast in."""
        return "bf16" if self.quantization else "auto"


class Lora(Section):
    """LoRA adapters beside the model: requests name one as their `model`. vLLM's names."""

    enabled: bool = Field(True, description="false: as if this section were not there.")
    lora_modules: dict[str, str] | list[str] = Field(
        default_factory=dict, description="Adapters loaded at start: {name: PEFT directory}; vLLM's name=path and {name, path} too."
    )
    max_loras: int | None = Field(
        None, ge=1, le=256, description="Adapters that sequences of one step may have; default: 8, on Neuron all of lora_modules."
    )
    max_lora_rank: int = Field(16, ge=1, le=1024, description="The largest rank.")
    target_modules: list[str] | None = Field(
        None, min_length=1, description="Modules that adapters may have: [q_proj, v_proj]; default: all. On Neuron each takes memory."
    )
    max_cpu_loras: int | None = Field(None, ge=1, description="Adapters kept in the host's memory; default: 32, or all of lora_modules.")
    directory: str | None = Field(None, min_length=1, description="Where adapters must lie that are loaded while the server runs.")
    allow_runtime_updating: bool = Field(False, description="Let clients load and unload adapters: POST /v1/load_lora_adapter.")

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, str | list):
            return value
        found: dict[str, Any] = {}
        for entry in [value] if isinstance(value, str) else value:
            said = json.loads(entry) if isinstance(entry, str) and entry.startswith("{") else entry
            if isinstance(said, str):
                name, _, path = said.partition("=")
                said = {name: path} if name and path else None
            elif isinstance(said, dict) and {"name", "path"} <= said.keys() <= {"name", "path", "base_model_name"}:
                said = {said["name"]: said["path"]}
            if not isinstance(said, dict) or said.keys() & found.keys():
                raise ValueError(f"each needs a name of its own and a path: {{name: path}}, got {str(entry)[:80]!r}")
            found |= said
        return found

    @model_validator(mode="after")
    def _roomy(self) -> Lora:
        if not all(name.strip() and path.strip() for name, path in self.modules.items()):
            raise ValueError("lora_modules needs names and paths that are not empty")
        if self.most < max(len(self.modules), self.slots()):
            needed = f"the {len(self.modules)} of lora_modules, and max_loras {self.slots()}"
            raise ValueError(f"max_cpu_loras {self.most} is less than {needed}; raise it or leave it out")
        if self.allow_runtime_updating and self.directory is None:
            raise ValueError("allow_runtime_updating needs directory, under which adapters lie; write it, or use lora_modules")
        return self

    @property
    def modules(self) -> dict[str, str]:
        """Paths by name."""
        return self.lora_modules if isinstance(self.lora_modules, dict) else {}

    @property
    def most(self) -> int:
        """Adapters on the host."""
        return self.max_cpu_loras or max(32, len(self.modules), self.slots())

    def slots(self, resident: bool = False) -> int:
        """Adapters in the device's memory. `resident`: all there are lie there from the start."""
        return self.max_loras or (len(self.modules) if resident else 8)


def conflicts(config: Any) -> Iterator[str]:
    """What of a Deployment does not go together."""
    if config.speculative_config and (why := undrafted(config)) is not None:
        yield f"speculative_config goes without {why}"
    if config.lora and (why := unadapted(config)) is not None:
        yield f"lora goes without {why}"
    if config.lora and (taken := set(config.model.served_names) & config.lora.modules.keys()):
        yield f"lora.lora_modules names an adapter {min(taken)}, which is the model's own name; give it another"
    if config.compile.async_mode and config.pipeline_parallel > 1:
        yield "compile.async_mode goes without pipeline_parallel, whose stages overlap by micro_batches; leave it out"


def unadapted(config: Any) -> str | None:
    """The key of a Deployment with which there are no adapters, and why; None where there is none."""
    if config.few_graphs:
        return _not_resident(config.lora)
    if config.compile.async_mode:
        return "compile.async_mode, which begins a step before a slot may change; leave one out"
    if config.sequence_parallel:
        return "sequence_parallel, whose prefills take layers apart; leave one out"
    return None


def _not_resident(lora: Lora) -> str | None:
    """As `unadapted`, where adapters are weights of graphs: those of the file, from the start on."""
    changing = {"allow_runtime_updating": lora.allow_runtime_updating, "directory": lora.directory, "max_cpu_loras": lora.max_cpu_loras}
    if said := [name for name, value in changing.items() if value]:
        return f"{said[0]} on this device, where adapters lie from the start on and stay; leave it out, and name all in lora_modules"
    if not lora.slots(resident=True):
        return "adapters on no device where none can come later; name some in lora_modules, or write max_loras to compile for so many"
    if len(lora.modules) > lora.slots(resident=True):
        return f"max_loras {lora.max_loras} on this device, where all {len(lora.modules)} of lora_modules lie at once; leave it out"
    return None


def undrafted(config: Any) -> str | None:
    """The key of a Deployment with which nothing is speculated, as it says or by default, and why; None where there is none."""
    said = config.speculative_config or SpeculativeConfig.model_construct()
    if config.compile.async_mode:
        return "compile.async_mode, which begins a step before the tokens of the last are known; leave one out"
    if config.pipeline_parallel > 1:
        return "pipeline_parallel, whose stages do not verify drafts; leave one out"
    if config.capacity_factor is not None:
        return "capacity_factor, by which tokens depend on what shares a step with them; leave one out"
    if said.within and config.shard_over_sequence:
        return f"shard_over_sequence, which {_MAKERS[said.within]} is not cut by; write method: ngram"
    if said.within and config.sequence_parallel:
        return f"sequence_parallel, whose prefills take layers apart, with {_MAKERS[said.within]}; leave one out"
    if said.by_heads and config.pools is not None:
        return f"pools, which do not hand over what {said.method} heads need of a prompt; write method: ngram"
    degree = said.draft_tensor_parallel_size
    if degree not in (None, config.tensor_parallel):
        return f"draft_tensor_parallel_size {degree} beside tensor_parallel {config.tensor_parallel}; leave it out"
    return None
