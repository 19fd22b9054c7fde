"""The protocol of E2B's SDKs over sessions: a translation, which holds no rule."""

from __future__ import annotations
