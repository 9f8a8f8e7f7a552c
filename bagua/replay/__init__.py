"""Profiles of models, what a training step costs layer by layer, and playing them on a network: `bagua bench`."""
