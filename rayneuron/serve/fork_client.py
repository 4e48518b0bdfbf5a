"""What Ray starts as a worker where there is a fork server: asks it for a fork that becomes the worker, else becomes that itself.

Runs alone (`python -I -S`), so that it costs milliseconds.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

STANDARD = (0, 1, 2)
PEER = struct.Struct("=3i")  # of a socket: process, user, group


def main(address: str, program: str, *words: str) -> None:
    """Return once a fork is the worker `program` with `words`; where there is none, never."""
    own = any(word.startswith("--runtime-env-hash=") and word != "--runtime-env-hash=0" for word in words)  # its modules may be others
    if own or not forked(address, "\0".join([program, *words])):
        os.execv(sys.executable, [sys.executable, program, *words])


def forked(address: str, command: str) -> bool:
    """Whether the server has done it: it says so when the fork is of this process's group, where Ray looks for it."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address.replace("@", "\0"))
            _, user, _ = PEER.unpack(server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
            if user != os.getuid():
                return False
            socket.send_fds(server, [b"\0"], STANDARD)
            server.sendall(os.fsencode(command))
            server.shutdown(socket.SHUT_WR)
            return server.recv(1) != b""
        except OSError:
            return False


if __name__ == "__main__":
    main(*sys.argv[1:])
