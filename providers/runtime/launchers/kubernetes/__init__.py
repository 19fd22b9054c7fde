"""Sandboxes in the Pods of a Kubernetes cluster, reached over the API server."""
