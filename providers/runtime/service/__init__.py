"""The pool as an HTTP service: `manage.py pool`."""
