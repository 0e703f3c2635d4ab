"""Tells the pool that a process is dead, so that others need not wait until its lease has run out."""

import asyncio

from penstock.launcher.layout import Child
from servicekit.bus import Bus, BusFull, BusUnavailable
from servicekit.bus.calls import ListSessions, Renew

PATIENCE_S = 1.0


async def tell_dead(bus: Bus, child: Child) -> None:
    """Ends the leases of a child that has ended, and was not started again yet.

    What it sent before it died is still taken, until somebody takes over. Where the server does not answer soon, leases
    run out by themselves.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            connection = await bus.connect_async()
            try:
                sessions = await connection.call(ListSessions())
                dead = [each for each in sessions if (each.kind, each.name) == (child.kind, child.session_name)]
                await connection.execute([Renew(each.sid, 0) for each in dead if each.alive])
            finally:
                await connection.close()
    except (BusUnavailable, BusFull, TimeoutError):
        return
