"""The records of what a rank has done, and when: saved as a trace, and compared between ranks."""
