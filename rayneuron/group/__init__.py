"""Several processes that act as one runner: rendezvous, workers, pipeline, watch."""
