"""lm-eval over our HTTP API against lm-eval's own `hf` model on the same weights: greedy texts equal, log-likelihoods within 1e-4.

The reference computes in float64: transformers in float32 is itself up to 3e-4 away from it on these texts, our fp32 about 1e-5.

lm-eval gets its own environment: python -m venv V && V/bin/pip install torch==2.13.0 && V/bin/pip install 'lm-eval[api]' accelerate
Then: python examples/lm_eval/run.py --lm-eval V/bin/lm_eval
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
TASKS = ("rn_choices", "rn_generate", "rn_rolling")
TOLERANCE = 1e-4


@contextlib.contextmanager
def served(deployment: dict[str, Any], scratch: Path) -> Iterator[str]:
    """`serve run` of one application in a Ray of its own; yields its base URL once /health answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (scratch / "ray").mkdir()
    file = scratch / "app.yaml"
    application = {"name": "parity", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": deployment}
    file.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}))
    env = {**os.environ, "RAY_TMPDIR": str(scratch), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(HERE.parent.parent)}
    env.pop("RAY_ADDRESS", None)
    server = subprocess.Popen([Path(sys.executable).with_name("serve"), "run", str(file)], env=env, start_new_session=True)
    try:
        wait(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def wait(url: str, server: subprocess.Popen[bytes], limit_s: float = 900.0) -> None:
    """Until `url` answers 200. Raises when the server ends first or the limit passes."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        if server.poll() is not None:
            raise RuntimeError(f"serve run ended with {server.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(url, timeout=5)
            return
        time.sleep(0.5)
    raise TimeoutError(f"{url} did not answer within {limit_s:.0f} s")


def evaluate(lm_eval: str, model: str, model_args: str, out: Path) -> dict[str, list[dict[str, Any]]]:
    """Run lm-eval; its samples by task, in order of the documents."""
    command = [lm_eval, "--model", model, "--model_args", model_args, "--tasks", ",".join(TASKS), "--include_path", "tasks"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    subprocess.run([*command, "--batch_size", "1", "--output_path", str(out), "--log_samples"], cwd=HERE, env=env, check=True)
    found = {t: glob.glob(f"{out}/**/samples_{t}_*.jsonl", recursive=True)[0] for t in TASKS}
    read = {t: [json.loads(line) for line in Path(f).read_text().splitlines()] for t, f in found.items()}
    return {t: sorted(rows, key=lambda r: r["doc_id"]) for t, rows in read.items()}


def numbers(value: Any) -> list[float]:
    """Every log-likelihood in a sample's responses, whatever the nesting."""
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in numbers(v)]
    try:
        return [float(value)] if not isinstance(value, bool) and value not in ("True", "False") else []
    except (TypeError, ValueError):
        return []


def compare(ours: dict[str, list[dict[str, Any]]], theirs: dict[str, list[dict[str, Any]]]) -> bool:
    """Print the comparison as a table; True where everything agrees."""
    good = True
    print("| task | documents | equal greedy texts | log-likelihoods | largest difference |\n|---|---|---|---|---|")
    for task in TASKS:
        a, b = ours[task], theirs[task]
        if task == "rn_generate":
            equal = sum(x["resps"] == y["resps"] for x, y in zip(a, b, strict=True))
            good &= equal == len(a) > 0
            print(f"| {task} | {len(a)} | {equal} / {len(b)} | | |")
            continue
        pairs = [(m, n) for x, y in zip(a, b, strict=True) for m, n in zip(numbers(x["resps"]), numbers(y["resps"]), strict=True)]
        worst = max(abs(m - n) for m, n in pairs)
        good &= worst <= TOLERANCE
        print(f"| {task} | {len(a)} | | {len(pairs)} | {worst:.1e} |")
    return good


def main() -> int:
    """0 where the two agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, help="lm_eval of its own environment")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another engine mode: tensor_parallel=2, ...")
    args = parser.parse_args()
    from rayneuron.demo import ensure
    from rayneuron.validation import override

    path = str(ensure("smollm2"))
    extra = {k: yaml.safe_load(v) for k, _, v in (item.partition("=") for item in args.set)}
    deployment = override({"model": {"path": path, "name": "parity"}, "dtype": "fp32", "max_model_len": 1024, "max_num_seqs": 4}, extra)
    with tempfile.TemporaryDirectory(prefix="rn", dir="/tmp") as folder:
        scratch = Path(folder)
        with served(deployment, scratch) as url:
            settings = (
                f"model=parity,base_url={url}/v1/completions,tokenizer={path},tokenized_requests=True,num_concurrent=2,max_length=1024"
            )
            ours = evaluate(args.lm_eval, "local-completions", settings, scratch / "ours")
        theirs = evaluate(args.lm_eval, "hf", f"pretrained={path},dtype=float64,max_length=1024", scratch / "hf")
    good = compare(ours, theirs)
    print("equal" if good else "NOT equal")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
