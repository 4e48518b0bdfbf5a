"""Keys of a deployment file that say how one dialect's replies look."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayneuron.validation import Section


class Lmi(Section):
    """Replies to bodies with `inputs`, as DJL LMI's container writes them."""

    output_formatter: Literal["json", "jsonlines", "sse"] | None = Field(None, description="Default: json, and jsonlines where streamed.")
    tgi_compat: bool = Field(False, description="As text-generation-inference: lists of one, events, `logprob`, details always.")
