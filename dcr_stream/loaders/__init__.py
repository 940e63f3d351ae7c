"""Rollout side: native loaders, and applying items through the placement plan."""

from dcr_stream.loaders.apply import apply_item, full_sums, read_back
from dcr_stream.loaders.reachable import reachable_tensors
from dcr_stream.loaders.streamed import StreamedLoad
from dcr_stream.loaders.torch_module import StateDictLoader, TorchLoader

__all__ = [
    "StateDictLoader",
    "StreamedLoad",
    "TorchLoader",
    "apply_item",
    "full_sums",
    "reachable_tensors",
    "read_back",
]
