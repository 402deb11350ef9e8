"""The passes that write the parts of a concatenation of channels to their places in it, so that nothing is
concatenated.

The parts of the largest concatenation lie in one buffer. What is a range of its channels is read there: a smaller
concatenation (dense blocks), a part of a split (C2f), a part that is read elsewhere too. The first pass, in
front of `fuse`, copies each part to its place. Who computes a convolution is then measured for images that lie so. The
second pass, behind `fuse`, lets convolutions write to their places themselves.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from windrow.torch._library import OPERATORS
from windrow.torch.backend._constants import value
from windrow.torch.backend._convolutions import INPUTS, TYPES, VALUE, VIEWS, called
from windrow.torch.backend._layout import sees_strides

_aten = torch.ops.aten
SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)
_VIEWS = (_aten.cat.default, getitem, _aten.slice.Tensor, _aten.clone.default)
_CONVOLUTIONS = (_aten.convolution.default, OPERATORS.conv2d_fused.default)
# The fewest bytes that are not copied, for each part, if operators are called one by one from Python. Copying so many
# takes some 25 us on the CPU, and a part's views and call of its own take as long. What is in f32 on the CPU is part of
# one call instead.
_LEAST = 1 << 17
# The windows of these are read from images with gaps as well, if they are part of that call.
_WINDOWS = {_aten.max_pool2d_with_indices.default, _aten.avg_pool2d.default, _aten.upsample_nearest2d.default}
# The most convolutions for each part while a buffer is held, as the two of a layer of DenseNet. Parts of a U-Net would
# hold the memory of the whole concatenation while the levels below are computed.
_HELD = 2


class _Part(NamedTuple):
    """The channels of a node from `first` to before `last`."""

    node: fx.Node
    first: int
    last: int


def _parts(node: fx.Node, reads: Collection[fx.Node]) -> list[_Part]:
    """What a node consists of, looking through concatenations, splits, slices and copies, but for those in `reads`."""
    args: Any = node.args
    channels = value(node).shape[1]
    if node in reads:
        pass
    elif is_cat(node):
        return _joined(part for n in args[0] for part in _parts(n, reads))
    elif node.target is _aten.clone.default and value(node).stride() == value(args[0]).stride():
        # The concatenation of a single tensor.
        return _parts(args[0], reads)
    elif node.target is getitem and args[0].target in SPLITS and is_of_channels(args[0], 2):
        before = sum(part.shape[1] for part in value(args[0])[: args[1]])
        return _cut(_parts(args[0].args[0], reads), before, before + channels)
    elif node.target is _aten.slice.Tensor and args[1:2] == (1,) and len(args) < 5 and not node.kwargs:
        first = args[2] if len(args) > 2 and args[2] is not None else 0
        if isinstance(first, int) and 0 <= first < value(args[0]).shape[1]:
            return _cut(_parts(args[0], reads), first, first + channels)
    return [_Part(node, 0, channels)]


def is_cat(node: fx.Node) -> bool:
    """True for a concatenation of channels. A part of a single channel has two layouts, and PyTorch may give either to
    the result."""
    if node.target is not _aten.cat.default or not is_of_channels(node, 1):
        return False
    parts: Any = node.args[0]
    return all(_is_image(value(n)) and value(n).shape[1] > 1 for n in parts)


def is_of_channels(node: fx.Node, position: int) -> bool:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return dim in (1, -3)


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    found: list[_Part] = []
    for part in parts:
        if found and found[-1].node is part.node and found[-1].last == part.first:
            part = _Part(part.node, found.pop().first, part.last)
        found.append(part)
    return found


def _cut(parts: Sequence[_Part], first: int, last: int) -> list[_Part]:
    found, at = [], 0
    for node, a, b in parts:
        begin, end = max(a, a + first - at), min(b, a + last - at)
        if begin < end:
            found.append(_Part(node, begin, end))
        at += b - a
    return found


def _is_image(image: Any) -> bool:
    """True for an image of Windrow's types with elements, whose sizes do not change."""
    if not isinstance(image, Tensor) or image.dim() != 4 or image.dtype not in TYPES:
        return False
    return all(isinstance(n, int) for n in (*image.shape, *image.stride())) and image.numel() > 0


def _layout(node: fx.Node) -> torch.memory_format | None:
    """The only layout of an image; None for other nodes, and where two layouts are the same."""
    if not _is_image(image := value(node)):
        return None
    layouts = [f for f in (torch.contiguous_format, torch.channels_last) if image.is_contiguous(memory_format=f)]
    return layouts[0] if len(layouts) == 1 else None


