"""Every word a deployment file may say (pydantic; unknown keys are refused with the nearest name)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from rayneuron import group_config
from rayneuron.aliases import DTYPE_ALIASES, translated
from rayneuron.config_features import Lora, OnDeviceSampling, SpeculativeConfig, conflicts
from rayneuron.dialect_config import Lmi, Replies
from rayneuron.group_config import GroupLimits, Pools, SeatSection
from rayneuron.serve_config import Autoscaling
from rayneuron.types import SamplingParams
from rayneuron.validation import Locate, Section, nearest, no_key_itself, validate

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
# A model of a hub; a directory of that name goes before it.
HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^\s@]+))?")
_BLOCKS = {"cpu": 64}  # tokens of a KV block by device, where prefixes are cached by default; elsewhere a block is a sequence, or 32


def _known_parameters(value: dict[str, Any]) -> dict[str, Any]:
    for key in value:
        if key not in SamplingParams.__struct_fields__:
            raise ValueError(f"sampling_defaults.{key} is no sampling parameter{nearest(str(key), SamplingParams.__struct_fields__)}")
    return value


Defaults = Annotated[dict[str, Any], AfterValidator(_known_parameters)]


class Model(Section):
    """Which checkpoint, under which name."""

    path: str = Field(
        min_length=1, description="A model directory, org/name[@revision] of a hub, s3://bucket/prefix, or demo:NAME (demo:smollm2)."
    )
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a hub's model: path org/name@revision.")
    name: str | None = Field(None, min_length=1, description="The name clients use; default: the last part of the path.")
    aliases: list[str] = Field([], description="More names it answers to.")
    any_name: bool = Field(False, description="Answer whatever model a client names.")
    tokenizer: str | None = Field(None, min_length=1, description="Another directory or hub id to take the tokenizer from.")
    chat_template: str | None = Field(None, description="A Jinja template, or the path of one.")
    skip_tokenizer_init: bool = Field(False, description="No tokenizer is read: prompts and replies are token ids.")
    allow_pickle: bool = Field(False, description="Read .bin files (weights_only). Prefer safetensors.")
    config: dict[str, Any] | None = Field(None, description="config.json inline, so that `rayneuron plan` works without the checkpoint.")

    @model_validator(mode="after")
    def _words(self) -> Model:
        if self.skip_tokenizer_init and (self.tokenizer or self.chat_template):
            raise ValueError("skip_tokenizer_init goes without tokenizer and chat_template; leave them out")
        hub = HUB_ID.fullmatch(self.path)
        if self.revision is not None and (hub is None or hub["revision"]):
            raise ValueError("revision goes with a hub's org/name as path, without another revision in it; leave one of them out")
        if not all(name.strip() for name in (self.path, *self.served_names)):
            raise ValueError("model.path, model.name and model.aliases must not be empty or blank; write the name clients shall use")
        return self

    @property
    def served_name(self) -> str:
        """The name clients use."""
        hub = HUB_ID.fullmatch(self.path)
        return self.name or (hub["id"] if hub else self.path).rstrip("/").replace(":", "/").rsplit("/", 1)[-1]

    @property
    def served_names(self) -> tuple[str, ...]:
        """That name and the aliases; where none is given, a hub's model answers to its whole id too."""
        hub = HUB_ID.fullmatch(self.path) if self.name is None else None
        return tuple(dict.fromkeys((self.served_name, *self.aliases, *([hub["id"]] if hub else ()))))

    @property
    def source(self) -> str:
        """Where the model is taken from, in one word: `path`, with the revision."""
        return f"{self.path}@{self.revision}" if self.revision is not None else self.path


