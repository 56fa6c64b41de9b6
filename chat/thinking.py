"""What becomes of a reply's reasoning. Knows no model and no storage."""

from __future__ import annotations

from typing import Literal

Policy = Literal["preserve", "strip"]
"""Whether the reasoning of earlier replies stays in what the model reads, or leaves it when the next message comes."""
