"""Stand-in: what rayneuron asks of neuronx_distributed."""

__version__ = "0.17.26814"
