"""Stand-in: what rayneuron asks of torch_neuronx."""

__version__ = "2.9.0.2.12.22436"
