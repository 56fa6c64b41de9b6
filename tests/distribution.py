"""Which worker runs which tests, and when: what takes long begins first, so that no worker is left alone at the end,
and the files of a folder that share a server stay together, so that it is started once.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/browser/",)


class Together(LoadFileScheduling):
    """File by file in the order in which they were collected, but those of a folder in `TOGETHER` as one."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by the number of their tests, which puts the longest files last

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)
