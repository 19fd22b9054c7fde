"""The API of Agent Sandbox, below /v1, over sessions: a translation, which holds no rule."""

from __future__ import annotations
