"""Several processes that act as one runner: cores, layout, environment, workers."""
