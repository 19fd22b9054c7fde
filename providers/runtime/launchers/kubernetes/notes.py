"""What the next process of a pool has to know of a kept sandbox, as a note at its Pod.

A note is sealed with the pool's key and bound to the Pod's uid: who may read or write Pods learns
nothing of it, can make none, and can move none to another Pod.
"""

from __future__ import annotations

import base64

from providers.aes_gcm import NotOpened, seal, unseal
from providers.runtime.launchers.kubernetes.api import Object
from providers.runtime.launchers.kubernetes.manifest import RECORD_ANNOTATION
from providers.runtime.pool.state_store import SandboxRecord, read_copy


def container_of(pod: Object) -> str:
    """Return the name by which a kept sandbox is remembered."""
    uid: str = pod["metadata"]["uid"]
    return uid.replace("-", "")


class Notes:
    """The notes of one pool. Without a key there are none."""

    def __init__(self, key: str) -> None:
        self._keys = [key] if key else []

    def write(self, remembered: SandboxRecord) -> dict[str, str]:
        """Return the annotations of a record's Pod."""
        if not self._keys:
            return {}
        sealed = seal(self._keys, _context(remembered.container), remembered.to_copy().encode())
        return {RECORD_ANNOTATION: base64.b64encode(sealed).decode()}

    def read(self, pod: Object) -> SandboxRecord | None:
        """Return what a Pod's own note says, None without one that this pool has written."""
        container = container_of(pod)
        annotations = pod["metadata"].get("annotations") or {}
        try:
            sealed = base64.b64decode(str(annotations.get(RECORD_ANNOTATION, "")), validate=True)
            copy = unseal(self._keys, _context(container), sealed).decode()
        except (NotOpened, ValueError):
            return None
        remembered = read_copy(copy)
        return remembered if remembered and remembered.container == container else None


def _context(container: str) -> str:
    return f"sandbox record {container}"
