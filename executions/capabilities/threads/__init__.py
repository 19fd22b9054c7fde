"""Threads: what the agents of vendors and of callers have run, by conversation."""

from __future__ import annotations
