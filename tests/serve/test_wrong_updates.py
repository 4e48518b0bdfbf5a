"""Twenty wrong updates of a running application under load: each is refused or said, and nobody's request fails."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve import own_ray
from tests.serve.scripted import PATIENCE_S, eventually
from tests.serve.test_app import arguments, client, states, url  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

GO = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}


def model(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda app: app["args"]["model"].update(changed)


def args(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda app: app["args"].update(changed)


def user(config: Any) -> Callable[[dict[str, Any]], None]:
    return lambda app: app.update(deployments=[{"name": "EngineServer", "user_config": config}])


def broken(folder: Path, name: str, text: str | None) -> str:
    """A model directory in which one file is another, or gone."""
    target = folder / f"{name}-{'gone' if text is None else 'wrong'}"
    shutil.copytree(folder / "good", target)
    (target / name).unlink(missing_ok=True) if text is None else (target / name).write_text(text)
    return str(target)


def updates(folder: Path) -> dict[str, Callable[[dict[str, Any]], None]]:
    return {
        "user_config: unknown key": user({"limit": {}}),
        "user_config: unknown parameter": user({"sampling_defaults": {"temprature": 1}}),
        "user_config: range": user({"sampling_defaults": {"temperature": 9}}),
        "user_config: type": user({"limits": {"max_waiting": "8"}}),
        "user_config: half right": user({"limits": {"max_waiting": -1}, "sampling_defaults": {"max_tokens": 3}}),
        "no such path": model(path="/no/such"),
        "path of a file": model(path=__file__),
        "no config.json": model(path=broken(folder, "config.json", None)),
        "config.json": model(path=broken(folder, "config.json", "{")),
        "no tokenizer": model(path=broken(folder, "tokenizer.json", None)),
        "tokenizer.json": model(path=broken(folder, "tokenizer.json", "{}")),
        "generation_config.json": model(path=broken(folder, "generation_config.json", "[]")),
        "weights": model(path=broken(folder, "model.safetensors", "x")),
        "no weights": model(path=broken(folder, "model.safetensors", None)),
        "template": model(chat_template="{% if %}"),
        "unknown key": args(max_num_seq=3),
        "type": args(max_num_seqs=True),
        "too long": args(max_model_len=10**6),
        "too many ranks": args(tensor_parallel=64),
        "defaults": args(sampling_defaults={"temperature": 9}),
        "key": args(serving={"api_keys": ["env:NO_SUCH_KEY"]}),
        "no room": args(serving={"num_cpus": 1000}),
        "device": args(device="nueron"),
        "import path": lambda app: app.update(import_path="rayneuron.serve.app:built"),
    }


class Load:
    """Four clients that ask one after the other until told to stop."""

    def __init__(self, base: str) -> None:
        self.done, self.failed = 0, list[str]()
        self._url, self._stop = base, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as http:
            while not self._stop.is_set():
                try:
                    reply = http.post("/v1/completions", json=GO)
                    if reply.status_code != 200:
                        self.failed.append(f"{reply.status_code} {reply.text[:200]}")
                except httpx.HTTPError as wrong:
                    self.failed.append(repr(wrong))
                self.done += 1

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def test_no_request_fails(client: httpx.Client, url: str, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    from ray import serve

    shutil.copytree(tiny, tmp_path / "good")
    good: dict[str, Any] = {"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": arguments(tiny)}
    started, port = client.get("/v1/models").json()["data"][0]["created"], int(url.rpartition(":")[2])

    def status() -> Any:
        return serve.status().applications["model"]

    def refused(name: str, last: str) -> bool:
        """The update has been seen: by the replica, or by the builder, who has another thing to say than of the update before."""
        if name.startswith("user_config"):
            return "refused_user_config" in client.get("/load").json()
        return bool(status().status.value == "DEPLOY_FAILED" and status().message != last)

    load, last = Load(url), ""
    try:
        for name, change in updates(tmp_path).items():
            app = copy.deepcopy(good)
            change(app)
            own_ray.deploy(port, app)
            eventually(
                lambda name=name, last=last: refused(name, last), 4 * PATIENCE_S, lambda name=name: (name, states(), load.failed[:3])
            )
            before, last = load.done, status().message
            assert name.startswith(("user_config", "import path")) or last.count("\n") == 1, last
            eventually(lambda before=before: load.done > before + 8, PATIENCE_S, lambda name=name: name)
            assert not load.failed, (name, load.failed[:3])
            if name.startswith("user_config"):
                own_ray.deploy(port, good | {"deployments": [{"name": "EngineServer", "user_config": {}}]})
                eventually(lambda: "refused_user_config" not in client.get("/load").json(), PATIENCE_S, lambda name=name: (name, states()))
        own_ray.deploy(port, good)
        eventually(lambda: states()["model"] == "RUNNING", PATIENCE_S, states)
    finally:
        load.stop()
    assert not load.failed and load.done > 200
    assert client.get("/v1/models").json()["data"][0]["created"] == started, "the engine is the one that was started first"
