"""Results whose bits do not depend on what else is in the batch.

Operators, decisions and compiled graphs are told of it in the text of the accuracy, so that graphs of earlier versions
stay valid.
"""

from torch import fx, nn

_WORD = "batch_invariant"
# Why a module or an operator is listed.
NOT_PROMISED = "PyTorch's, whose bits may depend on the batch"
# Modules whose results are numbers of their input, or rounded once from numbers of the same place.
_EXACT = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.Hardtanh,
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
    nn.Unflatten,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.ZeroPad2d,
    nn.ReflectionPad2d,
    nn.ReplicationPad2d,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.UpsamplingNearest2d,
)
# PyTorch's operators of the same kind.
_EXACT_OPERATORS = frozenset(
    "add add_ sub mul div neg abs relu relu_ leaky_relu hardtanh clamp clamp_min clamp_max maximum minimum where le lt"
    " ge gt eq view _unsafe_view reshape permute t transpose clone copy_ contiguous alias detach cat slice select split"
    " split_with_sizes unbind squeeze unsqueeze expand constant_pad_nd reflection_pad2d replication_pad2d pixel_shuffle"
    " pixel_unshuffle max_pool2d_with_indices _low_memory_max_pool_with_offsets upsample_nearest2d empty full arange"
    " _to_copy convert_element_type empty_strided zeros ones scalar_tensor".split()
)


def accuracy_with(accuracy: str | None, batch_invariant: bool) -> str | None:
    """The accuracy as operators take it, which also says whether bits may depend on the batch."""
    if not batch_invariant or is_batch_invariant(accuracy):
        return accuracy
    return _WORD if accuracy is None else f"{accuracy} {_WORD}"


def is_batch_invariant(accuracy: str | None) -> bool:
    """True if an operator's accuracy says that bits must not depend on the batch."""
    return accuracy is not None and accuracy.endswith(_WORD)


def is_promised(module: nn.Module) -> bool:
    """True if a module of PyTorch adds nothing up, so that its bits depend on nothing else in the batch."""
    return type(module) in _EXACT


def others(graph: fx.Graph) -> list[fx.Node]:
    """The calls of PyTorch's operators in a compiled graph whose bits may depend on the batch."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    name = lambda node: str(getattr(node.target, "_opname", None))
    theirs = (node for node in calls if getattr(node.target, "namespace", None) in ("aten", "prims"))
    return [node for node in theirs if name(node) not in _EXACT_OPERATORS]
