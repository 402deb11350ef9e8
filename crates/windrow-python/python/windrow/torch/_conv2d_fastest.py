"""Convolutions and their gradients by Windrow or by PyTorch, whichever is faster; see `_fastest`."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from windrow import _native
from windrow.torch import _memory
from windrow.torch._activations import activation_of
from windrow.torch._checking import Check
from windrow.torch._fastest import (
    PYTORCH,
    TRIES,
    Contestant,
    Problem,
    chosen,
    chosen_in_graphs,
    decide,
    is_room_for_another,
    is_worth_it,
    limits,
)
from windrow.torch._filters import Filters, filter_cache, unkept
from windrow.torch._precision import operand_rounding

# Where a filter is kept it may still turn out that there is no room for its packed form.
KEPT, PACKED, _OURS = "Windrow", "Windrow, packing on each call", "Windrow"
NOTHING_FASTER = "Windrow has nothing faster than cuDNN"
_FORWARD, _FORWARD_FROZEN = "forward", "forward with a frozen filter"
_FORWARD_CHANGING = "forward with a changing filter"
_FORWARD_TURNED = "forward with a turned filter"
_OF_INPUT, _OF_FILTER = "gradient of the input", "gradient of the filter"
_OF_BOTH = "gradient of filter and bias"
# Whether the gradient of a bias alone is ours: it is a sum, for which PyTorch has nothing better.
_OF_BIAS_ALONE = True


class Options(NamedTuple):
    """Of a convolution; with `output_padding` of a transposed one. For Windrow a line [n, c, l], whose filter is
    [k, c / groups, s], is an image of one row: its options are pairs as well."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    output_padding: Sequence[int] | None = None


