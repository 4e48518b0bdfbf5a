"""Sums and gathers between the ranks of a group: shared memory on one host, gloo across hosts."""
