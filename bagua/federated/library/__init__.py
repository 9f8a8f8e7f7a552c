"""Tools built on the verbs: aggregators, privacy, sampling, optimizers, metrics, partitions and simulations."""
