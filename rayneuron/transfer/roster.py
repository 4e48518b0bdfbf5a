"""The prefill replicas that a decode replica knows: who is there, what each has to do, and of which prefixes it has KV already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from threading import Lock
from typing import Any

from rayneuron.news import KvNews
from rayneuron.policies.pools import Queue
from rayneuron.policies.prefix_index import PrefixIndex
from rayneuron.transfer.layout import KvLayout
from rayneuron.transfer.peers import PrefillPeer


class Roster:
    """Kept by one thread; `queues` and `get` are for the engine's too. `post` is given what peers say (`PrefillPeer`'s `heard`)."""

    def __init__(self, token: bytes, layout: KvLayout, post: Callable[[PrefillPeer, Any], None]) -> None:
        self._token, self._layout, self._post = token, layout, post
        self._peers: dict[str, PrefillPeer] = {}
        self._numbers = count()
        self._index, self._reading = PrefixIndex(), Lock()

    def get(self, name: str) -> PrefillPeer | None:
        """By its name."""
        return self._peers.get(name)

    def welcomed(self) -> list[PrefillPeer]:
        """Those who can be asked."""
        return [peer for peer in [*self._peers.values()] if peer.welcome is not None]

    def queues(self, prompt: int, hashes: Sequence[bytes]) -> list[Queue]:
        """What stands before a prompt at each: what it has in its cache it does not compute, but for the last token."""
        with self._reading:
            groups = self._index.depths(hashes)
            depths = [(peer, self._index.depth(hashes, groups, peer.number)) for peer in self.welcomed()]
        return [Queue(peer.name, peer.queued, max(1, prompt - depth * self._layout.block)) for peer, depth in depths]

    def other(self, than: PrefillPeer) -> PrefillPeer | None:
        """Who else can be asked, the one with least to do."""
        return min((peer for peer in self.welcomed() if peer is not than), key=lambda peer: peer.queued, default=None)

    def meet(self, found: Mapping[str, tuple[str, ...]]) -> None:
        """These are there; those not connected are called."""
        for name, addresses in found.items():
            known = self._peers.get(name)
            if known is None or known.addresses != addresses:
                if known is not None:
                    known.close()
                self._peers[name] = PrefillPeer(name, addresses, next(self._numbers), self._token, self._layout, self._post)

    def learn(self, peer: PrefillPeer, news: KvNews) -> None:
        """Which prefixes it has come to know and to forget."""
        with self._reading:
            heard = self._index.hear(peer.number, news)
        if not heard:
            peer.close()  # a new channel begins with everything

    def lose(self, peer: PrefillPeer) -> None:
        """It is gone; who is not like us is not called again."""
        if self._peers.get(peer.name) is peer and not peer.refused:
            del self._peers[peer.name]
        with self._reading:
            self._index.forget(peer.number)

    def sweep(self) -> None:
        """Now and then: drop what those who are gone had."""
        with self._reading:
            self._index.sweep()

    def close(self) -> None:
        """Hang up everywhere."""
        for peer in self._peers.values():
            peer.close()
