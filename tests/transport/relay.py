"""Stands between a reader's sockets and their source, and cuts or silences one connection."""

import select
import socket
import threading


class Relay:
    """Carries bytes of TCP connections, numbered from 0 in the order they came."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._silent: set[int] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self, number: int) -> None:
        """End a connection on both sides; whoever dials again is let through."""
        with self._lock:
            self._drop(number)

    def silence(self, number: int) -> None:
        """Carry nothing of a connection any more, in either direction, and keep it open."""
        with self._lock:
            self._silent.add(number)

    def close(self) -> None:
        """End every connection, and the thread."""
        self._closing = True
        self._thread.join()
        for number in list(self._pairs):
            self._drop(number)
        self._listener.close()

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                ends = {
                    end.fileno(): (number, end, other)
                    for number, pair in self._pairs.items()
                    if number not in self._silent
                    for end, other in (pair, pair[::-1])
                }
            ready, _, _ = select.select([self._listener.fileno(), *ends], [], [], 0.01)
            with self._lock:
                for descriptor in ready:
                    if descriptor == self._listener.fileno():
                        self._accept()
                    elif ends[descriptor][0] in self._pairs:
                        self._carry(*ends[descriptor])

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=5.0)
        except OSError:
            near.close()
            return
        self._pairs[self.accepted] = (near, far)
        self.accepted += 1

    def _carry(self, number: int, end: socket.socket, other: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(number)

    def _drop(self, number: int) -> None:
        for end in self._pairs.pop(number, ()):
            end.close()
