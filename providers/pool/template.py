"""What a sandbox is made for: a language, its limits, and what is loaded beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from providers.base import Limits

WORKSPACE = "/workspace"

LANGUAGES = ("python", "nodejs", "bash")
ALIASES = {"javascript": "nodejs", "js": "nodejs", "node": "nodejs", "py": "python", "sh": "bash"}


def normalize_language(language: str) -> str:
    """The one name we use for a language: `javascript` and `nodejs` are the same interpreter."""
    return ALIASES.get(language, language)


@dataclass(frozen=True)
class Template:
    """One kind of sandbox. `command` is the interpreter's argument list inside the sandbox."""

    name: str
    language: str
    command: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()

    def guest_argument(
        self,
        *,
        workspace: str,
        watch_memory: bool,
        uid: int | None = None,
        separate_users: bool = False,
    ) -> str:
        """argv[1] of the guest supervisor.

        `uid` is the user that user code runs as when the supervisor starts as root. The supervisor
        becomes it too, unless `separate_users` says that process 1 is not safe from its own user's
        signals (gVisor). `watch_memory` makes it bound the memory itself where no cgroup does.
        """
        limits = self.limits
        described: dict[str, Any] = {
            "language": self.language,
            "command": list(self.command),
            "preload": list(self.preload),
            "workspace": workspace,
            "uid": uid,
            "separate_users": separate_users,
            "watch_memory": watch_memory,
            "limits": {
                "file_bytes": limits.file_bytes,
                "open_files": limits.open_files,
                "processes": limits.processes,
                # Only a backstop against one huge allocation: interpreters reserve far more than
                # they use, so the verdict on memory belongs to the cgroup or the supervisor.
                "data_bytes": 4 * limits.memory_bytes + (1 << 30),
            },
        }
        return json.dumps(described, separators=(",", ":"))
