"""The Neuron device: graphs compiled ahead, all local ranks in one process. Not run on hardware."""
