"""The first day on a machine with Neuron cores, as a command: what is not known without one, asked in order."""
