"""What POOL_LAUNCHER may be."""

# The order is that of `auto`. crun and runc isolate as bubblewrap does, and start more slowly.
KINDS = ("auto", "docker", "gvisor", "bubblewrap", "crun", "runc")
