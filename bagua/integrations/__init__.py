"""Bagua under trainers: one module for each, imported by its name, which needs that trainer's package."""
