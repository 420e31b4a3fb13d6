"""Sandboxes: the protocol, and the implementation by Linux namespaces on the local machine."""
