"""Stand-in: the platform."""

import os


def get_platform_target(compiler_args=None):
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "inf2")
