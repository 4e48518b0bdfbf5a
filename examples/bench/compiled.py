#!/usr/bin/env python3
"""A copy of the package whose simulator is compiled by mypyc: the same Python, for runs of a million requests.

`python examples/bench/compiled.py FOLDER`, then `PYTHONPATH=FOLDER rayneuron simulate ...` as ever. It takes mypy, a C compiler and two
minutes. Nothing is rewritten but what mypyc does not compile: the structs of msgspec move into modules of their own, which stay as they
are. Then both simulate the same, and every figure must be equal.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "sim": "clock engines fleet grouped host jump kept parts report",
    "engine": "blocks forks idle kv_events pressure registered scheduler",
    "policies": "choice chunks cost desk fairness known_worker learned_pace prefix_index queue_speed replay step_times workers",
}
MODULES = [f"rayneuron/{room}/{name}.py" for room, names in ROOMS.items() for name in names.split()]
EDITS = {  # what compiled code holds to, and Python does not
    "engine/sequence.py": ("    ids: list[int]\n", "    ids: Any\n"),  # the simulator's are only counted
    "policies/desk.py": ("WeakValueDictionary[Profile, Costs] = WeakValueDictionary()", "dict[Profile, Costs] = {}"),  # engines are alike
}
HEAVY = ("torch", "transformers", "ray", "pydantic", "huggingface_hub", "tokenizers", "rayneuron.devices.cpu", "rayneuron.devices.neuron")
CONFIG = "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
CONFIG += "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in HEAVY)
BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
extensions = mypycify(["--config-file", "mypy.ini", *sys.argv[1:]], opt_level="2", debug_level="0")
setup(name="compiled", packages=[], ext_modules=extensions, script_args=["build_ext", "--inplace"])
"""
SMALL = (
    "simulate demo:smollm2 --profile guess --instance inf2.8xlarge --tensor-parallel 1 --device neuron --max-model-len 2048 --nodes 20 "
    "--rate 12 --requests 3000 --seed 1 --gateways 2 --late-ms 20 --fault kill:2@3"
).split()


def move_structs(path: Path) -> None:
    """The msgspec structs of a module into one beside it, which the module imports."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.split("\n")
    structs = [node for node in tree.body if isinstance(node, ast.ClassDef) and "Struct" in [getattr(b, "id", "") for b in node.bases]]
    if not structs:
        return
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]

    def said(node: ast.stmt) -> str:
        return "\n".join(lines[node.lineno - 1 : node.end_lineno])

    own = [node for node in imports if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rayneuron")]
    others = [said(node) for node in imports if node not in own]
    typed = [f"    {said(node)}".replace("\n", "\n    ") for node in own]  # only for those who read types
    beside = path.with_name(f"structs_of_{path.name}")
    checking = ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:", *typed] if typed else []
    beside.write_text("\n".join([*others, *checking, *map(said, structs), ""]))
    gone = {line for node in structs for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    last = max(node.end_lineno or 0 for node in imports)
    names = ", ".join(f"{node.name} as {node.name}" for node in structs)
    added = f"from {'.'.join(path.parts[-3:-1])}.{beside.stem} import {names}"
    kept = [line for at, line in enumerate(lines, 1) if at not in gone]
    kept.insert(last, added)
    path.write_text("\n".join(kept))


def build(folder: Path) -> None:
    """The compiled copy, in a folder that is empty or such a copy."""
    package = folder / "rayneuron"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "rayneuron", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in EDITS.items():
        text = (package / name).read_text()
        assert text.count(before) == 1, (name, before)
        (package / name).write_text(text.replace(before, after))
    for name in MODULES:
        move_structs(folder / name)
    (folder / "mypy.ini").write_text(CONFIG)
    done = subprocess.run([sys.executable, "-c", BUILD, *MODULES], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mypyc: {(done.stdout + done.stderr)[-2000:]}")


def figures(folder: Path, out: Path) -> tuple[dict[str, Any], float]:
    """Of a small fleet, simulated by the package of a folder; and what that took, in seconds of a core."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    call = f"import time\nfrom rayneuron.cli import main\nassert main({[*SMALL, '--json', str(out)]!r}) == 0\nprint(time.process_time())"
    done = subprocess.run([sys.executable, "-c", call], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(out.read_text()), float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the copy")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    build(folder)
    print(f"compiled in {time.monotonic() - began:.0f} s")
    (plain, plain_s), (fast, fast_s) = figures(ROOT, folder / "plain.json"), figures(folder, folder / "compiled.json")
    if plain != fast:
        raise SystemExit(f"what is compiled simulates otherwise: see {folder}/plain.json and compiled.json")
    print(f"all figures of {plain['arrived']} requests are equal; {plain_s:.1f} s, compiled {fast_s:.1f} s, start included")
    print(f"PYTHONPATH={folder} rayneuron simulate ...")


if __name__ == "__main__":
    main()
