"""A launcher in an event loop of its own, whose sandboxes a test starts and uses in turn."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from providers.values import ExecutionResult, Job, SandboxLimits


class LauncherLoop:
    """Sandboxes of a launcher that is prepared. A run has `seconds` where the test names none."""

    loop: BackgroundLoop
    launcher: Launcher
    seconds = 20.0

    def template(self, language: str = "python", **limits: int) -> Template:
        """A language's template with these limits."""
        bounds = replace(SandboxLimits(), **limits)
        return make_template(language, language, self.launcher, bounds)

    def start(self, language: str = "python", **limits: int) -> Sandbox:
        """A warm sandbox of its own."""
        return self.loop.call(Sandbox.start(self.launcher, self.template(language, **limits)))

    def run_in(
        self, sandbox: Sandbox, code: str, *, timeout: float = 0, **job: Any
    ) -> ExecutionResult:
        """Run dedented code in a sandbox."""
        language = sandbox.template.language
        wanted = Job(textwrap.dedent(code), language, timeout or self.seconds, **job)
        return self.loop.call(sandbox.run(wanted))

    def run(self, code: str, language: str = "python", **options: Any) -> ExecutionResult:
        """Run dedented code in a fresh sandbox, and destroy that."""
        limits = {name: options.pop(name) for name in list(options) if hasattr(SandboxLimits, name)}
        sandbox = self.start(language, **limits)
        try:
            return self.run_in(sandbox, code, **options)
        finally:
            self.loop.call(sandbox.destroy())
