"""What may change while a replica runs, through user_config: sampling defaults and limits, on top of what args say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rayneuron import config as deployment
from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.api.forms import FORMS, recognised
from rayneuron.api.scan import Scan
from rayneuron.api.vectors import Pooling
from rayneuron.config import Deployment, Limits
from rayneuron.errors import ConfigError
from rayneuron.metrics import TOOL_CALLS
from rayneuron.models.config_json import pooling
from rayneuron.serve.telemetry import Series, Telemetry
from rayneuron.text.text import Text

if TYPE_CHECKING:
    from rayneuron.engine.remote import Prefills
    from rayneuron.engine.timing import Timing


class Sizes(Protocol):
    """How much an engine holds: `rows` sequences at once, each up to `length` tokens."""

    @property
    def rows(self) -> int: ...

    @property
    def length(self) -> int: ...


class Names(Protocol):
    """The adapters there are."""

    @property
    def names(self) -> Mapping[str, str]:
        """Contents by name, at this moment."""


class Holds(Protocol):
    """The part of an engine that requests are held against."""

    @property
    def capacity(self) -> Sizes: ...

    @property
    def vocab(self) -> int: ...

    @property
    def timing(self) -> Timing | None: ...

    @property
    def adapters(self) -> Names: ...

    @property
    def prefills(self) -> Prefills | None: ...


class Reads(Protocol):
    """A model to read bodies for."""

    @property
    def engine(self) -> Holds: ...

    @property
    def text(self) -> Text: ...

    @property
    def path(self) -> Path: ...

    @property
    def generation(self) -> dict[str, Any]: ...


class Known(Reads, Protocol):
    """A model that is served: `loading.Opened`, or what a gateway knows of one."""

    @property
    def chosen(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Hot:
    """What calls are read with and held to."""

    context: api.Context
    limits: Limits


def hot(
    config: Deployment, opened: Reads, user_config: Mapping[str, Any] | None = None, telemetry: Telemetry | None = None
) -> Hot:  # fmt: skip
    """What `args` and `user_config` together say; a key that is in both is user_config's. Raises ConfigError. `telemetry` counts calls of
    tools."""
    said = deployment.parse_hot(user_config)
    limits = said.limits.model_dump(exclude_unset=True) if said.limits is not None else {}
    merged = config.limits.model_copy(update=limits)
    scan = Scan(_form(config, opened.text), config.serving.reasoning_parser)
    context = api.Context(
        models=config.model.served_names,
        text=opened.text,
        max_model_len=opened.engine.capacity.length,
        vocab_size=opened.engine.vocab,
        defaults=openai.sampling_defaults(opened.generation, {**config.sampling_defaults, **(said.sampling_defaults or {})}),
        scan=scan if telemetry is None else scan._replace(counted=partial(_count, telemetry.series[TOOL_CALLS])),
        trust_chat_template=config.serving.trust_request_chat_template,
        any_name=config.model.any_name,
        client_priority=merged.client_priority,
        stream_interval=config.serving.stream_interval,
        template_kwargs=config.serving.default_chat_template_kwargs,
        adapters=lambda: opened.engine.adapters.names,
        pooling=Pooling(*pooling(opened.path)),
        lmi=api.LmiOptions(config.lmi.output_formatter, config.lmi.tgi_compat),
    )
    openai.check_defaults(context)
    return Hot(context, merged)


def _count(series: Series, parser: str, whole: int, broken: int) -> None:
    for complete, calls in (("true", whole), ("false", broken)):
        if calls:
            series.add(calls, parser, complete)


def _form(config: Deployment, text: Text) -> str | None:
    """In which form the model calls tools: the file's word, else what its chat template shows. ConfigError where that was to be told."""
    said, found = config.serving.tool_call_parser, recognised(text.tool_template)
    if said == "auto" and found is None:
        why = f"its chat template shows none of the forms read here; write one of {', '.join(FORMS)}, or leave it out"
        raise ConfigError(f"serving.tool_call_parser: auto cannot tell how this model calls tools: {why}", param="serving.tool_call_parser")
    return found if said in (None, "auto") else said
