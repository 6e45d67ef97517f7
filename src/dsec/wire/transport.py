"""A connected Unix socket put under an asyncio Protocol."""

from __future__ import annotations

import asyncio
import socket


async def connect(protocol: asyncio.BaseProtocol, sock: socket.socket) -> None:
    """The transport takes the socket, and closes it when this is cancelled.

    A protocol must neither write nor close inside connection_made: when the other end has gone already,
    uvloop closes the descriptor before it knows the socket object, which later closes the same number
    again, whosever it is then.
    """
    await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=sock)
