"""Profiles of models: what a training step costs, layer by layer, and a model that takes as long."""
