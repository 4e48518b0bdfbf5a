"""Keys of a deployment file that say how replies look: one dialect's, and what is told apart in an answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rayneuron.validation import Section


class Lmi(Section):
    """Replies to bodies with `inputs`, as DJL LMI's container writes them."""

    output_formatter: Literal["json", "jsonlines", "sse"] | None = Field(None, description="Default: json, and jsonlines where streamed.")
    tgi_compat: bool = Field(False, description="As text-generation-inference: lists of one, events, `logprob`, details always.")


class Replies(Section):
    """How replies look, whatever they say; vLLM's names."""

    stream_interval: int = Field(
        1, ge=1, description="Tokens a stream event of OpenAI's routes holds at least, but for a choice's first; a body may say another."
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"] | None = Field(
        None, description="How the model writes calls of tools. Default: as its chat template shows; auto: that, or no start."
    )
    default_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Words for the chat template where a body's chat_template_kwargs do not say them."
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = Field(
        None, description="How it writes reasoning; deepseek_r1 begins inside it. Default: it is content."
    )
