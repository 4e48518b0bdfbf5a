"""Workers that are forks, what they get and whom they end with; agents that wait; what a raylet is told of both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayneuron.processes import process_started
from rayneuron.serve import fork_client, fork_server, lean_ray, stand_in_agent
from tests.serve.scripted import PATIENCE_S, eventually

pytestmark = pytest.mark.timeout(200)

BEGIN = "import sys; from rayneuron.serve import fork_server; print(fork_server.begin('cpu'), flush=True); sys.stdin.read()"
PROGRAM = """
import json, os, random, signal, sys
said = {"words": sys.argv[1:], "parent": os.getppid(), "group": os.getpgid(0), "here": os.getcwd(), "mark": os.environ.get("MARK"),
        "modules": [name for name in ("ray", "rayneuron.serve.app", "torch") if name in sys.modules], "name": __name__,
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), "random": random.random(),
        "owed": os.environ.get("RAYNEURON_EXPORTED")}
if said["modules"]:
    import numpy, ray
    said |= {"numpy": numpy.random.random(), "id": ray.NodeID.from_random().hex()}
open(sys.argv[1], "w").write(json.dumps(said))
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has begun a server, and where that is."""
    begun = subprocess.Popen([sys.executable, "-c", BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert begun.stdout is not None
    yield begun, begun.stdout.readline().strip()
    begun.kill()
    begun.wait()


def worker(address: str, folder: Path, name: str, *words: str, **variables: str) -> dict[str, Any]:
    """What the program says of itself that a client was started to become, in a group of its own as Ray starts it."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-I", "-S", fork_client.__file__, address, str(folder / "program.py"), str(folder / name), *words]
    client = subprocess.Popen(command, env={**os.environ, **variables}, cwd=folder, process_group=0)
    assert client.wait(PATIENCE_S) == 0
    eventually(lambda: (folder / name).exists() and (folder / name).read_text().endswith("}"), PATIENCE_S)
    return {**json.loads((folder / name).read_text()), "client": client.pid}


