"""What a deployment file says of several processes: how long those of a group wait, and pools that hand KV over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from rayneuron.aliases import translated
from rayneuron.errors import ConfigError
from rayneuron.validation import KeyPath, Locate, Section, validate

Made = TypeVar("Made", bound=Section)

# What both pools must say alike: by what KV is made, and how it lies. Other keys are each pool's own.
ALIKE = (
    *("model", "dtype", "quantization", "kv_dtype", "block_size", "enable_prefix_caching", "max_model_len", "shard_over_sequence"),
    *("capacity_factor", "on_device_sampling", "lora"),
)
FEW_ROWS = 4  # a prefill replica's, where nothing is said
PREFILL_POLICY = "rayneuron.policies.pool_sizes:PromptTokens"  # of its pool, too: Serve's own counts calls, and nobody calls it


class GroupLimits(Section):
    """How long the processes of a group wait for each other before they name who is missing and end."""

    start_s: float = Field(120.0, gt=0, description="For every worker to come, take its cores and connect.")
    load_s: float = Field(600.0, gt=0, description="Without any progress of a worker that loads or warms up.")
    step_s: float = Field(120.0, gt=0, description="For one step.")
    cores_s: float = Field(30.0, ge=0, description="For cores that an ending process still holds.")
    silence_s: float = Field(1.2, gt=0, description="A node whose kernel acknowledges nothing for so long is lost.")


class SeatSection(Section):
    """Where a replica that a gateway's host has started is to run."""

    node: str = Field(min_length=1, description="The node's address.")
    cores: list[int] = Field(min_length=1, description="Its cores, of that node.")
    owner: str = Field(min_length=1, description="The application of the gateway.")
    orphan_s: float = Field(300.0, gt=0, description="Ends by itself where that has been gone for so long.")


class Pools(Section):
    """Prompts are computed by replicas of their own, which hand the KV to those that go on with it: those of the rest of the file."""

    prefill: dict[str, Any] = Field({}, description="What prefill replicas have otherwise: keys of this file, without model and pools.")
    lease_s: float = Field(30.0, gt=0, description="How long KV is kept for a decode replica that says nothing.")
    stall_s: float = Field(5.0, gt=0, description="A prefill replica that says nothing for so long is given up; prompts are computed here.")
    max_pinned: float = Field(0.5, gt=0, le=1, description="Share of its KV that a prefill replica keeps for others at once.")
    local_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="Prompts of so many uncached tokens or fewer are computed where they are decoded; auto: where that is faster."
    )
    max_waiting_tokens: int | None = Field(
        None, ge=1, description="Prompt tokens that may wait at a prefill replica; beyond, others are asked. Default: 16 chunks."
    )
    transport: Literal["auto", "shared", "sockets", "nixl"] = Field(
        "auto", description="How KV travels; auto: shared memory on one host, else sockets; nixl: by NIXL, which is an extra."
    )
    streams: int = Field(2, ge=1, le=16, description="Connections a large transfer is spread over, between hosts.")


def prefill_of(config: Made, place: Locate = lambda path, text: "") -> Made:
    """The prefill pool of a deployment with pools, as a whole deployment. Raises ConfigError, for what the two must say alike too.

    A section is overridden key by key; how many replicas there are each pool says for itself.
    """
    args: dict[str, Any] = config.model_dump(exclude_unset=True)
    over = dict(args["pools"].pop("prefill", {}))

    def placed(keys: KeyPath, text: str) -> str:
        if keys and keys[0] not in over:
            return place(keys, text)
        return place(("pools", "prefill", *keys), text) + "pools.prefill: "

    if over.get("speculative_config"):
        said = "speculative_config is of those that decode; a prefill replica computes one token of an output; leave it out"
        raise ConfigError(placed(("speculative_config",), said) + said, param="pools.prefill.speculative_config")
    over["speculative_config"] = False  # nor has it a draft model
    if "pools" in over:
        raise ConfigError(placed(("pools",), "pools") + "pools are not nested; leave pools out", param="pools.prefill.pools")
    serving = {key: value for key, value in args.get("serving", {}).items() if key not in ("num_replicas", "autoscaling")}
    if isinstance(own := over.get("serving"), dict) and isinstance(scaling := own.get("autoscaling"), dict):
        over["serving"] = {**own, "autoscaling": {"policy": {"policy_function": PREFILL_POLICY}, **scaling}}
        if scaling.get("min_replicas", 1) == 0:
            said = "serving.autoscaling.min_replicas is 0, and nobody would ask where nobody is there; write at least 1"
            raise ConfigError(placed(("serving", "autoscaling", "min_replicas"), said) + said, param="pools.prefill.serving")
    made = validate(type(config), *translated(_over({**args, "serving": serving, "max_num_seqs": FEW_ROWS}, over), placed))
    for name in ALIKE:
        mine, theirs = getattr(config, name), getattr(made, name)
        if mine == theirs:
            continue
        if isinstance(mine, Section) and isinstance(theirs, Section):
            part = next(key for key in type(mine).model_fields if getattr(mine, key) != getattr(theirs, key))
            name, mine, theirs = f"{name}.{part}", getattr(mine, part), getattr(theirs, part)
        said = f"{name} is {theirs!r} there and {mine!r} for decoding, and both pools must have the same; leave it out there"
        raise ConfigError(placed(tuple(name.split(".")), said) + said, param=f"pools.prefill.{name}")
    return made


def _over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(base)
    for key, value in over.items():
        inside = made.get(key)
        made[key] = _over(inside, value) if isinstance(inside, Mapping) and isinstance(value, Mapping) else value
    return made