class Buckets(Section):
    """The static shapes. Each list: None for powers of two up to its maximum, which is always in it, finer beyond 4,096 positions."""

    context_encoding: list[int] | None = Field(None, description="New tokens of a prefill step (T).")
    token_generation: list[int] | None = Field(None, description="Attended positions (L), also called sequence buckets.")
    prefix: list[int] | Literal["auto"] | None = Field(
        None, description="Tokens before a prefill's: graphs are context_encoding x these, as NxD's; auto: powers of two from 512."
    )
    batch: list[int] | None = Field(None, description="Rows of a decode step (B).")
    smallest: int | None = Field(
        None, ge=1, description="First of the generated length buckets; default: 128, and by twos; on Neuron 2048, and by fours."
    )
    scores: bool | None = Field(None, description="Graphs for prompt_logprobs; default: not on Neuron, where each is minutes of compiling.")
    embeddings: bool | None = Field(None, description="Graphs for embeddings and scores of texts; default: not on Neuron.")

    @field_validator("context_encoding", "token_generation", "batch", "prefix")
    @classmethod
    def _positive(cls, value: list[int] | str | None) -> list[int] | str | None:
        if value is None or isinstance(value, str):
            return value
        if not value or min(value) < 1:
            raise ValueError(f"a bucket list needs at least one positive number, got {value}; leave it out for powers of two")
        return sorted(set(value))


class Limits(Section):
    """What one application admits. Hot: may change through user_config."""

    max_waiting: int = Field(256, ge=0, description="Sequences (choices) that may wait for a slot, half of them of one call; more: 429.")
    max_waiting_tokens: int | None = Field(None, ge=1, description="Prompt tokens that may wait for their first output.")
    client_priority: bool = Field(False, description="Let clients set `priority`, which takes slots from others; else that is a 400.")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="The longest body of a request; beyond, 413.")
    body_timeout_s: float = Field(60.0, gt=0, description="For a request's body to arrive; beyond, 408.")
    request_timeout_s: float | None = Field(None, gt=0, description="Default deadline of a request; None: no limit.")
    retry_after_s: float = Field(1.0, gt=0, description="Retry-After of a 429 or 503.")


