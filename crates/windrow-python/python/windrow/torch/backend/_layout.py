"""The layout of images: the pass that computes a graph in channels-last, and copies of single images."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from windrow.torch._library import OPERATORS
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import VALUE, VIEWS, Convolution, called, convolutions
from windrow.torch.choice.problem import channels_last

_aten = torch.ops.aten
# The operators whose result depends on strides.
_SEEING = ("as_strided", "empty_strided", "view_as", "set_", "resize", "_reshape_alias")


def to_channels_last(module: fx.GraphModule, is_by_kernels: bool, batch_invariant: bool = False) -> None:
    """Converts images to channels-last at the graph's inputs, and results back at its outputs, if that pays and no
    operator depends on strides.

    `is_by_kernels`: PyTorch's kernels compute the rest. Their results may have other strides than the tracer says: on
    the CPU `native_group_norm` gives channels-last for channels-last.
    `batch_invariant`: the number of images must not decide.
    """
    graph = module.graph
    of_images = [conv for conv in convolutions(graph) if conv.is_of_images]
    images = {conv.x for conv in of_images if conv.x.op == "placeholder"}
    if not images or not _pays(of_images, batch_invariant) or any(sees_strides(node) for node in graph.nodes):
        return
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = {node: value(node).stride() for node in output.all_input_nodes if isinstance(value(node), Tensor)}
    are_row_major = [value(node).is_contiguous() for node in (*images, *results)]
    if not all(are_row_major):
        return
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    copy_what_cannot_be_viewed(graph)
    for image in images:
        laid_out = called(graph, inputs[-1].next, _aten.clone.default, image, memory_format=torch.channels_last)
        laid_out.meta[VALUE] = image.meta.get(VALUE)
        # What a graph writes to its input at its end goes to the input itself.
        written = [user for user in image.users if user.target is _aten.copy_.default and user.args[0] is image]
        stay = {laid_out, output, *written}
        image.replace_all_uses_with(laid_out, lambda user, stay=stay: user not in stay)
    propagate = FakeTensorProp(module, value(of_images[0].x).fake_mode).propagate_dont_convert_inputs
    propagate(*map(value, inputs))
    for result, strides in results.items():
        if value(result).stride() != strides:
            row_major = called(graph, output, _aten.clone.default, result, memory_format=torch.contiguous_format)
            output.replace_input_with(result, row_major)
        elif is_by_kernels and result.op != "placeholder" and value(result).dim() > 2:
            output.replace_input_with(result, called(graph, output, _aten.contiguous.default, result))


# On CUDA, f32 is faster in channels-last for at least so many images: networks with 64 images take 0.84 to 0.99 of the
# time, and with one image 0.96 to 1.13. f16 and bf16 are faster for any number: 0.41 to 0.98, and once 1.06.
_IMAGES_ON_CUDA = 8


def _pays(of_images: list[Convolution], batch_invariant: bool) -> bool:
    """True if channels-last is faster. On the CPU it is faster for Windrow's convolutions and PyTorch's pooling, but not
    for bf16 with 1x1 filters. A graph with depthwise filters consists mostly of 1x1 filters."""
    filters = [(value(conv.weight), conv.groups) for conv in of_images]
    first = value(of_images[0].x)
    if all(weight.is_cuda for weight, _ in filters):
        # A graph compiled for any number of images must not depend on the number.
        is_fixed = isinstance(first.shape[0], int) and not batch_invariant
        return first.dtype != torch.float32 or not is_fixed or first.shape[0] >= _IMAGES_ON_CUDA
    if not all(weight.is_cpu for weight, _ in filters):
        return False
    return all(weight.dtype != torch.bfloat16 or weight.shape[1] > 1 or groups == 1 for weight, groups in filters)


def lay_out_images(graph: fx.Graph) -> None:
    """Converts the images of convolutions that are row-major, such as those that PyTorch has enlarged, if the result is in
    channels-last. Inductor then writes them in channels-last at once, and no convolution copies them."""
    converted: dict[fx.Node, fx.Node] = {}
    for conv in convolutions(graph):
        if conv.is_of_images:
            image = converted.get(conv.x) or laid_out(graph, conv.node, conv.x, conv.node)
            converted[conv.x] = image
            conv.node.replace_input_with(conv.x, image)


def lay_out_videos(graph: fx.Graph) -> None:
    """Converts the row-major videos of convolutions with frames before them for kernels that read channels-last. Inductor
    then writes them in channels-last at once, and the kernel copies at most the frames before them. A result is in
    channels-last if it goes to such convolutions alone, and else row-major as before."""
    # The videos in channels-last, by what they were; results that are so stand for themselves.
    converted: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node.target is OPERATORS.conv3d_fused.default]:
        video, *how, _ = node.args
        if video not in converted:
            if not _reads_channels_last(value(video)):
                continue
            converted[video] = _channels_last(graph, node, video)
        copies = _copies_behind(node) if how[_RESIDUAL - 1] is None else None
        new = called(graph, node, node.target, converted[video], *how, copies is None)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        if copies is not None:
            converted[new] = new
            for copy in copies:
                copy.kwargs = {"memory_format": torch.contiguous_format}


# The compute capability of GPUs whose kernels for videos read whole vectors of channels, of so many bytes; those of f32
# read frames before a video only as the video lies.
_HOPPER, _VECTOR = (9, 0), 16
# The place of the residual among the arguments.
_RESIDUAL = 3
# Operators beside pointwise ones that Inductor computes in any layout.
_ANY_LAYOUT = (_aten.sum.dim_IntList, _aten.mean.dim, _aten.expand.default, _aten.slice.Tensor)


def _reads_channels_last(video: Tensor) -> bool:
    """True if a kernel for this row-major video would copy it to channels-last."""
    is_fixed = all(isinstance(n, int) for n in video.shape)
    is_plain = is_fixed and video.is_cuda and video.is_contiguous() and video.numel() > 0
    if not is_plain or video.dtype == torch.float32 or video.shape[1] * video.element_size() % _VECTOR != 0:
        return False
    return torch.cuda.get_device_capability(video.device) == _HOPPER


def _copies_behind(node: fx.Node) -> list[fx.Node] | None:
    """The row-major copies of a result, if Inductor computes everything between it, them and videos of further
    convolutions; None if anything else reads it, such as a result of the graph."""
    copies, seen, ahead = list[fx.Node](), {node}, [node]
    while ahead:
        of = ahead.pop()
        for user in of.users:
            if user.target is OPERATORS.conv3d_fused.default and user.args[0] is of and of not in user.args[1:]:
                continue
            if user.target is _aten.clone.default and user.kwargs:
                continue
            if user.target is _aten.clone.default and value(user).is_contiguous():
                copies.append(user)
                continue
            if user.target not in _ANY_LAYOUT and torch.Tag.pointwise not in getattr(user.target, "tags", ()):
                return None
            ahead += [] if user in seen else [user]
            seen.add(user)
    return copies


def laid_out(graph: fx.Graph, before: fx.Node, image: fx.Node, result: fx.Node) -> fx.Node:
    """The image or video, or a copy in front of `before` in channels-last if it is row-major and `result` in
    channels-last."""
    given, wanted = value(image), value(result)
    sizes = [n for t in (given, wanted) for n in (*t.shape, *t.stride())]
    if not all(isinstance(n, int) for n in sizes) or given.dim() not in (4, 5) or given.numel() == 0:
        return image
    is_last = lambda t: t.is_contiguous(memory_format=channels_last(t))
    if not given.is_contiguous() or is_last(given) or not is_last(wanted) or wanted.is_contiguous():
        return image
    return _channels_last(graph, before, image)


def _channels_last(graph: fx.Graph, before: fx.Node, image: fx.Node) -> fx.Node:
    copy = called(graph, before, _aten.clone.default, image, memory_format=channels_last(value(image)))
    copy.meta[VALUE] = image.meta.get(VALUE)
    return copy


def keep_results(graph: fx.Graph) -> bool:
    """Lets operators inside a graph give images in channels-last where the tracer saw row-major ones: views copy if they
    must, and the graph's results are laid out as before. Returns False, and changes nothing, if an operator depends on
    strides."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    formats = {}
    for node in output.all_input_nodes:
        if isinstance(result := value(node), Tensor):
            known = [torch.contiguous_format, *[torch.channels_last] * (result.dim() == 4)]
            formats[node] = next((one for one in known if result.is_contiguous(memory_format=one)), None)
    if None in formats.values() or any(sees_strides(node) for node in graph.nodes):
        return False
    copy_what_cannot_be_viewed(graph)
    for node, laid_out in formats.items():
        if node.target is not _aten.contiguous.default:
            same = called(graph, output, _aten.contiguous.default, node, memory_format=laid_out)
            output.replace_input_with(node, same)
    return True


