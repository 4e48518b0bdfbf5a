"""Where a prompt is computed: here, or by one of the prefill replicas; whichever is expected to have it first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayneuron.types import Profile


@dataclass(frozen=True, slots=True)
class Queue:
    """What stands before a prompt at one place: `queued` tokens of others' prompts; `uncached` tokens of this one that are to be computed
    there; `running` sequences that a prefill there would hold up."""

    name: str
    queued: int
    uncached: int
    running: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds: of a prompt's token, here and there; of a question and its answer; of the copy of a prompt's last chunk.
    `harm`: what a second of prefill costs each sequence that decodes meanwhile, as a share of it."""

    token_s: float
    there_token_s: float
    asking_s: float = 0.001
    tail_s: float = 0.0
    harm: float = 0.1


@dataclass(frozen=True, slots=True)
class Chosen:
    """`peer`: who computes it, "" for here; `terms`: the seconds each place was expected to take, by term; `why` in a word."""

    peer: str
    why: str
    terms: dict[str, dict[str, float]]


def measured(here: Profile, there: Profile) -> Rates:
    """By what a prompt's token takes in the largest prefill step of each."""
    return Rates(_token_s(here), _token_s(there))


def _token_s(profile: Profile) -> float:
    rows, tokens, _, ms = max(profile.prefill, key=lambda point: (point[0] * point[1], -point[2]))
    return ms / 1000 / (rows * tokens)


def choose(here: Queue, peers: Sequence[Queue], rates: Rates | None, local_tokens: int | None = None) -> Chosen:
    """Least seconds win, ties stay here. Prompts of at most `local_tokens` uncached tokens stay too (None: no such limit, 0: none does).

    Without measured rates all but the shortest go, to whom has least to do: what is to be spared is the steps of those who decode here.
    """
    if not peers:
        return Chosen("", "nobody", {})
    if local_tokens is not None:
        if here.uncached <= local_tokens:
            return Chosen("", "short", {})
        return Chosen(min(peers, key=lambda peer: peer.queued + peer.uncached).name, "long", {})
    if rates is None:
        return choose(here, peers, None, LOCAL_TOKENS)
    terms = {"": _here(here, rates), **{peer.name: _there(peer, rates) for peer in peers}}
    best = min(terms, key=lambda name: sum(terms[name].values()))  # the first of equals, and that is here
    return Chosen(best, "faster", terms)


LOCAL_TOKENS = 64  # where nothing has been measured


def _here(queue: Queue, rates: Rates) -> dict[str, float]:
    prefill_s = queue.uncached * rates.token_s
    return {"queue": queue.queued * rates.token_s, "prefill": prefill_s, "harm": rates.harm * queue.running * prefill_s}


def _there(queue: Queue, rates: Rates) -> dict[str, float]:
    token_s = rates.there_token_s
    return {"queue": queue.queued * token_s, "prefill": queue.uncached * token_s, "asking": rates.asking_s, "tail": rates.tail_s}
