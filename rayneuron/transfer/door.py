"""Where connections come in: whoever shows the application's token first is served, on a thread of its own; all others are counted."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from rayneuron import wire
from rayneuron.errors import RayNeuronError
from rayneuron.transfer.messages import Knock

log = logging.getLogger(__name__)

KNOCK_S = 5.0
MOST = 512  # connections at once


class Door:
    """A listener of this host and, with `ip`, one of the network. `serve` gets the channel, of `kinds`, and the knock."""

    def __init__(self, token: bytes, ip: str | None, kinds: Any, serve: Callable[[wire.Channel[Any], Knock], None]) -> None:
        self.refused = 0  # those who said what is no message, or not the token
        self._token, self._kinds, self._serve = token, kinds, serve
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._listeners = [wire.listen(), *([wire.listen(ip)] if ip is not None else [])]
        self.addresses = tuple(wire.address(listener) for listener in self._listeners)  # the nearest first
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="rayneuron-door", daemon=True).start()

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            self._closing = True
            for connection in (*self._listeners, *self._open):
                wire.shut(connection)
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closing or len(self._open) >= MOST:
                    connection.close()
                    continue
                self._open.add(connection)
            threading.Thread(target=self._meet, args=(connection,), name="rayneuron-guest", daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        channel: wire.Channel[Any] = wire.Channel(connection, self._kinds, wire.FIRST_BYTES, sealed=True)
        try:
            knock = channel.receive(KNOCK_S)
            if not isinstance(knock, Knock) or not wire.same_token(knock.token, self._token):
                raise wire.WireError("it has not shown the token")
            self._serve(channel, knock)
        except wire.Closed:
            pass
        except (wire.WireError, RayNeuronError, TimeoutError) as wrong:
            self.refused += 1
            log.warning("a connection was refused: %s", wrong)
        except OSError:
            pass  # broken, from there or from here
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
