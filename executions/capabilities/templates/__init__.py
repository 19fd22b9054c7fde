"""Templates: what sandboxes have beyond the programs of the machine, built by content."""
