#!/usr/bin/env python3
"""Writes the files of cluster/ that follow from others: RayServices and Ray clusters from deployment files and instance types, dashboards
and alerts from the metrics' names.

`make.py` writes them, `make.py --check` says which are out of date and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import dashboards  # noqa: E402
import kuberay  # noqa: E402
import launcher  # noqa: E402


class Writer(yaml.SafeDumper):
    """Plain YAML: nested lists indented, long texts as blocks, nothing by reference."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out."""
        return True


def _text(writer: Writer, text: str) -> yaml.ScalarNode:
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Writer.add_representer(str, _text)


def manifest(documents: list[Mapping[str, Any]], about: str) -> str:
    """YAML documents below a comment that says what they are and who wrote them."""
    head = "".join(f"# {line}\n" for line in [*about.splitlines(), "Written by cluster/make.py: change it there."])
    return head + yaml.dump_all(documents, Dumper=Writer, sort_keys=False, width=160)


def files() -> dict[Path, str]:
    """Every derived file and what belongs in it."""
    rooms = {"kuberay": kuberay.manifests(), "launcher": launcher.manifests()}
    out = {HERE / room / f"{name}.yaml": manifest(*said) for room, named in rooms.items() for name, said in named.items()}
    out |= {HERE / "grafana" / f"{name}.json": json.dumps(board, indent=1) + "\n" for name, board in dashboards.boards().items()}
    out[HERE / "kubernetes" / "podmonitor.yaml"] = manifest(
        kuberay.monitors(), "What Prometheus' operator scrapes: every model's metrics, by one pod of each service, and the devices' own."
    )
    out[HERE / "kubernetes" / "alerts.yaml"] = manifest([dashboards.alerts()], "Alerts for the Prometheus operator.")
    return out


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    args = parser.parse_args()
    old = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"{path.relative_to(HERE.parent)} is out of date" if args.check else f"wrote {path.relative_to(HERE.parent)}")
        if not args.check:
            path.write_text(files()[path])
    return 1 if args.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
