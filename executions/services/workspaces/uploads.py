"""What uploads that were cut off have left in storage: seen by nobody, and paid for."""

from __future__ import annotations

import logging
import time

from executions.kernel.storage import WORKSPACES, kept

logger = logging.getLogger(__name__)

# No upload takes so long.
_SECONDS = 24 * 3600


def discard_unfinished() -> int:
    """Remove it; how many uploads they were. Of a storage that is away, the next time."""
    try:
        return kept(WORKSPACES).discard_unfinished(time.time() - _SECONDS)
    except OSError as error:
        logger.warning("data of unfinished uploads is still in storage: %s", error)
        return 0