def aten(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """PyTorch's own operator."""
    stride, padding, dilation, groups, output_padding = options
    if output_padding is not None:
        if weight.dim() == 3:
            pairs = (stride[1:], padding[1:], output_padding[1:])
            return torch.conv_transpose1d(x, weight, bias, *pairs, groups, dilation[1:])
        return torch.conv_transpose2d(x, weight, bias, stride, padding, output_padding, groups, dilation)
    if weight.dim() == 3:
        return torch.conv1d(x, weight, bias, stride[1:], padding[1:], dilation[1:], groups)
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def as_image(t: Tensor, x: Tensor) -> Tensor:
    """What the native functions take where x is a line."""
    return t.unsqueeze(2) if x.dim() == 3 else t


def as_line(t: Tensor | None, x: Tensor) -> Tensor | None:
    """Takes `as_image` back."""
    return t.squeeze(2) if t is not None and x.dim() == 3 else t


@dataclass(frozen=True)
class Ours:
    """Windrow's convolution with a filter and bias."""

    weight: Tensor
    bias: Tensor | None
    named: dict[str, Any]
    layout: torch.memory_format
    filters: Callable[[], Filters]
    # Whether a residual, laid out as the result, is added before the activation.
    adds: bool = False

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        image, weight = as_image(in_layout(x, self.layout), x), as_image(self.weight, x)
        named = {**self.named, "residual": residual}
        y = as_line(_native.conv2d(image, weight, self.bias, **named, filters=self.filters()), x)
        return y.contiguous(memory_format=self.layout)

    def like(self, x: Tensor) -> "LikeOurs":
        """The same for images like x; None comes of others."""
        image, strides = as_image(in_layout(x, self.layout), x), x.stride()
        weight = as_image(self.weight, x)
        call = _native.Conv2dCall(image, weight, self.bias, self.named, self.filters(), self.adds)
        if image is x and _is_laid_out_last(image) == (self.layout is torch.channels_last):
            return call

        def copied(
            x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
        ) -> Tensor | None:
            if x.stride() != strides:
                return None
            image = as_image(in_layout(x, self.layout), x)
            y = as_line(call(image, as_image(weight, x), bias, residual), x)
            return None if y is None else y.contiguous(memory_format=self.layout)

        return copied

    def straight(self, x: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        """The call that a module comes to make for x."""
        call = self.like(x)

        def run() -> Tensor:
            y = call(x, self.weight, self.bias, residual)
            return self(x, residual) if y is None else y

        return run

    def held(self, memory: int | None) -> "Ours":
        """To so many bytes of packed filter and scratch memory, which it takes in pieces then."""
        return replace(self, named={**self.named, "memory": memory})

    def within(self, x: Tensor, is_kept: bool) -> "Ours":
        """Held to what there is room for, unless there is room for all that it takes."""
        always, scratch = self.bytes(x, is_kept)
        if not x.is_cuda or any(
            _memory.is_there_room(x.device, always, scratch, in_graph=in_graph) for in_graph in (False, True)
        ):
            return self
        beside = self._beside(x, in_layout(x, self.layout))
        return self.held(max(0, _memory.most(x.device) - beside))

    def bytes(self, x: Tensor, is_kept: bool) -> tuple[int, int]:
        """Memory that it needs: for good, for the packed filter, and while it runs, with its result."""
        given = in_layout(x, self.layout)
        image, weight = as_image(given, x), as_image(self.weight, x)
        kept, rest = _native.conv2d_bytes(image, weight, self.bias, self.named, is_kept)
        return kept, rest + self._beside(x, given)

    def _beside(self, x: Tensor, given: Tensor) -> int:
        options = Options(*(self.named[name] for name in Options._fields[:4]))
        return _bytes_beside(x, given, self.weight, options)


# Of an image, filter, bias and residual.
LikeOurs = Callable[..., Tensor | None]


@dataclass(frozen=True)
class Transposed:
    """Windrow's transposed convolution: the data gradient of a convolution, and then bias and activation."""

    weight: Tensor
    bias: Tensor | None
    options: Options
    activation: str | None
    accuracy: str | None
    layout: torch.memory_format

    def __call__(self, x: Tensor) -> Tensor:
        options, output_padding = self.options[:4], self.options.output_padding
        image, weight = as_image(x.contiguous(memory_format=self.layout), x), as_image(self.weight, x)
        y = _native.conv_transpose2d(image, weight, options, output_padding, self.accuracy)
        if self.bias is not None:
            if self.bias.shape != (y.shape[1],):
                raise ValueError(f"`bias` has shape {[*self.bias.shape]}, expected [{y.shape[1]}]")
            y += self.bias[:, None, None]
        y = as_line(y, x).contiguous(memory_format=self.layout)
        return activation_of(self.activation)(y)

    def bytes(self, x: Tensor) -> int:
        """Memory that it needs while it runs, with its result."""
        options, output_padding = self.options[:4], self.options.output_padding
        given = x.contiguous(memory_format=self.layout)
        image, weight = as_image(given, x), as_image(self.weight, x)
        rest = _native.conv_transpose2d_bytes(image, weight, options, output_padding, self.accuracy)
        return rest + _bytes_beside(x, given, self.weight, self.options)


def _bytes_beside(x: Tensor, given: Tensor, weight: Tensor, options: Options) -> int:
    """Of the result, and of a copy of x."""
    copied = 0 if given is x else x.nbytes
    return copied + _result_bytes(x, weight, options)


def _result_bytes(x: Tensor, weight: Tensor, options: Options) -> int:
    return math.prod(output_shape(x, weight, options)) * x.element_size()


def way(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    activation: str | None,
    accuracy: str | None,
    filters: Callable[[], Filters],
    is_turned: bool = False,
) -> tuple[Callable[[Tensor], Tensor], bool]:
    """What computes this, for images like x, and whether that is decided for good. The result of a turned filter is laid
    out as x, whatever the filter's own order."""
    layout = memory_format(x, x if is_turned else weight)

    def pytorch(x: Tensor) -> Tensor:
        y = activation_of(activation)(aten(x, weight, bias, options))
        return y.contiguous(memory_format=layout)

    if not can_be_ours(x, weight, bias):
        return pytorch, False
    now = filters()
    kept: Ours | Transposed
    packed: Ours | Transposed
    if options.output_padding is not None:
        kept = packed = ours = Transposed(weight, bias, options, activation, accuracy, layout)

        def contestants() -> Iterable[Contestant] | str:
            return [Contestant(KEPT, lambda: ours(x), scratch=ours.bytes(x))]
    else:
        named = as_named(options, activation=activation, accuracy=accuracy)
        kept = with_kept = Ours(weight, bias, named, layout, filters)
        packed = with_packed = Ours(weight, bias, named, layout, unkept)

        def contestants() -> Iterable[Contestant] | str:
            if activation is None and is_cudnns(x, weight, bias, named, layout, now is not None):
                return NOTHING_FASTER
            return by_windrow(x, with_kept, with_packed, now)

    mode = _mode_of(now is None, now is not None and now[1], is_turned)
    problem = problem_of(x, weight, bias, options, activation, accuracy)
    choice, is_final = chosen(mode, problem), True
    if choice is None:
        by = filter_cache(weight)
        check = check_of(x, weight, bias, options, accuracy, lambda y, _: activation_of(activation)(y))
        how = {"layer": by, "image": x.nbytes, "check": check}
        choice = decide(mode, problem, x.device, lambda: pytorch(x), contestants, **how)
        is_final = chosen(mode, problem) is not None
    held = limits(mode, problem)
    if isinstance(kept, Ours) and isinstance(packed, Ours):
        kept, packed = kept.held(held.get(KEPT)), packed.held(held.get(PACKED))
        if choice == KEPT and KEPT in held and not is_final:
            # Nothing is packed for good by an algorithm that may not stay.
            return packed.held(held[KEPT]), False
    if now is not None and isinstance(kept, Ours) and not is_room_for(kept, x, now[0], mode, problem):
        run, is_decided = way(x, weight, bias, options, activation, accuracy, unkept, is_turned)
        return run, is_decided and now[0].refused(KEPT) >= TRIES
    return {PYTORCH: pytorch, KEPT: kept}.get(choice, packed), is_final


def check_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    finish: Callable[[Tensor, slice], Tensor],
    residual: Tensor | None = None,
    is_linear: bool = False,
) -> Check:
    """Of a convolution. `finish` makes results of sums in f32, for these images."""

    def of(part: slice) -> list[tuple[Tensor, Tensor]]:
        image, w, b = (None if t is None else t.float() for t in (x[part], weight, bias))
        value = finish(aten(image, w, b, options), part)
        scale = aten(image.abs(), w.abs(), None if b is None else b.abs(), options)
        return [(value, scale if residual is None else scale + residual[part].abs())]

    terms = _terms(weight, options, of_result=options.output_padding is None)
    operand = operand_rounding(x, accuracy, is_linear)
    is_whole = residual is not None and [*residual.shape] != output_shape(x, weight, options)
    return Check(None if is_whole else x.shape[0], x.dtype, of, terms, operand, residual=residual)


def _check_of_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    needs: tuple[bool, bool, bool],
) -> Check:
    """Of those that are needed: that of the input alone, or others."""

    def of(part: slice) -> list[tuple[Tensor, Tensor]]:
        tensors = [None if t is None else t.float() for t in (dy[part], x[part], weight, bias)]
        absolute = [None if t is None else t.abs() for t in tensors]
        values, scales = (
            computed(*of, options, None, needs, (False, False, False)) for of in (tensors, absolute)
        )
        return [(v, s) for v, s in zip(values, scales, strict=True) if v is not None and s is not None]

    images = x if options.output_padding is not None else dy
    terms = (
        _terms(weight, options, of_result=options.output_padding is not None)
        if needs[0]
        else images.numel() / max(1, images.shape[1])
    )
    operand = operand_rounding(x, accuracy)
    return Check(x.shape[0], x.dtype, of, terms, operand, is_summed=not needs[0])


