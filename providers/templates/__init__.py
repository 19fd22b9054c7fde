"""Templates: what sandboxes have beyond the programs of the machine, by declaration."""
