"""What a gateway's file says of a host: which models may sleep there, and by which rules they are woken."""

from __future__ import annotations

from pydantic import Field

from rayneuron.validation import Section


class HostSection(Section):
    """The nodes whose cores are shared out to models that may sleep."""

    instance: str = Field(min_length=1, description="Their type: inf2.48xlarge; cores:8 is a CPU box that declares eight.")
    nodes: int = Field(1, ge=1, description="How many.")
    starts_at_once: int = Field(2, ge=1, description="Models that may load on a node at the same time.")
    page_cache_gib: float = Field(0.0, ge=0, description="Memory of a node that may be filled with the weights of models that sleep.")


class Scaling(Section):
    """When models are woken and put to sleep."""

    hold_s: float = Field(120.0, ge=0, description="Calls to a model that sleeps are held while it is expected within so long; else 503.")
    max_held: int = Field(256, ge=1, description="Calls that may be held for one model; more: 429.")
    min_life_s: float = Field(60.0, ge=0, description="A model stays awake for so long, whoever wants its cores.")
    cooldown_s: float = Field(30.0, ge=0, description="How long a further seat must have been idle to be given back.")
    horizon_s: float = Field(600.0, gt=0, description="How far back it is looked how often a model is asked.")
    drain_s: float = Field(10.0, gt=0, description="How long the streams of a model that has to go may take.")
    target_ttft_ms: float = Field(2000.0, gt=0, description="Another seat is taken where work would wait longer.")
    orphan_s: float = Field(300.0, gt=0, description="A seat whose gateway has been gone for so long ends by itself.")