def _terms(weight: Tensor, options: Options, of_result: bool) -> float:
    """Of a sum of a convolution's result, or else of its input's gradient, of which steps leave taps out."""
    if of_result:
        return max(1, weight.shape[1:].numel())
    channels = weight.shape[0] / options.groups
    return max(1.0, channels * weight.shape[2:].numel() / math.prod(options.stride))


def is_room_for(kept: Ours, x: Tensor, cache: _native.FilterCache, mode: str, problem: Problem) -> bool:
    """Whether there is room for the filter in `cache`, if it is to be kept there."""
    return is_room_for_another(mode, problem, x.device, KEPT, cache, lambda: kept.bytes(x, True)[0])


def look_ahead(x: Tensor, weight: Tensor, options: Options) -> None:
    """Says what memory is in use where a layer of a model comes: by modules, before they remember their way."""
    _memory.look_ahead(x.device, x.nbytes, _result_bytes(x, weight, options))


def is_cudnns(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    named: dict[str, Any],
    layout: torch.memory_format,
    is_kept: bool,
) -> bool:
    """True if Windrow would take cuDNN too, in the same way."""
    image = as_image(in_layout(x, layout), x)
    algorithm = _native.conv2d_algorithm(image, as_image(weight, x), bias, named, is_kept)
    is_row_major = layout is torch.contiguous_format
    if x.is_cuda and is_row_major and x.element_size() < 4 and (weight.shape[1] * x.element_size()) % 16 == 0:
        # Alone, cuDNN turns images and filter to channels-last on each call, but for 1x1 filters. Windrow does so faster, and
        # keeps the filter; for one that changes, in training, the interpreter would wait longer than the device gains.
        if not is_kept:
            return algorithm in ("cudnn", "implicit_gemm")
        is_pointwise = weight.shape[2:].numel() == 1 and max(named["stride"]) == 1
        return algorithm == "cudnn" and is_pointwise
    return algorithm == "cudnn"


