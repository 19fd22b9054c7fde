"""Warm, single-use sandboxes: launchers start them, the pool keeps a few ready."""
