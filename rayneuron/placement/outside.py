"""Cores that a process has taken without the ledger: what neuron-ls says of a device's users where nobody holds its cores here.

The runtime would refuse them when graphs are loaded, and may end the process; a container sees its own devices alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rayneuron import settings
from rayneuron.devices.neuron.releases import VISIBLE
from rayneuron.errors import Busy, ConfigError
from rayneuron.placement import cores
from rayneuron.placement.cores import Chip
from rayneuron.placement.ledger import Grant, Ledger
from rayneuron.policies.packing import compact, runs

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
Look = Callable[[], Sequence[Chip]]


def look(root: Path = Path("/")) -> Sequence[Chip]:
    """The devices of this machine and who uses them; none where this process does, whose runtime keeps its cores, or nobody can say."""
    if settings.bound_cores() is not None:
        return ()
    try:
        return cores.probe(root)[0]
    except ConfigError as problem:
        log.warning("who uses cores outside the ledger is not known: %s", problem)
        return ()


def taken(chips: Sequence[Chip], free: Collection[int]) -> Mapping[frozenset[int], str]:
    """Cores of each device that is used although nobody holds one of them (`free`: by the ledger), and who uses it."""
    used = [chip for chip in chips if chip.users and set(chip.numbers) <= set(free)]
    return {frozenset(chip.numbers): ", ".join(f"pid {pid} ({command})" for pid, command in chip.users) for chip in used}


def said(found: Mapping[frozenset[int], str]) -> str:
    """In words, a user once."""
    users = {who: frozenset().union(*(part for part, other in found.items() if other == who)) for who in found.values()}
    return "; ".join(f"{compact(part)} used by {who}, which is not in the ledger" for who, part in users.items())


def take(ledger: Ledger, size: int, deployment: str, allowed: Collection[int], wait_s: float, looked: Look = look) -> Grant:
    """As `Ledger.take`, of cores that nobody outside it uses; waits up to `wait_s` for a process that is still ending.

    Raises ConfigError and Busy as it does, also with who uses cores outside it.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        found = taken(looked(), ledger.free())
        others = frozenset[int]().union(*found)
        rest, left_s = frozenset(allowed) - others, max(0.0, deadline_s - time.monotonic())
        if not others & set(allowed) or runs(rest, size, ledger.instance.cores):
            try:
                return ledger.take(size, deployment, wait_s=left_s, allowed=rest)
            except Busy as refused:
                raise Busy(f"{refused.message}{'. ' * bool(found)}{said(found)}", param=refused.param, retry_after_s=_PAUSE_S) from None
        if not left_s:
            raise Busy(
                f"{deployment} wants {size} cores of {compact(allowed)}, and {said(found)}: end it, or start Ray with "
                f"{VISIBLE} of cores that are ours",
                param="tensor_parallel", retry_after_s=_PAUSE_S,
            )  # fmt: skip
        time.sleep(min(_PAUSE_S, left_s))
