"""HLO as text, read: instructions, bytes of KV that move, and what neuronx-cc or the chip is known to refuse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import prod

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
WIDEST_WINDOW, MOST_SORTED = 1024, 16384
VIEWS = {"reshape", "bitcast", "bitcast-convert", "slice", "get-tuple-element", "copy-start"}  # of a static slice only the addresses differ
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ((?:\([^=]*?\))|(?:\w+\[[\d,<=]*\](?:\{[^}]*\})?)) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass
class Instruction:
    """One line of the entry computation."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    opcode: str
    operands: list[str]
    rest: str

    @property
    def turns_nothing(self) -> bool:
        """Whether it is a transpose in name only, as torch-xla writes behind an update."""
        return f"dimensions={{{','.join(map(str, range(len(self.shape))))}}}" in self.rest

    @property
    def bytes(self) -> int:
        return prod(self.shape) * WIDTHS.get(self.dtype, 4)


@dataclass
class Module:
    """An HLO module: its entry, and every line for what may stand anywhere."""

    entry: dict[str, Instruction]
    text: str
    counts: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = Counter(i.opcode for i in self.entry.values())

    @classmethod
    def of(cls, text: str) -> Module:
        body = text.split("ENTRY", 1)[1].split("\n}", 1)[0]
        return cls({i.name: i for i in map(_instruction, body.splitlines()[1:]) if i is not None}, text)

    def users(self, name: str) -> Iterator[Instruction]:
        return (i for i in self.entry.values() if name in i.operands)

    def parameters(self, shape: tuple[int, ...], dtype: str) -> list[str]:
        return [i.name for i in self.entry.values() if i.opcode == "parameter" and (i.shape, i.dtype) == (shape, dtype)]

    def dot_flops(self) -> int:
        """Multiplications and additions of all products."""
        total = 0
        for i in self.entry.values():
            if i.opcode == "dot":
                left = self.entry[i.operands[0]]
                dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
                total += 2 * prod(i.shape) * prod(left.shape[int(d)] for d in dims[1].split(",") if d)  # type: ignore[index]
        return total


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if match is None:
        return None
    name, shape, opcode, rest = match.groups()
    found = _SHAPE.search(shape)
    dtype, dims = (found[1], tuple(int(d) for d in found[2].split(",") if d)) if found else ("", ())
    depth, end = 1, len(rest)
    for at, letter in enumerate(rest):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0:
            end = at
            break
    operands = [re.split(r"[\s%]", part.strip())[-1] for part in re.split(r",(?![^\[{(]*[\]})])", rest[:end]) if part.strip()]
    return Instruction(name, dtype, dims, opcode, operands, rest)


def kv_moved(module: Module, states: Collection[str]) -> tuple[int, list[str]]:
    """Bytes of KV that are read or written, and the instructions beside products and updates that do it.

    A product reads its operand once; an update of a state, which is the same memory before and after, moves what it writes twice; whatever
    else makes a tensor out of KV reads and writes it.
    """
    tainted, moved, others = set(states), 0, []
    for i in module.entry.values():
        of_kv = [n for n in i.operands if n in tainted]
        if not of_kv or i.opcode in ("tuple", "parameter"):
            continue
        if i.opcode in VIEWS or (i.opcode == "transpose" and i.turns_nothing):
            tainted.add(i.name)
        elif i.opcode == "dot":
            moved += sum(module.entry[n].bytes for n in of_kv)
        elif i.opcode in ("scatter", "dynamic-update-slice") and i.operands[0] in tainted:
            tainted.add(i.name)
            moved += 2 * module.entry[i.operands[-1] if i.opcode == "scatter" else i.operands[1]].bytes
        else:
            tainted.add(i.name)
            moved += 2 * i.bytes
            others.append(f"{i.opcode} {i.dtype}{list(i.shape)}")
    return moved, others


def denied(module: Module) -> list[str]:
    """What stands in a module and is known to fail or crawl on the chip: page (c) of the review, as far as HLO shows it."""
    found = [f"a dynamic dimension: {m}" for m in re.findall(r"\w+\[[\d,]*<=[^\]]*\]", module.text)]
    found += ["float64"] * (" f64[" in module.text)
    for size in re.findall(r"reduce-window\(.*?window=\{size=([\dx]+)", module.text):
        if max(map(int, size.split("x"))) > WIDEST_WINDOW:
            found.append(f"reduce-window {size} wide")
    found += [f"{name}" for name in ("rng", "rng-bit-generator", "while", "conditional", "infeed", "outfeed") if module.counts[name]]
    for i in module.entry.values():
        if i.opcode == "sort":
            found += _sorted(module, i)
        if i.opcode == "custom-call":
            found.append(f"custom-call {re.findall(r'custom_call_target=[^,]*', i.rest)}")
        if i.opcode == "constant" and re.search(r"\binf\b", i.rest):
            users = {u.opcode for name in _spread(module, i.name) for u in module.users(name)} - {"broadcast"}
            if users - {"reduce", "reduce-window", "all-reduce", "reduce-scatter"}:  # where a maximum begins is no number of the data
                found.append(f"an infinite constant, used by {sorted(users)}")
    return found


def _spread(module: Module, name: str) -> list[str]:
    """A constant and its broadcasts."""
    return [name, *(u.name for u in module.users(name) if u.opcode == "broadcast")]


def _sorted(module: Module, i: Instruction) -> list[str]:
    keys = module.entry[i.operands[0]]
    if keys.dtype not in ("f32", "bf16", "f16"):
        return [f"a sort of {keys.dtype}"]
    taken = [
        u.shape[-1] for part in module.users(i.name) if part.opcode == "get-tuple-element"
        for u in module.users(part.name) if u.opcode == "slice"
    ]  # fmt: skip
    return [] if taken and max(taken) <= MOST_SORTED else [f"a whole sort of {list(keys.shape)}, not of the largest"]