def concatenate_in_place(
    graph: fx.Graph, results: Callable[[], Collection[fx.Node]], is_inductors: bool
) -> list[fx.Node]:
    """Replaces concatenations by buffers to which their parts are copied. Returns the copies.

    results: finds the nodes whose value a convolution can write. is_inductors: Inductor compiles what reads the
    buffers; otherwise PyTorch's operators run one by one."""
    cats = [node for node in graph.nodes if is_cat(node) and _layout(node) is not None]
    convolved = results() if cats else ()
    reads, copies = set[fx.Node](), list[fx.Node]()
    for cat in sorted(cats, key=lambda node: -value(node).shape[1]):
        if cat.users:
            copies += _Buffer(graph, cat, reads, convolved, is_inductors).place()
    graph.eliminate_dead_code()
    return copies


def empty(graph: fx.Graph, cat: fx.Node, before: fx.Node) -> fx.Node:
    """Memory for a concatenation."""
    like = value(cat)
    sizes, how = ([*like.shape], [*like.stride()]), {"dtype": like.dtype, "device": like.device}
    with graph.inserting_before(before):
        buffer = graph.call_function(_aten.empty_strided.default, sizes, how)
    with like.fake_mode:
        buffer.meta["val"] = torch.empty_strided(*sizes, **how)
    return buffer


def _behind(node: fx.Node) -> fx.Node:
    """The node in front of which what reads a node can stand first."""
    while node.next.op == "placeholder":
        node = node.next
    return node.next


