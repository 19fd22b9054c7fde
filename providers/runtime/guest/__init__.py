"""What runs inside a sandbox: standard library only, and few modules of that.

Every sandbox pays for these imports before it is ready, so `json`, `re`, `signal`, `subprocess`
and `typing` are avoided: together they double the start of an interpreter.
"""
