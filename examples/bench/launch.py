"""How each server is started: ours and ray.serve.llm with `serve run`, vLLM's own with its module; each with its recommended settings."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from engine import CHECKOUT, VENVS, peers
from server import Server

STANDIN = CHECKOUT / "tests" / "devices" / "standin"


def rayneuron(
    args: dict[str, Any], profile: str = "plain", urgent: bool = False, neuron_cache: Path | None = None, checkout: Path = CHECKOUT
) -> Server:
    """`serve run` of `args` (config.Deployment's keys) with one profile.

    `neuron_cache`: with the tests' stand-in for the Neuron runtime, whose compiled graphs are kept there. `checkout`: whose code runs.
    """
    from rayneuron.serve.profile import profile_env

    folder = _folder()
    env = profile_env(profile) | (_private_haproxy(folder) if profile == "fast" else {}) | {"PYTHONPATH": str(checkout)}
    if neuron_cache is not None:
        env |= {"PYTHONPATH": os.pathsep.join([str(STANDIN), str(CHECKOUT)]), "NEURON_COMPILE_CACHE_URL": str(neuron_cache)}
        env |= {"STANDIN_CORES": str(folder / "cores"), "RAYNEURON_LEDGER": str(folder / "ledger"), "NEURON_RT_VISIBLE_CORES": "0-0"}
    return _serve_run(f"rayneuron {profile}", Path(sys.executable), "rayneuron.serve.app:build", args, env, folder, urgent)


def command_line(model: str, words: list[str], profile: str = "plain", urgent: bool = False, cache: Path | None = None) -> Server:
    """`rayneuron serve MODEL` with these words behind it. `cache`: instead of this user's, to start as on a fresh machine."""
    folder = _folder()
    (folder / "ray").mkdir()
    env = {"PYTHONPATH": str(CHECKOUT), "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}
    env |= {"RAYNEURON_CACHE": str(cache)} if cache is not None else {}
    env |= _private_haproxy(folder) if profile == "fast" else {}
    command = [sys.executable, "-m", "rayneuron", "serve", model, "--profile", profile, *words]
    return Server(f"rayneuron serve {model}", lambda port: [*command, "--port", str(port)], env, folder, urgent)


def bare(urgent: bool = False) -> Server:
    """Ray Serve with nothing in it."""
    folder = _folder()
    (folder / "ray").mkdir()
    script = str(CHECKOUT / "examples" / "bench" / "peers" / "bare_serve.py")
    env = {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return Server("bare Ray Serve", lambda port: [sys.executable, script, str(port)], env, folder, urgent)


def gateway(args: dict[str, Any], profile: str = "plain", urgent: bool = False) -> Server:
    """`rayneuron serve` of a model at /m/bench, and of a gateway before it at /."""
    from rayneuron.serve.profile import profile_env

    folder = _folder()
    (folder / "ray").mkdir()
    env = profile_env(profile) | (_private_haproxy(folder) if profile == "fast" else {}) | {"PYTHONPATH": str(CHECKOUT)}
    model = {"name": "bench", "route_prefix": "/m/bench", "import_path": "rayneuron.serve.app:build", "args": args}
    front = {"models": [{"application": "bench"}], "serving": {"num_cpus": 0.25, "reset_prefix_cache": True}}
    before = {"name": "gateway", "route_prefix": "/", "import_path": "rayneuron.gateway.app:build", "args": front}

    def command(port: int) -> list[str]:
        config = folder / "deployment.yaml"
        http = {"host": "127.0.0.1", "port": port}
        config.write_text(yaml.safe_dump({"http_options": http, "applications": [model, before]}))
        return [sys.executable, "-m", "rayneuron", "serve", str(config), "--profile", profile, "--grace", "10"]

    return Server(f"gateway {profile}", command, {**env, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}, folder, urgent)


def host(args: dict[str, Any], urgent: bool = False) -> tuple[Server, Path]:
    """`rayneuron serve` of a gateway with a host; and where the ledgers of its nodes are. What is kept between starts is this user's, but
    for how long starts have taken: nobody knows that yet."""
    from rayneuron import settings
    from rayneuron.serve.profile import profile_env

    folder = _folder()
    (folder / "ray").mkdir()
    (folder / "cache").mkdir()
    for kept in settings.cache_dir().iterdir():
        if kept.name != "starts.json":
            (folder / "cache" / kept.name).symlink_to(kept)
    env = profile_env("plain") | {"PYTHONPATH": str(CHECKOUT), "RAYNEURON_LEDGER": str(folder / "ledger"), "RAY_TMPDIR": str(folder)}
    env |= {"RAYNEURON_CACHE": str(folder / "cache"), "RAY_AUTH_MODE": "disabled"}
    front = {"name": "gateway", "route_prefix": "/", "import_path": "rayneuron.gateway.app:build", "args": args}

    def command(port: int) -> list[str]:
        config = folder / "deployment.yaml"
        config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [front]}))
        return [sys.executable, "-m", "rayneuron", "serve", str(config), "--grace", "5"]

    return Server("host", command, env, folder, urgent), folder / "ledger"


