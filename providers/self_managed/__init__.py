"""The provider that runs code in the sandboxes of a pool service."""
