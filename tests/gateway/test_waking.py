"""Models that sleep behind a gateway, in one process: what callers see and what is measured while they wake, fail, and make room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayneuron.gateway.routes import application
from tests.gateway.stage import Hosted, hosted
from tests.gateway.test_remote import client

GO = {"prompt": "say:hello", "max_tokens": 20}


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What starts took is remembered in a file."""
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "cache"))
    yield


def value(text: str, name: str, **labels: str) -> float:
    """The sum of the samples of a family with these labels."""
    found = [line for line in text.splitlines() if line.startswith(f"{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items())]
    assert found, (name, labels)
    return sum(float(line.split()[-1]) for line in found)


def asked(made: Hosted, http: Any, model: str, **more: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(http.post("/v1/completions", json={**GO, "model": model, **more}))


async def test_what_a_host_measures(tiny: Path) -> None:
    async with hosted(tiny, {"a": 2, "b": 4}) as made, client(application(made.catalogues[0])) as http:

        async def measured() -> str:
            return str((await http.get("/metrics")).text)

        text = await measured()
        assert value(text, "rayneuron:host_models", model_name="a", state="sleeping") == 1
        assert value(text, "rayneuron:host_cores", state="free") == 4 and value(text, "rayneuron:host_seats") == 0
        assert value(text, "rayneuron:host_eta_seconds", model_name="a") >= 10, "a guess"
        made.stage.gate.clear()
        call = asked(made, http, "a")
        await made.until(lambda: made.rows() == {"a.0": "starting"})
        text = await measured()
        assert value(text, "rayneuron:host_models", model_name="a", state="loading") == value(text, "rayneuron:host_calls_held") == 1
        assert value(text, "rayneuron:host_cores", state="seat", node="n") == 2
        made.stage.gate.set()
        assert (await call).json()["choices"][0]["text"] == "hello"
        await made.until(lambda: made.rows() == {"a.0": "ready"})
        text = await measured()
        assert value(text, "rayneuron:host_models", model_name="a", state="ready") == 1
        assert value(text, "rayneuron:host_wakes_total", model_name="a", outcome="started") == 1
        assert value(text, "rayneuron:host_eta_error", model_name="a") > 0
        assert "rayneuron:host_eta_seconds{" not in "\n".join(line for line in text.splitlines() if 'model_name="a"' in line)
        await made.until(lambda: not any(wish.waiting for wish in made.arbiter.table.wishes(0.0)))
        assert value(await measured(), "rayneuron:host_calls_held") == 0
        made.stage.broken["b"] = "rayneuron.errors.ConfigError: no such weights"
        refused = await asked(made, http, "b")
        assert refused.status_code == 503 and "no such weights" in refused.text and int(refused.headers["retry-after"]) >= 1
        text = await measured()
        assert value(text, "rayneuron:host_refusals_total", model_name="b", reason="failed") == 1
        assert value(text, "rayneuron:host_wakes_total", model_name="b", outcome="failed") == 1
        assert value(text, "rayneuron:host_dismissals_total", model_name="a", why="room") == 1, "it went for b"
        made.stage.keeps = {3}
        await made.until(lambda: made.arbiter._nodes["n"]["free"] == [0, 1, 2])
        assert value(await measured(), "rayneuron:host_cores", state="foreign") == 1
        heads = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(heads) == len(set(heads)), "every family once"
