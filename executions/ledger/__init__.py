"""The ledger: what happened, in one sequence that cannot be changed without it showing."""

from __future__ import annotations

from executions.ledger.append import append
from executions.ledger.keyring import LedgerUnavailable
from executions.ledger.sealing import append_execution, receipt_of

__all__ = ["LedgerUnavailable", "append", "append_execution", "receipt_of"]
