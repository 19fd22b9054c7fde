"""Code of smolagents' agents, run through the door for E2B's SDKs."""

from __future__ import annotations

from smolagents.remote_executors import E2BExecutor


class CofferdamExecutor(E2BExecutor):
    """E2B's executor, which is told where to go by E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY."""

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """The sandbox's image brings packages: inside there is neither a network nor `!pip`."""
        return additional_imports
