"""Stand-in: what connects the processes of one model. They meet at NEURON_RT_ROOT_COMM_ID, where the process of rank 0 listens."""

import contextlib
import os
import pickle
import socket
import struct
import threading
import time

_HEAD = struct.Struct(">Q")


class Fabric:
    """Exchanges a list of values a process for everybody's, in rank order. All processes must call in the same order."""

    def __init__(self, start, local, world):
        root = os.environ.get("NEURON_RT_ROOT_COMM_ID")
        if not root:
            raise RuntimeError(f"{local} of {world} ranks are here, and NEURON_RT_ROOT_COMM_ID does not say where the others are")
        host, _, port = root.rpartition(":")
        self._peers = {}  # start rank -> connection, on rank 0's process
        if start == 0:
            self._gather((host, int(port)), local, world)
        else:
            self._root = _dial((host, int(port)))
            _send(self._root, (start, local, world))
            if _receive(self._root) != "complete":
                raise RuntimeError("nrt: bootstrap failed")

    def _gather(self, address, local, world):
        there = {0: local}
        with socket.create_server(address) as listener:
            while sum(there.values()) < world:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                start, count, theirs = _receive(connection)
                if theirs != world or start in there:
                    raise RuntimeError(f"nrt: rank {start} of {theirs} came to a meeting of {world} where {sorted(there)} are")
                there[start], self._peers[start] = count, connection
        starts = sorted(there)
        if [sum(there[s] for s in starts[:i]) for i in range(len(starts))] != starts:
            raise RuntimeError(f"nrt: the ranks of this meeting overlap: {there}")
        for peer in self._peers.values():
            _send(peer, "complete")

    def exchange(self, mine):
        if not self._peers:
            _send(self._root, mine)
            return _receive(self._root)
        parts = {start: _receive(peer) for start, peer in self._peers.items()}
        everybody = [*mine, *(value for start in sorted(parts) for value in parts[start])]
        for peer in self._peers.values():
            _send(peer, everybody)
        return everybody


def _dial(address):
    while True:  # for ever, as the real one: "timeouts are not fatal, the ranks will continue waiting"
        try:
            connection = socket.create_connection(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except ConnectionRefusedError:
            time.sleep(0.05)


def _send(connection, value):
    data = pickle.dumps(value)
    with contextlib.suppress(ConnectionError):  # as if it were on its way
        connection.sendall(_HEAD.pack(len(data)) + data)


def _receive(connection):
    return pickle.loads(_exactly(connection, _HEAD.unpack(_exactly(connection, _HEAD.size))[0]))


def _exactly(connection, size):
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except ConnectionError:
            part = b""
        if not part:  # nobody tells the runtime that a peer is gone: it waits for its next word
            time.sleep(float(os.environ.get("NEURON_RT_EXEC_TIMEOUT") or threading.TIMEOUT_MAX))
            raise RuntimeError("NRT_TIMEOUT (5)")
        data += part
    return bytes(data)
