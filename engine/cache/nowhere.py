"""Why neither host nor disk has taken a block, in words. It changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.cache.headers import file_bytes

if TYPE_CHECKING:
    from engine.cache.tiers import ColdTiers  # which asks this

OFF, NO_ROOM, FAILED = "is off", "had no room", "could not take it"
SPENT, FAILING = "may write no more today (disk_writes)", "cannot be written to now"


def nowhere(tiers: ColdTiers, amount: int) -> str:
    """What goes on the sentence of why a block left the device, when no tier has just taken its `amount` bytes."""
    host, disk = _host(tiers, amount), _disk(tiers, amount)
    if host == disk == OFF:
        return "; host and disk are off"
    if host == disk == NO_ROOM:
        return ", and host and disk had no room"
    return f"; host {host}, and the disk {disk}"


def _host(tiers: ColdTiers, amount: int) -> str:
    limits = tiers.tier_limits("host")
    if not limits.budget:
        return OFF
    return FAILED if limits.fits(tiers.used("host") + amount) else NO_ROOM


def _disk(tiers: ColdTiers, amount: int) -> str:
    disk = tiers.disk
    if disk.files is None or not tiers.has_disk:
        return OFF
    if not disk.files.writes.allows(amount):
        return SPENT
    if not disk.accepts(amount):
        return FAILING
    stays = tiers.used("disk") - disk.writing_bytes  # what is being written goes when there is need
    if not tiers.tier_limits("disk").fits(stays + file_bytes(amount)):
        return NO_ROOM
    return "is busy" if disk.busy else FAILED
