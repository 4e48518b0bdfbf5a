"""Ray Serve's own words of a deployment file as data, so that checking one needs no Ray; a test compares them with Ray's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rayneuron.validation import Section

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Object = dict[str, Any]


class Policy(Section):
    """Who decides, instead of Serve's own count of requests."""

    policy_function: str = Field("ray.serve.autoscaling_policy:default_autoscaling_policy", description="Import path of the function.")
    policy_kwargs: Object = Field({}, description="Arguments it is made with.")


class Autoscaling(Section):
    """`autoscaling_config` of a deployment, our `serving.autoscaling`."""

    min_replicas: Count = Field(1, description="Never fewer; 0 lets an idle model go, and its next call wait for a start.")
    initial_replicas: Count | None = Field(None, description="At first; default: min_replicas.")
    max_replicas: int = Field(1, ge=1, description="Never more.")
    target_ongoing_requests: Positive | None = Field(2.0, description="Calls a replica is to have, running and waiting.")
    metrics_interval_s: Positive = Field(10.0, description="How often calls are counted (deprecated by Ray).")
    look_back_period_s: Positive = Field(30.0, description="The time the count is averaged over.")
    smoothing_factor: Positive = Field(1.0, description="Deprecated by Ray: upscaling_factor and downscaling_factor.")
    upscale_smoothing_factor: Positive | None = Field(None, description="Deprecated by Ray: upscaling_factor.")
    downscale_smoothing_factor: Positive | None = Field(None, description="Deprecated by Ray: downscaling_factor.")
    upscaling_factor: Positive | None = Field(None, description="By which a wish for more replicas is multiplied.")
    downscaling_factor: Positive | None = Field(None, description="By which a wish for fewer is.")
    downscale_delay_s: Seconds = Field(600.0, description="How long fewer must be wished for.")
    downscale_to_zero_delay_s: Seconds | None = Field(None, description="As that, from 1 to 0; default: downscale_delay_s.")
    upscale_delay_s: Seconds = Field(30.0, description="How long more must be wished for.")
    aggregation_function: Literal["mean", "max", "min"] = Field("mean", description="How the counts of that time become one.")
    policy: Policy = Policy.model_construct()

    @model_validator(mode="after")
    def _ordered(self) -> Autoscaling:
        first = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas}, initial_replicas {first} and max_replicas {self.max_replicas} must not descend"
            )
        return self


class HttpOptions(Section):
    """`http_options`."""

    host: str = "0.0.0.0"
    port: Port = 8000
    root_path: str = ""
    request_timeout_s: Positive | None = None
    keep_alive_timeout_s: Count = 90
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None

    @field_validator("root_path")
    @classmethod
    def _prefix(cls, path: str) -> str:
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ValueError(f"must begin with / and not end with it, got {path!r}")
        return path


class ActorOptions(Section):
    """`ray_actor_options`: what a replica reserves."""

    runtime_env: Object = {}
    num_cpus: Seconds | None = None
    num_gpus: Seconds | None = None
    memory: Seconds | None = None
    resources: Object = {}
    accelerator_type: str | None = None
    label_selector: Object | None = None
    fallback_strategy: list[Object] | None = None


class Overrides(Section):
    """One of `deployments` of an application: what overrides the deployment's own settings."""

    name: str
    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    max_ongoing_requests: int = Field(5, ge=1)
    max_queued_requests: Literal[-1] | Annotated[int, Field(ge=1)] = -1
    backpressure_config: Object = {}
    user_config: Object | None = None
    autoscaling_config: Autoscaling | None = None
    graceful_shutdown_wait_loop_s: Seconds = 2.0
    graceful_shutdown_timeout_s: Seconds = 20.0
    health_check_period_s: Positive = 10.0
    health_check_timeout_s: Positive = 30.0
    ray_actor_options: ActorOptions = ActorOptions.model_construct()
    placement_group_bundles: list[Object] = []
    placement_group_strategy: str = "PACK"
    placement_group_bundle_label_selector: list[Object] = []
    max_replicas_per_node: int = Field(100, ge=1, le=100)
    logging_config: Object = {}
    request_router_config: Object = {}
    gang_scheduling_config: Object | None = None
    deployment_actors: list[Object] | None = None
    rolling_update_percentage: float = Field(0.2, gt=0, le=1)
    max_surge_percent: int = Field(0, ge=0, le=100)

    @model_validator(mode="after")
    def _one_count(self) -> Overrides:
        if self.autoscaling_config is not None and isinstance(self.num_replicas, int):
            raise ValueError("num_replicas does not go with autoscaling_config; leave one of them out")
        return self


class Application(Section):
    """One of `applications`."""

    name: str = Field("default", min_length=1)
    route_prefix: str | None = "/"
    import_path: str = Field(min_length=1)
    runtime_env: Object = {}
    deployments: list[Overrides] = []
    autoscaling_policy: Object | None = None
    args: Object = {}
    logging_config: Object | None = None
    external_scaler_enabled: bool = False

    @field_validator("route_prefix")
    @classmethod
    def _routed(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or (value != "/" and value.endswith("/")) or "{" in value or "}" in value):
            raise ValueError(f"must begin with a slash, not end with one, and hold no braces; write {'/' + value.strip('/{} ')}")
        return value


class File(Section):
    """A whole file. An application's own `host` and `port` are left out: Ray refuses them in a file of several applications."""

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = "EveryNode"
    http_options: HttpOptions = HttpOptions.model_construct()
    grpc_options: Object = {}
    controller_options: Object | None = None
    logging_config: Object | None = None
    tracing_config: Object | None = None
    applications: list[Application] = Field(min_length=1)
    target_capacity: Annotated[float, Field(ge=0, le=100)] | None = None

    @field_validator("applications")
    @classmethod
    def _distinct(cls, value: list[Application]) -> list[Application]:
        for what, found in (("name", [a.name for a in value]), ("route_prefix", [a.route_prefix for a in value if a.route_prefix])):
            twice = next((one for one in found if found.count(one) > 1), None)
            if twice is not None:
                raise ValueError(f"two of them have the {what} {twice!r}; give each its own")
        return value
