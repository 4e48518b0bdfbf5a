"""Every metric and trace-point name, once: kinds, labels and buckets as data.

`vllm:*` names carry vLLM's meaning, so that its dashboards, the inference gateway and Ray's LLM dashboard work unedited; `rayneuron:*` is
our ledger. Names have a colon here; `ray.util.metrics` takes the same with an underscore (`ray_name`). Counters get `_total` when exposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

LABELS = ("model_name", "engine")  # on every metric, as vLLM labels them

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
ENDS = (("stop",), ("length",), ("abort",), ("error",))


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One time series family; itself alone is equal to it, since what is counted is looked up by it all the time.

    `per_token`: observed every token or step, so on /metrics only (an observation costs Ray microseconds).
    `known`: label values that stand at 0 from the start, so that a rate over the first occurrence is not lost.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    per_token: bool = False
    known: tuple[tuple[str, ...], ...] = ()

    @property
    def ray_name(self) -> str:
        """The name `ray.util.metrics` accepts."""
        return self.name.replace(":", "_")


RUNNING = Metric("vllm:num_requests_running", "gauge", "Sequences that hold a KV slot.")
WAITING = Metric("vllm:num_requests_waiting", "gauge", "Sequences that wait for a KV slot.")
WAITING_BY_REASON = Metric(
    "vllm:num_requests_waiting_by_reason", "gauge", "Waiting sequences by what for: room, or what passes by itself.", ("reason",),
    known=(("capacity",), ("deferred",)),
)  # fmt: skip
KV_USAGE = Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the KV token budget in use, 0 to 1.")
PROMPT_TOKENS = Metric("vllm:prompt_tokens", "counter", "Prompt tokens of requests whose prefill finished.")
PROMPT_TOKENS_CACHED = Metric("vllm:prompt_tokens_cached", "counter", "Prompt tokens taken from the prefix cache.")
PROMPT_TOKENS_BY_SOURCE = Metric(
    "vllm:prompt_tokens_by_source", "counter", "Prompt tokens by where their KV came from.", ("source",),
    known=(("local_compute",), ("local_cache_hit",), ("external_kv_transfer",)),
)  # fmt: skip
PREFIX_QUERIES = Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache.")
PREFIX_HITS = Metric("vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.")
GENERATION_TOKENS = Metric("vllm:generation_tokens", "counter", "Generated tokens.")
SPEC_DRAFTS = Metric("vllm:spec_decode_num_drafts", "counter", "Times a sequence verified drafts.")
SPEC_DRAFT_TOKENS = Metric("vllm:spec_decode_num_draft_tokens", "counter", "Draft tokens verified.")
SPEC_ACCEPTED = Metric("vllm:spec_decode_num_accepted_tokens", "counter", "Draft tokens that came true.")
SPEC_ACCEPTED_BY_PLACE = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos", "counter", "Draft tokens that came true, by their place among a sequence's.",
    ("position",), known=(("0",),),
)  # fmt: skip
SPEC_PAUSED = Metric(
    "rayneuron:spec_decode_paused", "counter", "Decode steps that tried no draft: none found; what one takes without is not known yet;"
    " what is there does not pay; a draft model is behind with reading; no KV is free.",
    ("why",), known=(("none",), ("rest",), ("cost",), ("behind",), ("room",)),
)  # fmt: skip
_FORMS = ("hermes", "llama3_json", "mistral", "pythonic")  # in which models call tools (`api/forms.py`)
TOOL_CALLS = Metric(
    "rayneuron:tool_calls", "counter", "Calls of tools that models have begun, by their form; complete: up to the end of their arguments.",
    ("parser", "complete"), known=tuple((form, whole) for form in _FORMS for whole in ("true", "false")),
)  # fmt: skip
GRAMMAR_COMPILE = Metric("rayneuron:grammar_compile_seconds", "counter", "Time in which constraints were compiled, beside steps.")
GRAMMAR_MASK = Metric("rayneuron:grammar_mask_seconds", "counter", "Time in which masks of what may come next were made, beside steps.")
GRAMMAR_ERRORS = Metric(
    "rayneuron:grammar_errors", "counter", "Constraints that could not be compiled, and outputs that could not go on with theirs.",
    ("why",), known=(("refused",), ("ended",)),
)  # fmt: skip
PREEMPTIONS = Metric("vllm:num_preemptions", "counter", "Sequences that lost their slot and will be recomputed.")
SUCCESS = Metric("vllm:request_success", "counter", "Finished sequences by reason.", ("finished_reason",), known=ENDS)
REJECTIONS = Metric("vllm:admission_rejections", "counter", "Requests refused before the engine.", ("reason",), known=(("capacity",),))
TTFT = Metric("vllm:time_to_first_token_seconds", "histogram", "Arrival to first token.", buckets=TTFT_S)
INTER_TOKEN = Metric("vllm:inter_token_latency_seconds", "histogram", "Between tokens of one choice.", buckets=TOKEN_S, per_token=True)
TIME_PER_TOKEN = Metric(
    "vllm:request_time_per_output_token_seconds", "histogram", "Decode seconds a token, mean of one request.", buckets=TOKEN_S
)
E2E = Metric("vllm:e2e_request_latency_seconds", "histogram", "Arrival to last token.", buckets=LATENCY_S)
QUEUE_TIME = Metric("vllm:request_queue_time_seconds", "histogram", "Arrival to first scheduling.", buckets=LATENCY_S)
PREFILL_TIME = Metric("vllm:request_prefill_time_seconds", "histogram", "First scheduling to first token.", buckets=LATENCY_S)
DECODE_TIME = Metric("vllm:request_decode_time_seconds", "histogram", "First token to last token.", buckets=LATENCY_S)
INFERENCE_TIME = Metric("vllm:request_inference_time_seconds", "histogram", "First scheduling to last token.", buckets=LATENCY_S)
REQUEST_PROMPT_TOKENS = Metric("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request.", buckets=TOKENS)
REQUEST_GENERATION_TOKENS = Metric("vllm:request_generation_tokens", "histogram", "Generated tokens of a choice.", buckets=TOKENS)
REQUEST_LONGEST = Metric("vllm:request_max_num_generation_tokens", "histogram", "Tokens of a request's longest choice.", buckets=TOKENS)
REQUEST_COMPUTED = Metric(
    "vllm:request_prefill_kv_computed_tokens", "histogram", "Prompt tokens of a request that were not in a cache.", buckets=TOKENS
)
REQUEST_MAX_TOKENS = Metric("vllm:request_params_max_tokens", "histogram", "max_tokens asked for.", buckets=TOKENS)
REQUEST_N = Metric("vllm:request_params_n", "histogram", "Choices asked for.", buckets=CHOICES)
CACHE_CONFIG = Metric(
    "vllm:cache_config_info", "gauge", "The KV cache: blocks, and tokens in a block.",
    ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype"),
)  # fmt: skip
LORA_REQUESTS = Metric(
    "vllm:lora_requests_info", "gauge", "Adapters of running and waiting requests; the value is the time.",
    ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
)  # fmt: skip
LORA_SLOTS = Metric(
    "rayneuron:lora_slots", "gauge", "Slots for adapters: free, idle (of an adapter that nobody runs with), or in use.", ("state",),
    known=(("free",), ("idle",), ("used",)),
)  # fmt: skip
HTTP_REQUESTS = Metric(
    "http_requests", "counter", "Replies by class of status, as vLLM's overview reads them.", ("method", "status", "handler"),
    known=(("POST", "2xx", "/v1/chat/completions"), ("POST", "2xx", "/v1/completions")),
)  # fmt: skip
ITERATION = Metric(
    "vllm:iteration_tokens_total",
    "histogram",
    "Tokens a step generated, and of prompts it ended.",
    buckets=ITERATION_TOKENS,
    per_token=True,
)

SLOTS_FREE = Metric("rayneuron:slots_free", "gauge", "KV slots nobody holds.")
SLOTS_TOTAL = Metric("rayneuron:slots_total", "gauge", "KV slots.")
KV_TOKENS_USED = Metric("rayneuron:kv_tokens_used", "gauge", "KV tokens reserved by running sequences.")
KV_TOKENS_TOTAL = Metric("rayneuron:kv_tokens_total", "gauge", "KV token budget.")
KV_BLOCKS = Metric(
    "rayneuron:kv_blocks", "gauge", "KV blocks: free, cached (nobody's, kept for equal prefixes), held, or waiting for the step under way.",
    ("state",), known=(("free",), ("cached",), ("held",), ("limbo",)),
)  # fmt: skip
KV_LEDGER_WRONG = Metric("rayneuron:kv_ledger_wrong", "counter", "Times the ledger of the KV did not balance: always 0.")
PREFIX_EVICTIONS = Metric("rayneuron:prefix_evictions", "counter", "Cached blocks that made room.")
KV_PINNED = Metric("rayneuron:kv_pinned_blocks", "gauge", "KV blocks kept for decode replicas that read them.")
TICKETS = Metric(
    "rayneuron:tickets", "gauge", "Prompts that a prefill replica computes or keeps for others.", ("state",),
    known=(("queued",), ("running",), ("offered",)),
)  # fmt: skip
TICKETS_ENDED = Metric(
    "rayneuron:tickets_ended", "counter", "Such prompts by how they ended, and those that were declined.", ("how",),
    known=(("committed",), ("aborted",), ("expired",), ("declined",)),
)  # fmt: skip
PREFILLS = Metric(
    "rayneuron:prefills", "counter", "Prompts by where they were to be computed, and why there.", ("where", "why"),
    known=(
        *(("local", why) for why in ("nobody", "short", "faster", "cached", "room")), *(("remote", why) for why in ("long", "faster")),
    ),
)  # fmt: skip
FALLBACKS = Metric(
    "rayneuron:fallbacks", "counter", "Prompts that were to be computed elsewhere and were computed here, by how far they had come.",
    ("stage",), known=(("asked",), ("pulling",), ("streamed",), ("committing",)),
)  # fmt: skip
EXTERNAL_QUERIES = Metric("vllm:external_prefix_cache_queries", "counter", "Tokens of prompts that prefill replicas were asked for.")
EXTERNAL_HITS = Metric("vllm:external_prefix_cache_hits", "counter", "Those of them whose KV came.")
KV_TRANSFER_TIME = Metric(
    "rayneuron:kv_transfer_seconds", "histogram", "From a first token that came from elsewhere to all of its KV.", buckets=STEP_S
)
KV_TRANSFER_BYTES = Metric("rayneuron:kv_transfer_bytes", "counter", "KV read from prefill replicas.")
KV_TRANSFER_RETRIES = Metric(
    "rayneuron:kv_transfer_retries", "counter", "Transfers that had a wrong checksum, lost the other side or found no ticket, and prompts"
    " that went to another replica.", ("why",), known=(("damaged",), ("lost",), ("stale",), ("other",)),
)  # fmt: skip
WAITING_TOKENS = Metric("rayneuron:waiting_tokens", "gauge", "Prompt tokens of waiting sequences.")
OPEN_CALLS = Metric("rayneuron:open_calls", "gauge", "API calls that have not been answered to the end.")
OPEN_SEQUENCES = Metric("rayneuron:open_sequences", "gauge", "Choices of open calls that have not finished.")
STEPS = Metric("rayneuron:steps", "counter", "Engine steps run.")
STEP_TIME = Metric("rayneuron:step_seconds", "histogram", "One engine step: plan, run and commit.", buckets=STEP_S, per_token=True)
DISCONNECTS = Metric("rayneuron:client_disconnects", "counter", "Calls whose client left before the reply was complete.")
HTTP_REPLIES = Metric(
    "rayneuron:http_replies", "counter", "Replies by route and status.", ("route", "status"), known=(("/metrics", "200"),)
)
USER_CONFIG_REFUSED = Metric(
    "rayneuron:user_config_refused", "gauge", "1 while the last user_config was wrong and the one before it holds."
)
STARTUP = Metric("rayneuron:startup_seconds", "gauge", "Seconds of each part of the start.", ("part",))

METRICS: tuple[Metric, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))

# The seven stamps of a request (types.Stamps), as event names of its OpenTelemetry span.
TRACE_POINTS = ("arrived", "scheduled", "prefill_done", "handed_over", "adopted", "first_token", "finished")


@dataclass(frozen=True, slots=True)
class Gateway:
    """What a gateway says of each model, beside the replicas' own families."""

    requests: Metric = Metric(
        "rayneuron:gateway_requests", "gauge", "Requests in the gateway: at the desk, or at a replica.", ("state",),
        known=(("waiting",), ("placed",)),
    )  # fmt: skip
    replicas: Metric = Metric("rayneuron:gateway_replicas", "gauge", "Replicas it is connected with.")
    refusals: Metric = Metric("rayneuron:gateway_refusals", "counter", "Calls turned away.", ("reason",), known=(("capacity",),))
    ttft: Metric = Metric("rayneuron:gateway_ttft_seconds", "histogram", "Arrival to first token.", buckets=TTFT_S)
    prediction_error: Metric = Metric(
        "rayneuron:gateway_prediction_error", "histogram", "|predicted - actual| time from order to first token, as a share of the actual.",
        buckets=SHARES,
    )  # fmt: skip
    replays: Metric = Metric("rayneuron:gateway_replays", "counter", "Choices whose replica was lost.", ("cause", "outcome"))
    replayed: Metric = Metric("rayneuron:gateway_replayed_tokens", "counter", "Output tokens that went along to another replica.")
    tool_calls: Metric = Metric("rayneuron:gateway_tool_calls", "counter", TOOL_CALLS.help, TOOL_CALLS.labels)
    undone: Metric = Metric("rayneuron:gateway_undone", "counter", "Orders that came back from a replica undone; sent again.")
    frames: Metric = Metric("rayneuron:gateway_link_frames", "counter", "Frames heard from replicas.")


