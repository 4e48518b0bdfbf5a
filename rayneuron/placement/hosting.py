"""Which models of a host fit on it together: what `plan` shows, and what is refused because it never could. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rayneuron.errors import ConfigError
from rayneuron.gateway_config import GatewayConfig, hosted_model
from rayneuron.placement.instances import Instance, instance
from rayneuron.policies import packing

MOST_SETS = 12  # models, of which every set is looked at


@dataclass(frozen=True, slots=True)
class HostedSize:
    """One model of a host: cores of a seat, and seats it always has."""

    size: int
    least: int = 0


def wanted_of(gateway: GatewayConfig) -> dict[str, HostedSize]:
    """The models of a gateway's host."""
    found = {}
    for name, listed in gateway.hosted.items():
        least = max(listed.min, 1) if listed.pinned else listed.min
        found[name] = HostedSize(hosted_model(gateway, name).tensor_parallel, least)
    return found


def check(kind: str, nodes: int, models: Mapping[str, HostedSize]) -> None:
    """Refuse a model that fits no run of cores, and those that are always awake and do not fit together. Raises ConfigError."""
    made = instance(kind)
    for name, one in models.items():
        try:
            made.check_degree(one.size)
        except ConfigError as wrong:
            raise ConfigError(f"{name}, a model of the host: {wrong.message}", param="tensor_parallel") from None
        if one.size > made.cores:
            raise ConfigError(f"{name}, a model of the host: {one.size} cores fit no run of the {made.cores} of {made.name}")
    always = [(name, one.size) for name, one in models.items() for _ in range(one.least)]
    if together([size for _, size in always], made, nodes) is None:
        sum_of = " + ".join(f"{size} ({name})" for name, size in always)
        total = sum(size for _, size in always)
        why = "" if total > made.cores * nodes else ", no more, but no way to lay them out in aligned runs"
        raise ConfigError(
            f"models that are always awake (pinned or min) want {sum_of} = {total} cores of the {made.cores * nodes} of "
            f"{nodes} x {made.name}{why}; unpin one of them, write min: 0, or more nodes",
            param="models",
        )


def together(sizes: Sequence[int], kind: Instance, nodes: int) -> list[tuple[int, int]] | None:
    """(node, first core) for each size, in order; None where they do not fit at once."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    placed = _laid([sizes[i] for i in order], [frozenset(range(kind.cores))] * nodes, kind)
    return None if placed is None else [placed[order.index(i)] for i in range(len(sizes))]


def _laid(sizes: Sequence[int], free: Sequence[frozenset[int]], kind: Instance) -> list[tuple[int, int]] | None:
    """By trying: the run that spoils least first, then every other."""
    if not sizes:
        return []
    if sum(sizes) > sum(map(len, free)):
        return None
    seen = set()
    for node, cores in enumerate(free):
        best = packing.choose(cores, sizes[0], kind.cores, kind.kept)
        for start in sorted(packing.runs(cores, sizes[0], kind.cores), key=lambda at: (at != best, at)):
            left = cores - set(range(start, start + sizes[0]))
            state = (tuple(len(packing.runs(left, size, kind.cores)) for size in kind.kept), len(left), cores)
            if state in seen:
                continue  # as good as one that did not work
            seen.add(state)
            rest = _laid(sizes[1:], [*free[:node], left, *free[node + 1 :]], kind)
            if rest is not None:
                return [(node, start), *rest]
    return None


def describe(gateway: GatewayConfig) -> Iterator[str]:
    """Lines for people: what may be awake at the same time, the largest sets first."""
    assert gateway.host is not None
    models, made, nodes = wanted_of(gateway), instance(gateway.host.instance), gateway.host.nodes
    check(gateway.host.instance, nodes, models)
    yield f"host: {nodes} x {made.name}, {made.cores * nodes} cores for {len(models)} models that may sleep:"
    for name, one in models.items():
        always = f", always {one.least}" if one.least else ""
        yield f"  {name}: {one.size} cores a seat{always}; {len(packing.runs(range(made.cores), one.size, made.cores)) * nodes} places"
    if len(models) > MOST_SETS:
        yield f"  (too many models to list what fits together: more than {MOST_SETS})"
        return
    yield "awake at the same time:"
    for names in _largest(models, made, nodes):
        used = sum(models[name].size for name in names)
        asleep = [name for name in models if name not in names]
        yield f"  {' + '.join(names)}: {used} of {made.cores * nodes} cores" + (f"; {', '.join(asleep)} asleep" if asleep else "")


def _largest(models: Mapping[str, HostedSize], kind: Instance, nodes: int) -> list[tuple[str, ...]]:
    """Sets of models that fit at once and to which none can be added, each with those that are always awake."""
    always = [name for name, one in models.items() if one.least]
    found: list[tuple[str, ...]] = []
    for count in range(len(models), 0, -1):
        for names in itertools.combinations(models, count):
            if set(always) <= set(names) and not any(set(names) < set(larger) for larger in found):
                sizes = [models[name].size for name in names for _ in range(max(1, models[name].least))]
                if together(sizes, kind, nodes) is not None:
                    found.append(names)
    return found
