"""What computes: models, K and V, and the loop that serves them. Knows nothing of chats, users, SQL or HTTP.

The web side needs only the names below; none of them imports torch.
"""

from engine.client import EngineClient, new_request_id
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable, ModelLoadError
from engine.state import EngineState, LoadState

__all__ = [
    "EngineClient",
    "EngineConfig",
    "EngineError",
    "EngineState",
    "EngineUnavailable",
    "LoadState",
    "ModelLoadError",
    "new_request_id",
]
