"""What the desk is asked for a request, and what it knows of accounts and replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rayneuron import hashing
from rayneuron.errors import RequestError
from rayneuron.frames import Card
from rayneuron.gateway.link import SILENT_S
from rayneuron.gateway.ways import Way, Wishes
from rayneuron.gateway_config import GatewayConfig
from rayneuron.policies.choice import GatewayAsk
from rayneuron.policies.desk_limits import DeskLimits
from rayneuron.policies.fairness import AccountShare
from rayneuron.policies.step_times import flat
from rayneuron.types import Profile

SESSIONS = (b"x-session-id", b"x-session-affinity", b"x-correlation-id")  # headers that say what belongs together


def ask_of(way: Way, card: Card, now_s: float, again: bool = False) -> GatewayAsk:
    """A way, as the desk sees it. `again`: it was begun before."""
    request, wishes, hashes = way.request, way.wishes, tuple[bytes, ...]()
    if card.model is not None:
        ids = request.prompt_ids if not way.alone else [*request.prompt_ids, *way.replays[way.open[0]].ids]
        root = hashing.root(card.model, request.adapter or "", request.cache_salt)
        hashes = tuple(hashing.chain(ids, card.block, root, []))
    most = request.params.max_tokens
    return GatewayAsk(
        key=way.key,
        account=wishes.account,
        prompt=way.tokens,
        most=card.length - len(request.prompt_ids) if most is None else most,
        rows=len(way.open),
        hashes=hashes,
        block=card.block,
        session=wishes.session,
        left_s=None if request.deadline_s is None else request.deadline_s - now_s,
        ttft_ms=wishes.ttft_ms,
        tpot_ms=wishes.tpot_ms,
        again=again,
        avoid=way.avoid,
    )


def profile_of(card: Card) -> Profile:
    """What the steps of a replica take, as it has measured; else the same for all of them."""
    return card.profile or flat(card.rows, card.length)


def equal(one: Card, other: Card) -> bool:
    """Whether two replicas are the same on one node: what either measured more or less, the moment did."""
    if one.profile is None or other.profile is None or one.chosen != other.chosen:
        return False
    shapes = [(p.batch, p.lengths, p.context, p.prefix, p.chunk, p.padded) for p in (one.profile, other.profile)]
    return shapes[0] == shapes[1] and one.address.rpartition(":")[0] == other.address.rpartition(":")[0]


def shares_of(gateway: GatewayConfig) -> dict[str, AccountShare]:
    """What each account is due in one of the gateways."""

    def part(most: int | None) -> int | None:
        return None if most is None else max(1, most // gateway.serving.replicas)

    return {name: AccountShare(t.weight, t.tier, part(t.max_running), part(t.max_waiting)) for name, t in gateway.tenants.items()}


def desk_limits(gateway: GatewayConfig) -> DeskLimits:
    """What a gateway's file says of its desks."""
    said = gateway.admission
    ttl_s = gateway.routing.session_ttl_s
    return DeskLimits(gateway.routing.admit_ms, said.max_wait_s, said.max_queue_tokens, silent_s=SILENT_S, session_ttl_s=ttl_s)


def wishes_of(headers: Mapping[bytes, bytes], account: str, say: Callable[[str], None] | None) -> Wishes:
    """What a call's headers say of it. Raises RequestError."""
    session = next((headers[name] for name in SESSIONS if name in headers), b"")[:256].decode("latin-1")
    return Wishes(account, session, _goal(headers, b"x-slo-ttft-ms"), _goal(headers, b"x-slo-tpot-ms"), say)


def _goal(headers: Mapping[bytes, bytes], name: bytes) -> float | None:
    if name not in headers:
        return None
    said = headers[name].decode("latin-1")
    try:
        goal = float(said)
    except ValueError:
        goal = math.nan
    if not 0 < goal < math.inf:
        raise RequestError(f"{name.decode()} must be a number of milliseconds above 0, got {said!r}", param=name.decode())
    return goal
