"""What a sandbox is made for: a language, its limits, and what is loaded beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from providers.languages import language_of
from providers.values import SandboxLimits

WORKSPACE = "/workspace"
# Where pip and npm put what a program installs for itself. It stays with the workspace.
OWN_PROGRAMS = f"{WORKSPACE}/.local"
# npm waits for a minute before it tries again, and without a network it may fail at once.
NPM_RETRIES = "npm_config_fetch_retries"


@dataclass(frozen=True)
class Template:
    """One kind of sandbox. `command` is the interpreter's argument list inside the sandbox.

    `interpreter` is which it is, such as `python 3.11.2`, for whoever reads a result.
    `advise` has each result carry remarks on what the program uses (Python only).
    """

    name: str
    language: str
    command: tuple[str, ...] = ()
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    preload: tuple[str, ...] = ()
    advise: bool = False
    interpreter: str = ""

    def guest_argument(
        self,
        *,
        workspace: str,
        watch_memory: bool,
        uid: int | None = None,
        bound_processes: bool = True,
        alone_seconds: float | None = None,
        image: bool = False,
        binds_home: bool = False,
        offers_network: bool = False,
    ) -> str:
        """The template as the guest reads it.

        `uid` is the user that user code becomes when the guest starts as root. `watch_memory`
        makes the supervisor bound the memory itself where no cgroup does. `bound_processes` is
        for where the kernel counts only the sandbox's own, and not all that the user runs.
        `alone_seconds` is how long a guest waits for its host whose channel does not end with it.
        With `image` it stops once its modules are loaded, to be copied, and goes on by a frame.
        With `binds_home` it gives the workspace its other name itself, for which it needs
        CAP_SYS_ADMIN. With `offers_network` it sends the socket of `guest.network` first.
        """
        limits, language = self.limits, language_of(self.language)
        described: dict[str, Any] = {
            "language": self.language,
            "program": language.program if language else "",
            "command": list(self.command),
            "preload": list(self.preload),
            "advise": self.advise,
            "workspace": workspace,
            "workspace_bytes": limits.workspace_bytes,
            "uid": uid,
            "watch_memory": watch_memory,
            **({} if alone_seconds is None else {"alone_seconds": alone_seconds}),
            **({"image": True} if image else {}),
            **({"binds_home": True} if binds_home else {}),
            **({"offers_network": True} if offers_network else {}),
            "limits": {
                "file_bytes": limits.file_bytes,
                "open_files": limits.open_files,
                "processes": limits.processes if bound_processes else None,
                # Only a backstop against one huge allocation: interpreters reserve far more than
                # they use, so the verdict on memory belongs to the cgroup or the supervisor.
                "data_bytes": 4 * limits.memory_bytes + (1 << 30),
            },
        }
        return json.dumps(described, separators=(",", ":"))
