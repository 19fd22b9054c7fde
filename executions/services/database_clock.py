"""The database's clock: what decides where several hosts share one database, and none of theirs."""

from __future__ import annotations

# As Django's `Now()` has it, for statements that are written out.
NOW = {
    "sqlite": "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')",
    "postgresql": "STATEMENT_TIMESTAMP()",
}
