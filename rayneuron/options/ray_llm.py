"""ray.serve.llm's YAML: llm_configs of `ray.serve.llm:build_openai_app`, told as applications of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rayneuron import aliases
from rayneuron.errors import ConfigError
from rayneuron.options.shared import ADAPTERS, OFF
from rayneuron.options.words import Args, Said, Table, Translation, Word, tell

BUILDERS: Final = ("ray.serve.llm:build_openai_app", "ray.serve.llm.builders:build_openai_app")


def _loading(value: Any, args: Args) -> Said:
    """model_loading_config."""
    known = {"model_id": "model.name", "model_source": "model.path", "tokenizer_source": "model.tokenizer"}
    wrong = [name for name in value if name not in known]
    if wrong or not isinstance(value.get("model_id"), str):
        raise ValueError(f"holds model_id, model_source and tokenizer_source, got {', '.join(value)}")
    said = Said({known[name]: given for name, given in value.items() if given is not None})
    if not isinstance(said.setdefault("model.path", said["model.name"]), str):
        raise ValueError("model_source must be a path or a hub's id; a bucket is s3://bucket/prefix here")
    return said


def _engine(value: Any, args: Args) -> Said:
    """engine_kwargs: vLLM's names."""
    said = Said()
    for name, given in value.items():
        try:
            said |= aliases.meaning(name, given) if name in aliases.NAMES else {name: given}
        except ConfigError as wrong:
            raise ValueError(f"cannot be taken over: {wrong.message}") from None
    return said


def _deployment(value: Any, args: Args) -> Said:
    """deployment_config: how Serve runs it."""
    told = Translation()
    tell(told, DEPLOYMENT, value, lambda name: f"deployment_config.{name}", "deployment_config")
    return Said(told.assigned)


DEPLOYMENT: Final[Table] = {
    "num_replicas": Word("serving.num_replicas", there="1"),
    "autoscaling_config": Word("serving.autoscaling"),
    "max_ongoing_requests": Word(note="admission is by sequences: max_num_seqs and limits.max_waiting"),
    "max_queued_requests": Word("limits.max_waiting"),
    "graceful_shutdown_timeout_s": Word("serving.drain_timeout_s", lambda v, a: float(v)),
    "ray_actor_options": Word(note="serving.num_cpus; cores come with tensor_parallel"),
    "health_check_period_s": Word(note="it is fixed"),
    "health_check_timeout_s": Word(note="it is fixed"),
    "user_config": Word(refused="write user_config beside args"),
}
LLM_CONFIG: Final[Table] = {
    "model_loading_config": Word("model.path", _loading),
    "engine_kwargs": Word("model", _engine),
    "deployment_config": Word("serving", _deployment),
    "accelerator_type": Word(note="cores of the device are taken by tensor_parallel and pipeline_parallel; instance declares a machine"),
    "resources_per_bundle": Word(note="cores come with tensor_parallel and pipeline_parallel"),
    "placement_group_config": Word(note="ranks are placed by nodes, tensor_parallel and pipeline_parallel"),
    "llm_engine": Word(refused="models run in this server's own engine; leave it out", same=("vLLM",)),
    "lora_config": Word(refused=ADAPTERS, same=OFF),
    "log_engine_metrics": Word(note="metrics are always there, at /metrics"),
    "experimental_configs": Word(refused="leave it out", same=(None, {})),
    "runtime_env": Word(refused="write runtime_env beside args, in the application", same=(None, {})),
}


def told(content: Mapping[str, Any], where: str) -> list[tuple[str, str, Translation]]:
    """Each model of such a file: its application's name, its route, and what is said of it. Raises ConfigError."""
    found = []
    for index, entry in enumerate(content.get("applications") or ()):
        if not isinstance(entry, Mapping) or entry.get("import_path") not in BUILDERS:
            continue
        configs = (entry.get("args") or {}).get("llm_configs")
        if not isinstance(configs, list) or not configs:
            raise ConfigError(f"{where}: applications.{index}.args.llm_configs must be a list of configs")
        prefix = str(entry.get("route_prefix") or "/").rstrip("/")
        for place, config in enumerate(configs):
            at = f"{where}: applications.{index}.args.llm_configs.{place}"
            if not isinstance(config, Mapping):
                raise ConfigError(f"{at} must be a mapping; a config in a file of its own has to be written here")
            out = Translation()
            tell(out, LLM_CONFIG, config, lambda name, at=at: f"{at}.{name}", "LLMConfig")  # type: ignore[misc]
            if "model.path" not in out.assigned:
                raise ConfigError(f"{at}: model_loading_config is missing: {{model_id, model_source}}")
            name = str(out.assigned["model.name"])
            alone = len(configs) == 1
            found.append((str(entry.get("name") or name) if alone else name, prefix or "/" if alone else f"{prefix}/{name}", out))
    if not found:
        raise ConfigError(f"{where} has no application with import_path: {BUILDERS[0]}")
    return found
