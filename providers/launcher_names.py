"""The launchers by name. The settings import this, so it imports nothing."""

# How strongly each isolates, by a level of `providers.isolation`, in the order of `auto`. crun and
# runc isolate as bubblewrap does, and start more slowly.
RUNTIMES = {
    "gvisor": "gvisor",
    "bubblewrap": "namespaces",
    "crun": "namespaces",
    "runc": "namespaces",
}
# What `auto` tries, in this order, and what POOL_LAUNCHER may be. What isolates a container or a
# Pod is the choice of the engine or of the cluster.
AUTO = ("docker", *RUNTIMES)
KINDS = ("auto", *AUTO, "kubernetes")
