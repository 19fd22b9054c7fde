"""Two hosts on one PostgreSQL and one Redis, callers, faults, and what must hold after all of it.

`make chaos` runs it for long; `tests/faults/test_chaos.py` runs each fault once.
"""