# Group normalisation and its gradient: the places of the images among the arguments, the normalised one last.
_NORMALISED = {_aten.native_group_norm.default: (0,), _aten.native_group_norm_backward.default: (0, 1)}


def in_format_of(image: Tensor, other: Tensor) -> Tensor:
    """The image, or a copy, row-major or in channels-last, as the strides of the other image say."""
    return image.contiguous(memory_format=suggest_memory_format(other))


def lay_out_normalised(graph: fx.Graph) -> None:
    """Lets group normalisations on the CPU copy images of which a dimension has one element, if they need to. Up to
    PyTorch 2.11, the stride of this dimension may be another one than the tracer said, and the kernel refuses it."""
    for node in graph.nodes:
        images = [node.args[i] for i in _NORMALISED.get(node.target, ())]
        for i, image in enumerate(images):
            of = value(image)
            if of.device.type == "cpu" and any(isinstance(n, int) and n == 1 for n in of.shape):
                with graph.inserting_before(node):
                    laid_out = graph.call_function(in_format_of, (image, images[-1]))
                laid_out.meta["val"] = of
                node.update_arg(i, laid_out)


def is_dense(t: Tensor) -> bool:
    """True for a tensor of known sizes and strides without gaps or overlaps."""
    is_known = all(isinstance(n, int) for n in (*t.shape, *t.stride()))
    return is_known and torch.empty_like(t).stride() == t.stride()


def lies_as(t: Tensor, strides: Sequence[int]) -> bool:
    """True if a tensor has these strides. Those of dimensions of one element do not matter."""
    return all(size < 2 or own == other for size, own, other in zip(t.shape, t.stride(), strides, strict=True))


def copy_what_cannot_be_viewed(graph: fx.Graph) -> None:
    """Lets views copy what has other strides than the tracer saw."""
    for node in graph.nodes:
        if node.target in VIEWS:
            node.target = _aten.reshape.default


def sees_strides(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._opname
    return _draws(node) or any(part in name for part in _SEEING) or (name == "view" and node.target not in VIEWS)


def _draws(node: fx.Node) -> bool:
    """True if an operator draws random numbers, which it does in the order of memory. Attention draws none without
    dropout."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            dropout = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return dropout != 0
    return True
