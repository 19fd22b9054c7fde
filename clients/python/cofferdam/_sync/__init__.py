# Generated from cofferdam/_async by make_sync.py: do not edit.
"""The client itself."""
