"""What providers over a network share: programs, bounded output, deadlines, whose a sandbox is."""
