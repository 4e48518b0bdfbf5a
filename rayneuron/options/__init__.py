"""Option files of other systems, told as the args of a deployment: one table a system, every name applied, noted or refused."""
