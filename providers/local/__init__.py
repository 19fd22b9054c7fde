"""The `local` provider: sandboxes on this machine, without any daemon."""