class Serving(Replies):
    """How Ray Serve runs it."""

    num_replicas: int | None = Field(None, ge=1, description="Default: 1.")
    autoscaling: Autoscaling | None = Field(None, description="Ray Serve's autoscaling_config, instead of num_replicas.")
    num_cpus: float | None = Field(None, gt=0, description="CPUs a replica reserves in Ray; default 1.")
    drain_timeout_s: float = Field(600.0, gt=0, description="How long a stopping replica may finish its streams.")
    wait_for_nodes: bool = Field(False, description="Wait for nodes an autoscaler adds; else a group the cluster cannot hold is refused.")
    stall_timeout_s: float = Field(120.0, gt=0, description="No step finished for so long while work is pending: the replica is unhealthy.")
    stream_events_per_s: float | None = Field(
        None, gt=0, description="Most stream events a replica writes; beyond, tokens travel together. Default: 250, behind HAProxy 500."
    )
    api_keys: list[str] | None = Field(
        None,
        min_length=1,
        description="Where the keys are of which clients send one as `Authorization: Bearer <key>`: env:NAME, file:PATH (one a line) or "
        "sha256:HEX. Default: none is asked for.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list, description='Origins whose pages may call this model (CORS): ["https://a.example"], or ["*"]; default: none.'
    )
    log_prompts: bool = Field(False, description="Write prompts into the replica's log, after each call.")
    trust_request_chat_template: bool = Field(False, description="Let clients send a chat_template: a program, which may hold a core.")
    trace: bool = Field(False, description="OpenTelemetry spans, one a request (needs opentelemetry-sdk).")
    page: bool = Field(True, description="Serve the chat page at /.")
    reset_prefix_cache: bool = Field(False, description="Let clients empty the prefix caches: POST /reset_prefix_cache.")
    weights_directory: str | None = Field(None, description="Let clients load other weights from folders under it: POST /admin/weights.")
    seat: SeatSection | None = Field(None, description="Written by a gateway's host: on which node, on which cores.")

    @property
    def most_replicas(self) -> int:
        """The most replicas it may ever have."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.num_replicas or 1

    _no_key_itself = field_validator("api_keys")(no_key_itself)

    @model_validator(mode="after")
    def _one_count(self) -> Serving:
        if self.autoscaling is not None and self.num_replicas is not None:
            raise ValueError("serving.num_replicas does not go with serving.autoscaling; leave one of them out")
        return self


class Compile(Section):
    """Graphs compiled ahead: where they are kept, what the compiler is told."""

    cache: str | None = Field(None, description="Folder or s3://bucket/prefix; else NEURON_COMPILE_CACHE_URL, else ~/.cache/rayneuron.")
    required: bool = Field(False, description="Compile nothing at start: what is not in the cache is an error that names the difference.")
    artifact: str | None = Field(None, description="A folder written by `rayneuron compile --out`, instead of the cache.")
    optimization: int | None = Field(None, ge=1, le=3, description="neuronx-cc -O of every graph; default: 1 for prefill, 2 otherwise.")
    tiling: int = Field(2, ge=1, description="Parts a prefill's collectives are cut into, to overlap with compute.")
    mixed_accumulation: bool | None = Field(None, description="Mixed-precision accumulation; default: the compiler's, off from 32k.")
    flags: str = Field("", description="More neuronx-cc flags, appended as they are.")
    workers: int | None = Field(None, ge=1, description="Compilers at once; default: one for 24 GiB of memory and 4 processors.")
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="Sums over ranks: in float32, or in the compute dtype.")
    async_mode: bool = Field(False, description="A step begins while the one before runs. Not with pipeline_parallel.")


class Deployment(Section):
    """The `args` of one Serve application: one model."""

    model: Model
    device: str = Field("cpu", description="cpu or neuron.")
    instance: str | None = Field(None, description="Declare an instance type (inf2.48xlarge, ...) instead of detecting one.")
    nodes: int = Field(1, ge=1, description="Nodes one replica spans: stages go to nodes first, then a stage's ranks.")
    dtype: Dtype = Field("auto", description="What weights are computed in. auto: the checkpoint's own, bf16 for fp16.")
    quantization: str | None = Field(None, description="int8, f8e4m3 or f8e5m2 weights; a quantised checkpoint says so itself.")
    kv_dtype: str | None = Field(None, description="KV cache in another dtype: f8e4m3, f8e5m2; default: the compute dtype.")
    tensor_parallel: int = Field(1, ge=1, description="Ranks (cores) that share every layer.")
    pipeline_parallel: int = Field(1, ge=1, description="Stages the layers are divided into, tensor_parallel ranks each.")
    sequence_parallel: bool = Field(False, description="Split norms and residual of a prefill over the TP ranks; same tokens, less memory.")
    micro_batches: int | None = Field(None, ge=1, description="Parts of a step that keep pipeline stages busy; default: as many as pay.")
    max_model_len: int | None = Field(None, ge=2, description="Prompt plus output tokens; default: the model's, at most 4096.")
    max_num_seqs: int = Field(16, ge=1, description="Sequences that run at once.")
    prefill_chunk_tokens: int = Field(512, ge=1, description="Most new tokens of one prefill step, over all its rows.")
    prefill_chunk_ms: float | None = Field(None, ge=0, description="Most ms of such a step while others decode; 0: any; default: 4 steps.")
    kv_cache_tokens: int | None = Field(None, ge=1, description="KV budget in tokens; default: all rows full. Less means preemption.")
    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads of one rank; default: this rank's share of the cores.")
    block_size: int | None = Field(None, ge=1, description="Tokens of a KV block: a power of two from 16, or max_model_len; CPU: 64.")
    enable_prefix_caching: bool | None = Field(None, description="Compute equal beginnings of prompts once; default: on the CPU.")
    kv_events: bool = Field(True, description="Tell gateways which prefixes are kept here, so that they send their like to one replica.")
    fused_qkv: bool = Field(True, description="Multiply by q, k and v, and by gate and up, as one matrix each.")
    group_query_attention: str | None = Field(None, description="How KV heads meet the ranks: shard-over-heads, replicated-heads, ...")
    shard_over_sequence: bool = Field(False, description="Flash decoding: ranks that share KV heads hold different positions.")
    capacity_factor: float | None = Field(None, gt=0, description="Experts take at most this share of tokens; default: no token dropped.")
    seed: int | None = Field(None, description="Seed of requests that bring none; default: from the system.")
    buckets: Buckets = Buckets.model_construct()
    compile: Compile = Compile.model_construct()
    on_device_sampling: OnDeviceSampling = OnDeviceSampling.model_construct()
    speculative_config: SpeculativeConfig | None = Field(None, description="Tokens tried before they are known. Default: ngram on the CPU.")
    lora: Lora | None = Field(None, description="LoRA adapters. Default: none.")
    sampling_defaults: Defaults = Field(default_factory=dict, description="Override the model's generation_config. Hot.")
    limits: Limits = Limits.model_construct()
    group: GroupLimits = GroupLimits.model_construct()
    pools: Pools | None = None
    serving: Serving = Serving.model_construct()
    lmi: Lmi = Lmi.model_construct()

    def kv_block(self, length: int) -> int:
        """Tokens of a KV block, of sequences of at most `length`."""
        return min(self.block_size or _BLOCKS.get(self.device, 32 if self.enable_prefix_caching else length), length)

    def caches_prefixes(self, length: int) -> bool:
        """Whether the KV of equal prefixes is computed once, with sequences of at most `length`."""
        by_default = self.device in _BLOCKS and self.capacity_factor is None
        return (by_default if self.enable_prefix_caching is None else self.enable_prefix_caching) and self.kv_block(length) < length

    @property
    def few_graphs(self) -> bool:
        """Whether a graph of the device costs so much that few are listed where nobody names them."""
        return self.device not in _BLOCKS

    def model_options(self) -> dict[str, Any]:
        """What `models.check` is told besides degree and length."""
        names = ("dtype", "quantization", "kv_dtype", "group_query_attention", "shard_over_sequence", "capacity_factor")
        return {name: getattr(self, name) for name in names}

    @field_validator("dtype", mode="before")
    @classmethod
    def _alias(cls, value: object) -> object:
        return DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("speculative_config", "lora", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return None if value is False or (isinstance(value, dict) and value.get("enabled") is False) else value

    @field_validator("block_size")
    @classmethod
    def _power(cls, value: int | None, info: ValidationInfo) -> int | None:
        longest = info.data.get("max_model_len")
        if value is None or (value >= 16 and value & (value - 1) == 0) or (longest is not None and value >= longest):
            return value
        raise ValueError(f"write {max(16, 2 ** round(math.log2(value)))}, the nearest power of two, or max_model_len, got {value}")

    @model_validator(mode="after")
    def _consistent(self) -> Deployment:
        most = max(self.buckets.token_generation or [0])
        if self.max_model_len is not None and most > self.max_model_len:
            raise ValueError(f"buckets.token_generation goes to {most}, beyond max_model_len {self.max_model_len}")
        if self.enable_prefix_caching and self.capacity_factor is not None:
            raise ValueError("enable_prefix_caching goes without capacity_factor, by which KV depends on what shares a step; leave one out")
        if self.enable_prefix_caching and self.block_size and self.max_model_len and self.block_size >= self.max_model_len:
            raise ValueError("enable_prefix_caching needs blocks smaller than a sequence; leave block_size out, or write 64")
        for wrong in conflicts(self):
            raise ValueError(wrong)
        return self


class HotSettings(Section):
    """What `user_config` may change without a restart."""

    sampling_defaults: Defaults | None = None
    limits: Limits | None = None


def parse(args: Mapping[str, Any] | Deployment, place: Locate = lambda path, text: "") -> Deployment:
    """Check the `args` of a deployment file. Raises ConfigError naming every wrong key by its path and the nearest right name."""
    if isinstance(args, Deployment):
        return args
    made = validate(Deployment, *translated(args, place))
    if made.pools is not None:
        group_config.prefill_of(made, place)
    return made


def parse_hot(user_config: Mapping[str, Any] | None, place: Locate = lambda path, text: "") -> HotSettings:
    """Check a `user_config`. Raises ConfigError."""
    return validate(HotSettings, {} if user_config is None else user_config, place)
