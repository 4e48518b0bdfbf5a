"""Every family against transformers: the table of docs/parity.md, as Markdown.

    python examples/bench/parity.py [--families llama gpt2] [--demo]

Tiny random models are saved to files; transformers and rayneuron read the same files. A row: the largest absolute difference of a logit
(float32, prefill in chunks, single tokens, a step of three) at TP 1, 2 and 4, the largest logit, seconds to load, and the peak memory of
the process that ran it. `--demo` adds SmolLM2-135M, a real model: its row says what a load costs.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEGREES = (1, 2, 4)


def measure(name: str) -> dict[str, float]:
    """One family, in this process."""
    import torch

    from rayneuron import demo
    from tests.models import cases

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        if name == "smollm2":
            saved = cases.reference(demo.ensure())
        else:
            saved = cases.save(cases.CONFIGS[name](), Path(folder))
        found: dict[str, float] = {"logit": saved.logits.abs().max().item()}
        for ranks in DEGREES:
            opened: list[float] = []

            def work(comm, opened=opened):
                started = time.perf_counter()
                runner = cases.Runner.open(saved.path, comm)
                opened.append(time.perf_counter() - started)
                return cases.run(runner, saved.ids, 17)

            everybody = cases.on_ranks(ranks, work)
            found[f"tp{ranks}"] = max((got - saved.logits).abs().max().item() for got in everybody)
            found.setdefault("load_s", opened[0])
        found["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def row(name: str, found: dict[str, float]) -> str:
    """One line of the table."""
    differences = " | ".join(f"{found[f'tp{r}']:.1e}" for r in DEGREES)
    return f"| {name} | {differences} | {found['logit']:.2f} | {1e3 * found['load_s']:.0f} ms | {found['rss_mib']:.0f} MiB |"


def main() -> None:
    """Each family in a process of its own, so that peak memory is its own."""
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", help="default: all")
    parser.add_argument("--demo", action="store_true", help="add SmolLM2-135M")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    from tests.models import cases

    names = [*(args.families or cases.CONFIGS), *(["smollm2"] if args.demo else [])]
    print("| family | TP 1 | TP 2 | TP 4 | largest logit | load | peak RSS |\n|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        ran = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, cwd=ROOT, check=False)
        if ran.returncode:
            sys.exit(f"{name} failed:\n{ran.stderr[-2000:]}")
        print(row(name, json.loads(ran.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
