"""The link between the head and a node, which also reports the end of a connection.

Owns: the kernel's probes, ZeroMQ's events, the keys.  Does not know: messages.
"""

import logging
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.workers.keys import ClientKeys, KeyPair
from engine.workers.link import MAX_LOGGED_REFUSALS, Incoming, SocketLink

log = logging.getLogger(__name__)

CAPACITY = 1024  # messages: two per rank and generation
PROBES = 4  # of a silent connection, before it is closed
RETRY_MS = 500
SETTLE_S = 0.05  # ZeroMQ reports the end of a connection shortly before it acts on it
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class MachineLink(SocketLink[Incoming]):
    """One end of a link between machines.

    disconnected: called on the loop after the end of any connection, a refused one as well.
    silence_s: a connection ends when the other machine does not answer for so long."""

    def __init__(
        self,
        name: str,
        context: "zmq.Context[Any]",
        accepts: Any,
        deliver: Callable[[Incoming], None],
        disconnected: Callable[[], None],
        *,
        silence_s: float,
    ) -> None:
        super().__init__(name, context, accepts, deliver, capacity=CAPACITY)
        self._disconnected = disconnected
        # The kernel notices a machine that is gone.  ZeroMQ's own heartbeats abort the process (an assertion in 4.3.5)
        # when a second process with the same keys connects and leaves.
        self._socket.tcp_keepalive, self._socket.tcp_keepalive_cnt = 1, PROBES
        self._socket.tcp_keepalive_idle = self._socket.tcp_keepalive_intvl = max(1, int(silence_s / PROBES))
        self._socket.tcp_maxrt = int(1000 * silence_s)
        self._socket.reconnect_ivl = RETRY_MS
        self._events = self._socket.get_monitor_socket(REFUSED | zmq.EVENT_DISCONNECTED)
        self._events_fd = int(self._events.getsockopt(zmq.FD))
        self._loop.add_reader(self._events_fd, self._read_events)
        self._read_events()  # ZeroMQ reports a change only after it was asked

    @property
    def has_peer(self) -> bool:
        """Whether the end that listens has a connection that it uses."""
        has_peer = bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT)
        self._look_again()
        return has_peer

    def close(self, linger_s: float = 0.0) -> None:
        """Close the link, as ``SocketLink`` does."""
        if not self._socket.closed:
            self._loop.remove_reader(self._events_fd)
            self._socket.disable_monitor()
            self._events.close(linger=0)
        super().close(linger_s)

    def _read_events(self) -> None:
        while not self._socket.closed and self._events.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            if not recv_monitor_message(self._events)["event"] & REFUSED:
                self._loop.call_later(SETTLE_S, self._report_end)
            elif self.num_refused < MAX_LOGGED_REFUSALS:
                self.num_refused += 1
                log.warning("link %s: the other end was refused: it does not have our placement.cluster_key", self.name)

    def _report_end(self) -> None:
        if not self._socket.closed:
            self._disconnected()


def node_keys(cluster_key: str, node: int) -> tuple[KeyPair, ClientKeys]:
    """The keys of both ends of one node's link: the head's pair, and what the node needs.  Each side derives them."""
    head = KeyPair.derive(cluster_key, f"node/{node}/head")
    return head, ClientKeys(KeyPair.derive(cluster_key, f"node/{node}/node"), head.public)
