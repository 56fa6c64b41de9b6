"""What computes: models, K and V, and the loop that serves them. Knows nothing of chats, users, SQL or HTTP.

The web side needs only the names below; none of them imports torch.
"""

from engine.client import EngineClient, EngineState, new_request_id
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable, ModelLoadError

__all__ = [
    "EngineClient",
    "EngineConfig",
    "EngineError",
    "EngineState",
    "EngineUnavailable",
    "ModelLoadError",
    "new_request_id",
]
