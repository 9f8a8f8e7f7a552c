"""The verbs of federated programs: what crosses ranks, what clients compute, and the derivatives of both."""
