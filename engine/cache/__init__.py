"""Where KV lives: blocks, the prefix index over them, and the manager that leases, publishes and forgets.

Nothing here imports torch but `engine.cache.pool`, which is therefore imported by its own name.
"""

from engine.cache.block import Block, Lease, Scope
from engine.cache.laws import violations
from engine.cache.manager import BlockManager, Match

__all__ = ["Block", "BlockManager", "Lease", "Match", "Scope", "violations"]
