"""What Ray starts as an agent and nobody may ever ask: waits in its place, and becomes it at the first call. Ends with the raylet.

Runs alone (`python -I -S`), so that it costs milliseconds.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

PORT = "--runtime-env-agent-port=0"
LOOK_PERIOD_S = 1.0


def main(*words: str) -> None:
    """Nothing but wait where there are no `words`; else the address and the port that are kept for it, and the agent's own command."""
    raylet = os.getppid()
    if words:
        address, port, *command = words
        if called(address, int(port), raylet):  # whoever called is let down, and calls again
            os.execv(command[0], [f"{PORT.partition('=')[0]}={port}" if word == PORT else word for word in command])
    while os.getppid() == raylet:
        time.sleep(LOOK_PERIOD_S)


def called(address: str, port: int, raylet: int) -> bool:
    """Wait until somebody has called, False: until the raylet has ended."""
    with socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        while os.getppid() == raylet:
            if select.select([listener], [], [], LOOK_PERIOD_S)[0]:
                return True
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
