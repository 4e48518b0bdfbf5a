"""Models that sleep and wake on the cores of a host."""