def test_workers_are_forks_in_the_place_of_who_asked(forks: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    begun, address = forks
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    said = [worker(address, tmp_path, str(i), "--runtime-env-hash=0", RAY_JOB_ID=fork_server.JOB, MARK=str(i)) for i in range(4)]
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for i, one in enumerate(said):
        assert one["words"] == [str(tmp_path / str(i)), "--runtime-env-hash=0"] and one["name"] == "__main__"
        assert one["mark"] == str(i) and one["owed"] == os.environ.get("RAYNEURON_EXPORTED"), "its variables, and no others"
        assert one["here"] == str(tmp_path) and one["group"] == one["client"] and signal.SIGUSR1 in one["blocked"]
    assert [one["modules"][-1] for one in said] == ["rayneuron.serve.app"] * fork_server.FIRST + ["torch"] * 2
    assert len({one["parent"] for one in said}) == 2 and not {one["parent"] for one in said} & {os.getpid(), begun.pid}
    for drawn in ("random", "numpy", "id"):
        assert len({one[drawn] for one in said}) == 4, f"{drawn}: forks draw numbers of their own"


def test_a_worker_of_another_kind_starts_by_itself(forks: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    _, address = forks
    for name, where, words, job in (
        ("environment", address, ("--runtime-env-hash=7",), fork_server.JOB),
        ("job", address, (), "02000000"),
        ("nobody", "@nobody", (), fork_server.JOB),
    ):
        said = worker(where, tmp_path, name, *words, RAY_JOB_ID=job)
        assert said["modules"] == [] and said["parent"] == os.getpid() and said["group"] == said["client"], name


def test_forks_end_with_who_began_them() -> None:
    with subprocess.Popen([sys.executable, "-c", BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as begun:
        assert begun.stdout is not None
        address = begun.stdout.readline().strip()
        begun.kill()
        begun.stdin.close()  # type: ignore[union-attr]

    def silent() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(address.replace("@", "\0")) != 0

    eventually(silent, PATIENCE_S)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_an_agent_is_started_by_the_first_call(tmp_path: Path) -> None:
    said, port = tmp_path / "said", lean_ray._kept_port("127.0.0.1")
    told = f"import socket, sys; socket.create_server(('127.0.0.1', {port})); open({str(said)!r}, 'w').write(' '.join(sys.argv[1:]))"
    agent = [sys.executable, "-c", told, stand_in_agent.PORT, "--more"]
    waiting = subprocess.Popen([*lean_ray.ALONE, stand_in_agent.__file__, "127.0.0.1", str(port), *agent])
    time.sleep(2 * stand_in_agent.LOOK_PERIOD_S)
    assert waiting.poll() is None and not said.exists()
    eventually(lambda: answers(port), PATIENCE_S)
    assert waiting.wait(PATIENCE_S) == 0, "it could listen where it was waited for"
    assert said.read_text() == f"{stand_in_agent.PORT[:-1]}{port} --more"


def test_an_agent_that_waits_ends_with_its_raylet() -> None:
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", start, *lean_ray.ALONE, stand_in_agent.__file__]
    for more in ([], ["127.0.0.1", str(lean_ray._kept_port("127.0.0.1")), "true", stand_in_agent.PORT]):
        with subprocess.Popen([*command, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as raylet:
            assert raylet.stdout is not None
            agent = int(raylet.stdout.readline())
            time.sleep(2 * stand_in_agent.LOOK_PERIOD_S)
            assert process_started(agent) is not None
        eventually(lambda agent=agent: process_started(agent) is None, PATIENCE_S)


def test_a_raylet_is_told_of_both(tmp_path: Path) -> None:
    agent = f"{sys.executable} -u main.py {stand_in_agent.PORT} --node-id=ab"
    flags = {
        "--session_dir": str(tmp_path), "--node_id": "ab", "--node_ip_address": "127.0.0.1", "--num_prestart_python_workers": "64",
        "--python_worker_command": "python setup_worker.py '/a b/default_worker.py' --node-ip=1".replace("'", '"'),
        "--dashboard_agent_command": "python agent.py", "--runtime_env_agent_command": agent,
    }  # fmt: skip
    command = ["raylet", *(f"{name}={value}" for name, value in flags.items()), "--head"]
    changed = lean_ray.raylet(command, "@forks")
    assert [word.partition("=")[0] for word in changed] == [word.partition("=")[0] for word in command]
    found = dict(word.split("=", 1) for word in changed if "=" in word)
    asking = f'-I -S {fork_client.__file__} @forks "/a b/default_worker.py"'
    assert found["--python_worker_command"] == f"python setup_worker.py {asking} --node-ip=1"
    assert found["--num_prestart_python_workers"] == "0"
    assert found["--dashboard_agent_command"].endswith(stand_in_agent.__file__) and found["--runtime_env_agent_command"].endswith(agent)
    port = found["--runtime_env_agent_command"].split()[5]
    told = sorted(file.read_text() for file in tmp_path.iterdir())
    assert told == ["-1", "-1", "-1", port], "of the dashboard's agent what Ray's own says where it is not installed"
    assert lean_ray.raylet(command, None)[5] == command[5], "without forks Ray's own workers"
    with pytest.raises(ValueError, match="unknown flags"):
        lean_ray.raylet([word for word in command if not word.startswith("--node_id")], None)


NODE = """
import json, os, sys
from rayneuron.serve import fork_server
forks = fork_server.begin("cpu")
import ray
from rayneuron.serve import lean_ray
with lean_ray.lean(forks):
    ray.init(include_dashboard=False, num_cpus=1)

@ray.remote
def seen():
    return os.environ.get("MARK"), "rayneuron.serve.app" in sys.modules

print(json.dumps([ray.get(seen.remote()), ray.get(seen.options(runtime_env={"env_vars": {"MARK": "here"}}).remote())]))
"""


@pytest.mark.slow
def test_such_a_ray_prepares_an_environment_where_a_worker_asks_for_one() -> None:
    with tempfile.TemporaryDirectory(prefix="rf", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}
        done = subprocess.run([sys.executable, "-c", NODE], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[None, True], ["here", False]]
