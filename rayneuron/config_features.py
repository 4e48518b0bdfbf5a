"""Words of a deployment file about how tokens are chosen: sampling on the device, speculation."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from rayneuron.validation import Section

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "medusa")


class OnDeviceSampling(Section):
    """How the device draws: as transformers does, or as NxD Inference does with its documented edges."""

    neuron_compat: bool = Field(False, description="Drop the token that crosses top_p; top_k 0 draws evenly of the candidates; no min_p.")
    global_topk: int = Field(256, ge=0, description="With neuron_compat: candidates before all filters; 0: the whole vocabulary.")
    deterministic: bool = Field(False, description="With neuron_compat: 0.5 instead of a random number.")
    top_p_min_tokens: int = Field(1, ge=1, description="With neuron_compat: tokens top_p always keeps.")


class SpeculativeConfig(Section):
    """Tokens that may come next are tried several at once; which tokens come does not depend on it. vLLM's names. Where nothing is said,
    it is on wherever that is exact to the bit: on the CPU, with its kernels; null or false: off."""

    method: str = Field(default="ngram", description="ngram: what followed the last tokens where they occurred before.")
    num_speculative_tokens: int = Field(default=8, ge=1, le=64, description="The most tokens tried for a sequence in one step.")
    prompt_lookup_min: int = Field(default=2, ge=1, description="Tokens that must have occurred before.")
    prompt_lookup_max: int = Field(default=4, ge=1, description="A longer match is not looked for.")
    adaptive: bool = Field(default=True, description="Try as many as pay by the measured times of steps, often none; false: all there are.")

    @field_validator("method")
    @classmethod
    def _served(cls, value: str) -> str:
        if value == "ngram":
            return value
        known = "is not served yet" if value in METHODS else f"is none of {', '.join(METHODS)}"
        raise ValueError(f"method {value} {known}; write ngram")

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}")
        return self


def undrafted(config: Any) -> str | None:
    """The key of a Deployment with which nothing is speculated, and why; None where there is none."""
    if config.few_graphs:
        return f"device {config.device}, for which drafts are not verified yet; leave it out"
    if config.compile.async_mode:
        return "compile.async_mode, which begins a step before the tokens of the last are known; leave one out"
    if config.pipeline_parallel > 1:
        return "pipeline_parallel, whose stages do not verify drafts; leave one out"
    if config.capacity_factor is not None:
        return "capacity_factor, by which tokens depend on what shares a step with them; leave one out"
    return None
