"""KV on its way from the pool that computed it to the pool that goes on with it."""
