"""The `e2b` provider: E2B's cloud, or anything that speaks its protocol, through its own SDK."""