def by_windrow(
    x: Tensor,
    kept: Ours,
    packed: Ours,
    filters: Filters,
    rest: Callable[[Tensor], Tensor] = lambda y: y,
    residual: Tensor | None = None,
) -> Iterator[Contestant]:
    """Ours, with the filter kept if it may be, and packed on each call; and what follows it. `residual`: what it adds."""
    if filters is not None:
        kept = kept.within(x, True)
        always, scratch = kept.bytes(x, True)
        cache = filters[0]
        more = {} if cache.bytes > 0 else {"forget": cache.clear}
        with_kept = kept.straight(x, residual)
        promise = lambda: cache.promise(always)
        memory = kept.named["memory"]
        yield Contestant(KEPT, lambda: rest(with_kept()), always, scratch, promise=promise, memory=memory, **more)
    packed = packed.within(x, False)
    always, scratch = packed.bytes(x, False)
    with_packed = packed.straight(x, residual)
    yield Contestant(PACKED, lambda: rest(with_packed()), 0, always + scratch, memory=packed.named["memory"])


def in_layout(x: Tensor, layout: torch.memory_format) -> Tensor:
    """As PyTorch does where the filter alone is channels-last, and with lines."""
    is_copied = x.dim() == 3 or (layout is torch.channels_last and not _is_channels_last(x))
    return x.contiguous(memory_format=layout) if is_copied else x


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    if not can_be_ours(x, weight, bias):
        return computed(dy, x, weight, bias, options, accuracy, needs, (False, False, False))
    problem = problem_of(x, weight, bias, options, None, accuracy)

    def is_ours(mode: str, *needs: bool) -> bool:
        def by(who: bool) -> Callable[[], list[Tensor | None]]:
            mine = tuple(n and who for n in needs)
            return lambda: computed(dy, x, weight, bias, options, accuracy, needs, mine)

        def contestants() -> Iterator[Contestant]:
            scratch = _backward_bytes(dy, x, weight, options, accuracy, needs)
            scratch += x.nbytes * needs[0] + weight.nbytes * needs[1]
            yield Contestant(_OURS, by(True), scratch=scratch)

        choice = chosen(mode, problem)
        if choice is None:
            check = _check_of_gradients(dy, x, weight, bias, options, accuracy, needs)
            by_whom = (by(False), contestants)
            choice = decide(mode, problem, x.device, *by_whom, layer=filter_cache(weight), check=check)
        return choice == _OURS

    of_bias = needs[2]
    of_input = needs[0] and is_ours(_OF_INPUT, True, False, False)
    of_filter = needs[1] and is_ours(_mode_of_filter(of_bias), False, True, of_bias)
    mine = _mine(needs, of_input, of_filter)
    return computed(dy, x, weight, bias, options, accuracy, needs, mine)


def gradients_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, accuracy: str | None
) -> Callable[[Sequence[bool]], tuple[bool, ...]] | None:
    """Which of the gradients that are needed Windrow computes, for images like x. None as long as that is not decided."""
    problem = problem_of(x, weight, bias, options, None, accuracy)
    of_both = bias is not None and bias.requires_grad
    decided = [chosen(mode, problem) for mode in (_OF_INPUT, _mode_of_filter(of_both))]
    if (x.requires_grad and decided[0] is None) or (weight.requires_grad and decided[1] is None):
        return None
    of_input, of_filter = (choice == _OURS for choice in decided)
    return lambda needs: _mine(needs, of_input, of_filter)


