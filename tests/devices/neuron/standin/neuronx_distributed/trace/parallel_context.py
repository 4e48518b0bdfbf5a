"""Stand-in: the world a graph is traced for."""

LEGAL = {"inf2": (1, 2, 4, 8, 12, 24), "trn1": (1, 2, 4, 8, 16, 32), "trn2": (1, 2, 4, 8, 16, 32, 64)}
_STACK = []


def size() -> int:
    """Ranks of the world being traced for."""
    if not _STACK:
        raise AssertionError("parallel state is not initialized: trace inside NxDParallelState")
    return _STACK[-1].tensor_model_parallel_size


class NxDParallelState:
    def __init__(
        self,
        world_size=1,
        rank=0,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        lnc_size=None,
    ):
        from torch_neuronx.utils import get_platform_target

        legal = LEGAL[get_platform_target()]
        if tensor_model_parallel_size not in legal:
            raise RuntimeError(f"unsupported topology: {tensor_model_parallel_size} ranks; {get_platform_target()} has {legal}")
        if world_size != tensor_model_parallel_size * pipeline_model_parallel_size:
            raise RuntimeError(f"world_size {world_size} is not divisible into the groups asked for")
        self.tensor_model_parallel_size, self.world_size = tensor_model_parallel_size, world_size

    def __enter__(self):
        _STACK.append(self)
        return self

    def __exit__(self, *_):
        _STACK.remove(self)
