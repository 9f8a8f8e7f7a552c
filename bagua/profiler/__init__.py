"""What a rank has done, and when: recorded, saved as a trace, compared between ranks."""
