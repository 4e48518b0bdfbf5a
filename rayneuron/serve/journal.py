"""What a replica writes into its log about calls: one line a call, unknown fields once, prompts only where that is asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from rayneuron.api import call as api
from rayneuron.serve.flight import Flight

log = logging.getLogger(__name__)

UNKNOWN_FIELDS = 100  # names of unknown request fields that are logged


class Journal:
    """One replica's. `prompts`: whether prompts are written too."""

    def __init__(self, prompts: bool) -> None:
        self._prompts = prompts
        self._unknown: set[str] = set()

    def unknown(self, names: Iterable[str]) -> None:
        """Each name once a process, and no more names than an honest client has: a log is not the client's to fill."""
        if len(self._unknown) >= UNKNOWN_FIELDS:
            return
        for name in {name[:64] for name in names} - self._unknown:
            self._unknown.add(name)
            log.warning("request field %r is not known here and was ignored (said once)", name)

    def ended(self, call: api.Call, flight: Flight, arrival_s: float) -> None:
        """One line of what a call was and took."""
        tokens = sum(count for leg in flight.legs.values() for count in leg.tokens.values())
        prompt = sum(len(request.prompt_ids) for request in call.requests)
        state = type(flight.error).__name__ if flight.error else "complete" if flight.unfinished == 0 else "aborted"
        took_s = time.monotonic() - arrival_s
        log.info("%s %s: %d prompt tokens, %d generated, %d choices, %.3f s", call.id, state, prompt, tokens, call.choices, took_s)
        if self._prompts:
            for request in call.requests:
                log.info("%s prompt: %r", request.id, call.text.decode(request.prompt_ids, skip_special_tokens=False))
