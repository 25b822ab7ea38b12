"""A port at which ranks may meet."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_OURS = range(10_000, 32_768)
"""Below those that Linux gives to connections: until the first rank listens, which takes seconds, many may be made."""


def free_port() -> int:
    """One of the loopback that nobody has."""
    for port in random.sample(_OURS, 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    with socket.socket() as listener:  # any that there is, or the reason why there is none
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
        return number
