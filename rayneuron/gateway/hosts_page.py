"""What a host does, as a page to look at: its cores in a row, who sits where, and how it stands with every model."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

HEAD = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>hosts</title><style>
body{font:14px system-ui;margin:2em;color:#222} table{border-collapse:collapse;margin:1em 0} td,th{padding:.3em .8em;text-align:left}
tr+tr{border-top:1px solid #ddd} .cores{display:flex;gap:2px} .cores div{flex:1;height:2.4em;border-radius:3px;background:#eee;
font-size:11px;overflow:hidden;text-align:center;line-height:2.4em} .ready{background:#9d9!important} .starting{background:#fd8!important}
.reserved{background:#cdf!important} .moving,.draining,.stopping{background:#fa9!important} .held{background:#999!important}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd} .cores div{background:#333;color:#111}}</style>"""
COLUMNS = ("state", "cores", "seats", "eta_s", "start_s", "resident", "why", "failed")


def page(told: Mapping[str, Any]) -> bytes:
    """The page of what the arbiter describes."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{escape(_cell(one.get(key)))}</td>" for key in COLUMNS) + "</tr>"
        for name, one in told["models"].items()
    )
    head = "".join(f"<th>{column}</th>" for column in ("model", *COLUMNS))
    nodes = "".join(
        f"<h3>{escape(name)}: {escape(node['instance'])}</h3><div class=cores>{_cores(name, node, told['seats'])}</div>"
        for name, node in told["nodes"].items()
    )
    return f"{HEAD}{nodes}<table><tr>{head}</tr>{rows}</table>".encode()


def _cores(name: str, node: Mapping[str, Any], seats: list[Mapping[str, Any]]) -> str:
    out = []
    for core in range(node["cores"]):
        here = [seat for seat in seats if seat["node"] == name and core in seat["cores"]]
        said, kind = (here[0]["seat"], here[0]["state"]) if here else ("", "" if core in node["free"] else "held")
        out.append(f'<div class="{kind}" title="core {core} {escape(said)} {kind}">{escape(said if core in _firsts(here) else "")}</div>')
    return "".join(out)


def _firsts(seats: list[Mapping[str, Any]]) -> list[int]:
    return [min(seat["cores"]) for seat in seats]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