class _Buffer:
    """The buffer of a concatenation. `reads`: the ranges of buffers that stand for other nodes."""

    def __init__(
        self, graph: fx.Graph, cat: fx.Node, reads: set[fx.Node], convolved: Collection[fx.Node], is_inductors: bool
    ) -> None:
        self.graph, self.cat, self.reads = graph, cat, reads
        self.convolved, self.is_inductors = convolved, is_inductors
        self.parts = _parts(cat, reads)
        self.starts = [sum(p.last - p.first for p in self.parts[:i]) for i in range(len(self.parts))]
        # The nodes that are a range of its channels, and where they begin.
        self.at: dict[fx.Node, int] = {}
        self.roots = {part.node for part in self.parts}
        for node in graph.nodes:
            if (node in self.roots or node.target in _VIEWS) and (start := self._start(node)) is not None:
                self.at[node] = start

    def _start(self, node: fx.Node) -> int | None:
        image = value(node)
        if not _is_image(image) or image.dtype != value(self.cat).dtype:
            return None
        parts = _parts(node, self.reads)
        like = [node] if node.target is _aten.cat.default else [part.node for part in parts]
        if any(_layout(n) is not _layout(self.cat) for n in like):
            return None
        for part, start in zip(self.parts, self.starts, strict=True):
            begin = start + parts[0].first - part.first
            if _cut(self.parts, begin, begin + image.shape[1]) == parts:
                return begin
        return None

    def place(self) -> list[fx.Node]:
        """Changes the graph if fewer channels are copied then. Returns the copies."""
        concatenated = sum(value(n).shape[1] for n in self.at if is_cat(n) and self._dies(n))
        image = value(self.cat)
        saved = (concatenated - self._copied()) * (image.numel() // image.shape[1]) * image.element_size()
        if saved <= (0 if self.is_inductors or self._is_in_sequences() else _LEAST * len(self.parts)):
            return []
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        places = {part.node: _behind(part.node) for part in self.parts}
        first = min(places.values(), key=order.__getitem__)
        if not self._pays([*order][order[first] : order[self.cat]]):
            return []
        buffer = empty(self.graph, self.cat, first)
        own, copies = dict[fx.Node, fx.Node](), list[fx.Node]()
        for (node, begin, end), start in zip(self.parts, self.starts, strict=True):
            given, before = own.get(node, node), places[node]
            if end - begin < value(node).shape[1]:
                given = self._slice(given, before, begin, end)
            place = self._slice(buffer, before, start, start + end - begin)
            copies.append(called(self.graph, before, _aten.copy_.default, place, given))
            if given is node and self.at.get(node) == start:
                own[node] = self._read(buffer, node, before)
        for node in self.at:
            if node.target in _VIEWS and node not in own:
                own[node] = self._read(buffer, node, node)
        for node, read in own.items():
            node.replace_all_uses_with(read, lambda user, node=node: user not in copies and self._moves(node, user))
        self.reads.update(own.values())
        for node in reversed([*self.at, *(n for n in self.graph.nodes if n.target in SPLITS)]):
            if node.target in (*_VIEWS, *SPLITS) and not node.users:
                self.graph.erase_node(node)
        return copies

    def _pays(self, between: Sequence[fx.Node]) -> bool:
        """True if the buffer is held for a few convolutions only, and what reads it does not lose by strides.

        between: the nodes between its first part and the concatenation."""
        if sum(node.target is _aten.convolution.default for node in between) > _HELD * len(self.parts):
            return False
        # On CUDA, PyTorch's own operators read strided images more slowly, such as batch normalisations of DenseNet.
        read = {user.target for node in self.at for user in node.users}
        known = {"output", _aten.cat.default, _aten.add.Tensor, *_VIEWS, *SPLITS, *_CONVOLUTIONS}
        return self.is_inductors or value(self.cat).is_cpu or read <= known

    def _is_in_sequences(self) -> bool:
        """True if steps of a sequence write to the buffer and read it."""
        image = value(self.cat)
        is_last = _layout(self.cat) is torch.channels_last
        return not self.is_inductors and is_last and image.is_cpu and image.dtype == torch.float32

    def _copied(self) -> int:
        """The channels that will be copied to the buffer."""
        is_moved = lambda n: n in self.at and all(self._moves(n, user) for user in n.users)
        copied, written = 0, set[fx.Node]()
        for node, first, last in self.parts:
            if node in self.convolved and node not in written and is_moved(node):
                written.add(node)
            else:
                copied += last - first
        return copied

    def _slice(self, node: fx.Node, before: fx.Node, first: int, last: int) -> fx.Node:
        return called(self.graph, before, _aten.slice.Tensor, node, 1, first, last)

    def _read(self, buffer: fx.Node, node: fx.Node, before: fx.Node) -> fx.Node:
        read = self._slice(buffer, before, self.at[node], self.at[node] + value(node).shape[1])
        read.meta[VALUE] = node.meta.get(VALUE)
        return read

    def _moves(self, node: fx.Node, user: fx.Node) -> bool:
        """True if this user of a range of the channels will read it in the buffer."""
        if node is self.cat or self._dies(user):
            return True
        is_read = self.is_inductors or node in self.convolved or node.target in _VIEWS
        if not is_read or not isinstance(user.target, torch._ops.OpOverload) or sees_strides(user):
            return False
        if user.target in (_aten.cat.default, *_CONVOLUTIONS):
            return True
        if user.target in VIEWS or any(argument.alias_info for argument in user.target._schema.arguments):
            return False
        # Others, such as pooling, copy images with gaps or read them more slowly.
        is_window = user.target in _WINDOWS and self._is_in_sequences()
        return is_window or torch.Tag.pointwise in user.target.tags

    def _dies(self, node: fx.Node) -> bool:
        """True if nothing will read a node itself."""
        if node.target in SPLITS:
            return all(self._dies(part) for part in node.users)
        is_view = node.target in _VIEWS and node in self.at and node not in self.roots
        return is_view and all(self._moves(node, user) for user in node.users)


def write_in_place(graph: fx.Graph, copies: Iterable[fx.Node]) -> int:
    """Lets convolutions write to buffers what would be copied there. Returns their number."""
    written = 0
    for copy in copies:
        place: Any = copy.args[0]
        conv: Any = copy.args[1]
        if conv.target is not OPERATORS.conv2d_fused.default or len(conv.users) > 1:
            continue
        beside = [value(n) for n in (conv, conv.args[3]) if n is not None]
        if beside[0].dtype == value(place).dtype and all(t.stride() == value(place).stride() for t in beside[1:]):
            new = called(graph, copy, OPERATORS.conv2d_into.default, *conv.args, place)
            new.meta = {**conv.meta, "val": None, INPUTS: new.meta[INPUTS]}
            graph.erase_node(copy)
            graph.erase_node(conv)
            written += 1
    for node in [*graph.nodes]:
        residual = node.args[3] if node.target is OPERATORS.conv2d_fused.default else None
        if residual is not None and residual.target is _aten.slice.Tensor:
            given, result, layout = value(residual), value(node), _layout(node)
            if given.shape == result.shape and given.stride() != result.stride() and layout is not None:
                # A convolution adds in the same pass only what lies as its result.
                dense = called(graph, node, _aten.clone.default, residual, memory_format=layout)
                dense.meta[VALUE] = residual.meta.get(VALUE)
                node.args = (*node.args[:3], dense, *node.args[4:])
                node.meta[INPUTS] = fx.map_arg(node.args, value), {}
    return written