@dataclass(frozen=True, slots=True)
class HostMetrics:
    """What a gateway says of its host, as the arbiter knows it; the same whichever gateway is asked. `refusals` are the gateway's own."""

    models: Metric = Metric("rayneuron:host_models", "gauge", "1 for how it stands with a model.", ("state",))
    seats: Metric = Metric(
        "rayneuron:host_seats", "gauge", "Seats of a model, by state.", ("state",),
        known=tuple((state,) for state in ("reserved", "starting", "ready", "moving", "draining", "stopping")),
    )  # fmt: skip
    cores: Metric = Metric(
        "rayneuron:host_cores", "gauge", "Cores of a node by its ledger: free, held by a seat, or by a process that is nobody's here.",
        ("node", "state"),
    )  # fmt: skip
    eta: Metric = Metric("rayneuron:host_eta_seconds", "gauge", "When a model that is not awake is expected; none where nobody can say.")
    eta_error: Metric = Metric(
        "rayneuron:host_eta_error", "gauge", "|expected - actual| time of a model's last start, as a share of the actual."
    )
    wakes: Metric = Metric(
        "rayneuron:host_wakes", "counter", "Starts, by how they ended.", ("outcome",), known=(("started",), ("failed",))
    )
    dismissals: Metric = Metric(
        "rayneuron:host_dismissals", "counter", "Seats put to sleep, and why.", ("why",),
        known=(("idle",), ("fewer",), ("moved",), ("room",)),
    )  # fmt: skip
    held: Metric = Metric("rayneuron:host_calls_held", "gauge", "Calls that wait for a model to wake.")
    resident: Metric = Metric("rayneuron:host_weights_resident", "gauge", "Share of a model's weights that is in memory, 0 to 1.")
    refusals: Metric = Metric(
        "rayneuron:host_refusals", "counter", "Calls turned away from a model that was not awake.", ("reason",),
        known=(("failed",), ("late",), ("full",)),
    )  # fmt: skip
