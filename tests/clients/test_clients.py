"""Clients as they are, in an environment of their own, against `rayneuron serve`: what each was told is what the server says to all.

RAYNEURON_CLIENTS=V/bin/python pytest -m clients tests/clients; requirements.txt says how V is made. RAYNEURON_VLLM=W/bin/python, with
vLLM in W, for its benchmark.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.demo import ensure
from tests.clients.programs import ASK, CLIENTS, MODEL
from tests.serve.scripted import eventually
from tests.serve.test_process import serving

PROGRAMS = Path(__file__).with_name("programs.py")
DOCS = Path(__file__).parents[2] / "docs" / "http.md"
PYTHON, VLLM = os.environ.get("RAYNEURON_CLIENTS", ""), os.environ.get("RAYNEURON_VLLM", "")
# `vllm bench serve`; vLLM's CPU build has the command, which asks for the version of a package of another name and ends
BENCHMARK = """import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())"""
TABLE = dict(re.findall(r"^\| `([\w-]+)` \| (\S+) \|", DOCS.read_text().replace("_", "-"), re.MULTILINE))  # client, version
pytestmark = [pytest.mark.clients, pytest.mark.timeout(400), pytest.mark.skipif(not PYTHON, reason="RAYNEURON_CLIENTS names no python")]


@pytest.fixture(scope="module")
def path() -> Path:
    return ensure("smollm2")


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with serving(path, alone=True) as served:
        eventually(lambda: "is ready" in served.said("out") or served.process.poll() is not None, 200)
        assert served.process.poll() is None, served.said("err")[-3000:]
        yield served.url


@pytest.fixture(scope="module")
def said(url: str) -> dict[str, Any]:
    """What the server says to a plain HTTP call."""
    chat = httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL, **ASK}, timeout=60).json()
    text = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    return {
        "chat": chat["choices"][0]["message"]["content"],
        "input": chat["usage"]["prompt_tokens"],
        "text": httpx.post(f"{url}/v1/completions", json=text, timeout=60).json()["choices"][0]["text"],
    }


@contextmanager
def sagemaker(url: str) -> Iterator[str]:
    """SageMaker's runtime before a container: /endpoints/NAME/invocations becomes /invocations."""

    class Rewriting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            reply = httpx.post(f"{url}/invocations", content=body, headers={"content-type": self.headers["content-type"]}, timeout=60)
            self.send_response(reply.status_code if self.path == "/endpoints/one/invocations" else 404)
            self.send_header("content-type", reply.headers["content-type"])
            self.send_header("content-length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Rewriting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def told(name: str, url: str, path: Path) -> dict[str, Any]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    command = [PYTHON, str(PROGRAMS), name, url, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer.pop("version") == TABLE[name.removesuffix("_tools").replace("_", "-")], "docs/http.md and requirements.txt say another"
    return answer


@pytest.mark.parametrize("name", [name for name in CLIENTS if name not in ("boto3", "lm_eval") and not name.endswith("_tools")])
def test_a_client_is_told_what_everybody_is(name: str, url: str, path: Path, said: dict[str, Any]) -> None:
    judge(told(name, url, path), said)


def test_sagemakers_client(url: str, path: Path, said: dict[str, Any]) -> None:
    with sagemaker(url) as endpoint:
        judge(told("boto3", endpoint, path), said)


@pytest.mark.skipif(not VLLM, reason="RAYNEURON_VLLM names no python")
def test_vllms_benchmark(url: str, path: Path, tmp_path: Path) -> None:
    """Every reply is as long as it asks for, by its own count."""
    words = ["--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions", "--model", MODEL]
    words += ["--tokenizer", str(path), "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"]
    words += ["--num-prompts", "4", "--max-concurrency", "2", "--ignore-eos", "--save-result", "--result-dir", str(tmp_path)]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([VLLM, "-c", BENCHMARK, *words], capture_output=True, text=True, timeout=350, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (file,) = tmp_path.glob("*.json")
    told = json.loads(file.read_text())
    assert (told["completed"], told["failed"], told["total_output_tokens"]) == (4, 0, 32)


def judge(answer: dict[str, Any], said: dict[str, Any]) -> None:
    """Texts are the server's, counts are right, and whoever asks for a form gets it."""
    for kind, count in (("chat", 12), ("text", 8)):
        assert set(answer.get(kind, [said[kind]])) == {said[kind]}, answer
        if kind in answer and "usage" in answer and (kind == "chat" or "chat" not in answer):
            assert set(answer["usage"]) <= {count, 8}, answer
    assert set(answer.get("input", [said["input"]])) == {said["input"]}, answer
    assert answer.get("models", [MODEL]) == [MODEL]
    asked, failed = answer.get("requests", (4, 0))
    assert asked >= 4 and failed == 0, answer
    assert answer.get("person", ["Ada", 36]) == ["Ada", 36]
    assert answer.get("town", ["name", "people"]) == ["name", "people"] and answer.get("chosen", ["yes"])[0] in ("yes", "no")


def test_lm_evals_scores_are_transformers(url: str, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    answer = told("lm_eval", url, path)
    for (context, continuation), (score, greedy) in zip(answer["pairs"], answer["scores"], strict=True):
        ids, known = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = sum(logprobs[i - 1, ids[i]].item() for i in range(known, len(ids)))
        assert abs(score - wanted) < 1e-3 and greedy == all(logprobs[i - 1].argmax() == ids[i] for i in range(known, len(ids)))


def test_sdks_read_calls_and_pass_results_back(tiny: Path, tmp_path: Path) -> None:
    """Of a model whose chat template says that it writes them as hermes does."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    template = "{{ tools }}{# <tool_call> #}{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with serving(folder, serving={"tool_call_parser": "auto"}) as served:
        eventually(lambda: "is ready" in served.said("out") or served.process.poll() is not None, 200)
        assert served.process.poll() is None, served.said("err")[-3000:]
        for name in ("openai_tools", "anthropic_tools"):
            calls = told(name, f"{served.url}/m/tiny", tiny)["calls"]
            assert len(calls) == (6 if name == "openai_tools" else 3)
            assert all(called == "weather" and json.loads(said)["city"] in ("Paris", "Rome") for called, said in calls)
            whole, streamed = calls[:2]
            assert whole == streamed and (name != "openai_tools" or calls[3] == calls[4] == whole)
