"""Templates: what sandboxes have beyond the programs of the machine, locked and built by content."""