def _mine(needs: Sequence[bool], of_input: bool, of_filter: bool) -> tuple[bool, ...]:
    """Of the gradients that are needed, those that are ours if that of the input and that of the filter are."""
    rest = of_filter if needs[1] else _OF_BIAS_ALONE
    return needs[0] and of_input, needs[1] and rest, needs[2] and rest


def computed(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    needs: Sequence[bool],
    mine: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients that are needed, of these `mine` by Windrow and the others by PyTorch."""
    if any(mine):
        grads = _by_windrow(dy, x, weight, bias, options, accuracy, mine)
        if mine == needs:
            return grads
    else:
        grads = [None, None, None]
    others = [n and not m for n, m in zip(needs, mine, strict=True)]
    sizes = None if bias is None else list(bias.shape)
    is_transposed, first = options.output_padding is not None, 4 - weight.dim()
    pairs = (options.stride, options.padding, options.dilation, options.output_padding or [0, 0])
    stride, padding, dilation, output_padding = (pair[first:] for pair in pairs)
    rest = (sizes, stride, padding, dilation, is_transposed, output_padding, options.groups, others)
    theirs = torch.ops.aten.convolution_backward.default(dy, x, weight, *rest)
    return [
        _laid_out_like(t, g) if other else m
        for m, g, t, other in zip(grads, theirs, (x, weight, bias), others, strict=True)
    ]


def _by_windrow(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    if options.output_padding is None:
        images = (as_image(t, x) for t in (dy, x, weight))
        dx, dweight, dbias = _native.conv2d_backward(*images, bias, options[:4], accuracy, needs)
        return [as_line(dx, x), as_line(dweight, x), dbias]
    images = (as_image(t, x) for t in (dy, _dense(x), weight))
    dx, dweight = _native.conv_transpose2d_backward(*images, options[:4], accuracy, needs[:2])
    over = [d for d in range(dy.dim()) if d != 1]
    dbias = dy.sum(over, dtype=bias.dtype) if needs[2] and bias is not None else None
    dx, dweight = as_line(dx, x), as_line(dweight, x)
    return [None if dx is None else _laid_out_like(x, dx), dweight, dbias]


def _backward_bytes(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    options: Options,
    accuracy: str | None,
    needs: Sequence[bool],
) -> int:
    if options.output_padding is None:
        images = (as_image(t, x) for t in (dy, x, weight))
        return _native.conv2d_backward_bytes(*images, options[:4], accuracy)
    image = _dense(x)
    copied = 0 if image is x else x.nbytes
    images = (as_image(t, x) for t in (dy, image, weight))
    return copied + _native.conv_transpose2d_backward_bytes(*images, options[:4], accuracy, needs[:2])


def _dense(x: Tensor) -> Tensor:
    """As the result of a convolution, whose elements share no memory."""
    return x.contiguous(memory_format=memory_format(x, x))


def is_pytorchs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    is_frozen: bool,
) -> bool | None:
    """True if PyTorch computes this and all gradients that are wanted, because it is faster at each of them
    or because ours would gain too little in all: then the whole call can be PyTorch's own. None as long as
    that is not decided."""
    if type(x) is not Tensor or type(weight) not in (nn.Parameter, Tensor) or x.dim() != weight.dim():
        return None
    if torch._C._len_torch_dispatch_stack() > 0:
        return None
    grad, kind = torch.is_grad_enabled(), "cuda" if x.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    of_filter, of_input = grad and weight.requires_grad, grad and x.requires_grad
    if options.output_padding is not None and kind == "cuda" and (of_filter or of_input):
        # Ours keeps the interpreter for so long that called steps became slower by a tenth and more.
        return True
    problem = problem_of(x, weight, bias, options, None, accuracy, autocast)
    modes = [_mode_of(of_filter, is_frozen)]
    if of_input:
        modes.append(_OF_INPUT)
    if of_filter:
        modes.append(_mode_of_filter(bias is not None and bias.requires_grad))
    worth = is_worth_it(modes, problem, x.device, is_cast=autocast is not None)
    return None if worth is None else not worth


def is_anothers_in_graphs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    accuracy: str | None,
    is_frozen: bool,
    is_turned: bool,
) -> bool:
    """Whether somebody else computes this, without gradients, where it is captured in a graph."""
    problem = problem_of(x, weight, bias, options, None, accuracy)
    return chosen_in_graphs(_mode_of(False, is_frozen, is_turned), problem) is not None


def layer(
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
) -> tuple[Any, ...]:
    """What a problem has of a module: the last part of a `Problem`."""
    stride, padding, dilation, groups, output_padding = options
    return (weight.shape, bias is None, *stride, *padding, *dilation, groups, *(output_padding or ()))


def output_shape(x: Tensor, weight: Tensor, options: Options) -> list[Any]:
    """That of the convolution's result."""
    stride, padding, dilation, groups, output_padding = options
    first = 4 - weight.dim()
    sizes = zip(x.shape[2:], weight.shape[2:], stride[first:], padding[first:], dilation[first:], strict=True)
    if output_padding is None:
        size = [(n + 2 * p - d * (r - 1) - 1) // s + 1 for n, r, s, p, d in sizes]
        return [x.shape[0], weight.shape[0], *size]
    size = [(n - 1) * s - 2 * p + d * (r - 1) + 1 for n, r, s, p, d in sizes]
    size = [n + more for n, more in zip(size, output_padding[first:], strict=True)]
    return [x.shape[0], weight.shape[1] * groups, *size]


def memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """That of the result: as PyTorch's own convolution chooses it."""
    is_last = _is_channels_last(x) or _is_channels_last(weight)
    return torch.channels_last if is_last else torch.contiguous_format


def is_laid_out(residual: Tensor, x: Tensor, layout: torch.memory_format) -> bool:
    """Whether it lies as our convolution of x lays out its result."""
    is_last = _is_laid_out_last(in_layout(x, layout))
    return residual.is_contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def _is_channels_last(t: Tensor) -> bool:
    """Whether PyTorch takes it as such: `suggest_memory_format`, which Python does not have."""
    if t.dim() != 4 or t.stride(1) == 0:
        return False
    least = 0
    for d in (1, 3, 2, 0):
        size, stride = t.shape[d], t.stride(d)
        if size == 0 or stride < least or (d == 0 and least == t.stride(1)):
            return False
        least = stride * size
    return True


def _is_laid_out_last(image: Tensor) -> bool:
    """Whether the native functions lay the result out in channels-last."""
    return image.dim() == 4 and image.shape[1] > 1 and image.stride(1) < image.stride(3)


def problem_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    activation: Any,
    accuracy: str | None,
    dtype: torch.dtype | None = None,
) -> Problem:
    """`dtype` is what x is going to be cast to."""
    strides = x.stride()
    is_last = strides[1] < strides[-1]
    rest = (
        x.device,
        dtype or x.dtype,
        is_last,
        weight.stride(),
        activation,
        accuracy,
        torch.get_num_threads(),
    )
    return (x.shape, strides), rest, layer(weight, bias, options)


def as_named(options: Options, **more: Any) -> dict[str, Any]:
    return {**dict(zip(Options._fields[:4], options[:4], strict=True)), "memory": None, **more}


def can_be_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """False for what only PyTorch computes, or has the better words to refuse."""
    return (
        x.dim() == weight.dim()
        and x.device.type in ("cpu", "cuda")
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and x.numel() > 0
    )


def _mode_of(is_changing: bool, is_frozen: bool, is_turned: bool = False) -> str:
    if is_turned:
        return _FORWARD_TURNED
    return _FORWARD_CHANGING if is_changing else _FORWARD_FROZEN if is_frozen else _FORWARD


def _mode_of_filter(of_bias: bool) -> str:
    return _OF_BOTH if of_bias else _OF_FILTER


def _laid_out_like(t: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of `empty_like(t)`."""
    if gradient.stride() == t.stride():
        return gradient
    like = torch.empty_like(t)
    return gradient if like.stride() == gradient.stride() else like.copy_(gradient)
