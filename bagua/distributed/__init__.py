"""Process groups and collectives on tensors, and how processes become a world."""
