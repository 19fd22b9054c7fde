"""The ledger: what happened, in one sequence that cannot be changed without it showing."""
