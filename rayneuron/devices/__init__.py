"""Where graphs run: open a device by its name."""
