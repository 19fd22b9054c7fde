"""Where code runs. Imports no Django: the pool service needs this and nothing else."""
