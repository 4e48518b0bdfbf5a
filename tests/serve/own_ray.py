"""A Ray of its own beneath the tests of a module, what `serve deploy` does with a file, and whole test files in another profile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayneuron.serve.port import haproxy_of_our_own
from rayneuron.serve.profile import profile_env
from tests.serve.scripted import free_port

ROOT = Path(__file__).parents[2]


@contextmanager
def running(words: Mapping[str, str] | None = None, **said: Any) -> Iterator[tuple[Path, int]]:
    """The folder and Serve's port of a Ray that ends with the block. `words`: of its environment; `said`: what `ray.init` is told."""
    import ray
    from ray import serve

    with temporary() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_TMPDIR": str(folder), **profile_env("plain"), **(words or {})}.items():
            patch.setenv(name, value)
        memory = 100 * 2**20
        ray.init(address="local", include_dashboard=False, object_store_memory=memory, log_to_driver=False, **{"num_cpus": 2, **said})
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield folder, port
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def temporary() -> Iterator[Path]:
    """A folder for a Ray, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="rn", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        yield Path(folder)


def deploy(port: int, *applications: Mapping[str, Any], **file: Any) -> None:
    """Have Serve start what a deployment file says; returns before it has."""
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    content = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [*applications], **file}
    serve.context._get_global_client().deploy_apps(ServeDeploySchema.model_validate(content), _blocking=False)


@contextmanager
def command(folder: Path, environment: Mapping[str, str], *words: str, cwd: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """A program that ends with the block. What it says is in `log` of the folder, and printed where the block fails."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(words, env=environment, cwd=cwd, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    except BaseException:
        print((folder / "log").read_text()[-6000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_in_profile(file: Path, profile: str, within_s: float, **words: str) -> None:
    """Run every test of a file in a process of its own: the switches of a profile are read when Ray is imported."""
    with temporary() as folder:
        more = haproxy_of_our_own(folder / "ha") | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"} if profile == "fast" else {}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "", "-p", "no:cacheprovider", str(file)]
        env = os.environ | profile_env(profile) | more | words
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=within_s, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert "skipped" not in ran.stdout.splitlines()[-1]
