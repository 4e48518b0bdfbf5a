"""How fast a gateway's queue moves, while there is one."""

from __future__ import annotations

_RATE_S = 0.5  # over which it is taken
_LEAST, _SHARE = 0.05, 0.3  # the latter of the newest


class QueueSpeed:
    """`ms` of devices that a replica works off in a millisecond; 0: nobody knows. Time is an argument."""

    __slots__ = ("_since_s", "ms", "sent_ms")

    def __init__(self) -> None:
        self.ms = self.sent_ms = self._since_s = 0.0

    def measure(self, waits: bool, replicas: int, now_s: float) -> None:
        """Somebody waits, or nobody does; `sent_ms` have gone to the replicas since it was taken last."""
        if not waits or now_s < self._since_s:
            self.sent_ms, self._since_s = 0.0, now_s
        elif now_s - self._since_s >= _RATE_S and replicas:
            speed = self.sent_ms / (1e3 * (now_s - self._since_s) * replicas)
            self.ms = max(_LEAST, speed if not self.ms else self.ms + _SHARE * (speed - self.ms))
            self.sent_ms, self._since_s = 0.0, now_s
