"""The ledger: what happened, in one sequence that cannot be changed without it showing."""

from executions.services.ledger.append import append
from executions.services.ledger.keyring import LedgerUnavailable
from executions.services.ledger.sealing import append_execution, receipt_of

__all__ = ["LedgerUnavailable", "append", "append_execution", "receipt_of"]
