"""Where KV lives: blocks, the prefix index over them, and the manager that leases, publishes and forgets.

None of these names needs torch; the modules that hold or move bytes do, and are imported by their own names.
"""

from engine.cache.block import Block, Lease, Scope
from engine.cache.laws import violations
from engine.cache.manager import BlockManager
from engine.cache.match import Match

__all__ = ["Block", "BlockManager", "Lease", "Match", "Scope", "violations"]
