"""The CPU's own ops: C++ kernels at memory speed whose results do not depend on the batch.

`library` builds and loads them, `packing` lays weights out for them, `ops` are the verbs of `models.ops`, `stack` runs whole layers.
"""
