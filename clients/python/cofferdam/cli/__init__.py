"""`cofferdam` on the shell."""
