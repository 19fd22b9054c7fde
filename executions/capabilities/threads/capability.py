"""Threads as a capability: pages of the admin."""

from __future__ import annotations

from executions.runs.extensions import Extension


class Threads(Extension):
    pages = ("executions.capabilities.threads.admin",)


CAPABILITY = Threads()
