"""Federated programs as data: traces, graphs, and the platforms that run them."""
