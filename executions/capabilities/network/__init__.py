"""Which hosts sandboxes may reach: lists, what became of the attempts, and who may see it."""