def ray_llm(model: Path, name: str, rows: int, length: int, threads: int, urgent: bool = False, venvs: Path = VENVS) -> Server:
    """`serve run` of ray.serve.llm's OpenAI application over vLLM's CPU build, in bf16, prefix caching off."""
    vllm = peers(threads)["vllm"]
    config = {
        "model_loading_config": {"model_id": name, "model_source": str(model)},
        "engine_kwargs": {"dtype": "bfloat16", "max_model_len": length, "max_num_seqs": rows, "enable_prefix_caching": False},
        "accelerator_type": None,
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "deployment_config": {"num_replicas": 1},
    }
    ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}  # the engine reserves both cores of a small machine
    arguments = {"llm_configs": [config], "ingress_deployment_config": ingress}
    env = {**vllm.env, "HF_HUB_OFFLINE": "1"}
    return _serve_run("ray.serve.llm", vllm.python(venvs), "ray.serve.llm:build_openai_app", arguments, env, _folder(), urgent)


def vllm(model: Path, name: str, rows: int, length: int, threads: int, urgent: bool = False, venvs: Path = VENVS) -> Server:
    """vLLM's own OpenAI server on its CPU build, in bf16, prefix caching off."""
    peer = peers(threads)["vllm"]
    command = [str(peer.python(venvs)), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name]
    command += ["--dtype", "bfloat16", "--max-model-len", str(length), "--max-num-seqs", str(rows), "--no-enable-prefix-caching"]
    env = {**peer.env, "HF_HUB_OFFLINE": "1"}
    return Server("vllm", lambda port: [*command, "--host", "127.0.0.1", "--port", str(port)], env, _folder(), urgent)


def _serve_run(name: str, python: Path, builder: str, args: dict[str, Any], env: dict[str, str], folder: Path, urgent: bool) -> Server:
    (folder / "ray").mkdir()
    application = {"name": "bench", "route_prefix": "/", "import_path": builder, "args": args}

    def command(port: int) -> list[str]:
        config = folder / "deployment.yaml"
        config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}))
        return [str(python), "-m", "ray.serve.scripts", "run", "--address", "local", str(config)]

    return Server(name, command, {**env, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}, folder, urgent)


def _folder() -> Path:
    """Short, for Ray puts sockets into it."""
    return Path(tempfile.mkdtemp(prefix="rnb"))


def _private_haproxy(folder: Path) -> dict[str, str]:
    """Files and ports that every other server of this machine would share, HAProxy's and those of replicas."""
    from rayneuron.serve.port import haproxy_of_our_own

    first = random.randrange(20_000, 29_000)
    return haproxy_of_our_own(folder / "ha") | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 50),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first + 100),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 150),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
