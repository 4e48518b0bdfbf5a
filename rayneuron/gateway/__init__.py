"""The gateway: one address for several models and replicas, which chooses, waits fairly and repairs."""
