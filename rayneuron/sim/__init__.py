"""The policies and the scheduler on a virtual clock: what a fleet of engines would do, in seconds instead of hours."""
