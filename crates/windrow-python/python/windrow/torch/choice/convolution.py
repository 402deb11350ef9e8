"""The choice of the implementation for a convolution call."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from windrow import _native
from windrow._activation_names import steepest_slope
from windrow.torch._activations import activation_of
from windrow.torch._batch_invariant import is_batch_invariant
from windrow.torch._calls import goes_into_a_graph, is_captured
from windrow.torch._filters import Filters, filter_cache, unkept
from windrow.torch.choice import budget, policy, problem, store
from windrow.torch.choice.candidates import Conv, CudnnFused, PyTorch, Transposed, Windrow
from windrow.torch.choice.check import Range, check_of
from windrow.torch.choice.decider import Candidate, Question, decide, expected, is_room_for_another
from windrow.torch.choice.policy import CUDNN_FUSED, KEPT, PACKED, PYTORCH, TRIES
from windrow.torch.choice.problem import After, Beside, Key, Options, key_of
from windrow.torch.choice.store import Decision

NOTHING_FASTER = "Windrow has nothing faster than cuDNN"


@dataclass(slots=True)
class Way:
    """The implementation that computes convolutions of tensors like the given ones."""

    # A function of an image and the residual.
    run: PyTorch | CudnnFused | Windrow | Transposed
    is_final: bool
    # The implementation for calls that are captured in a CUDA graph, if it is another one.
    in_graph: str | None = None

    @property
    def is_another_in_graphs(self) -> bool:
        return self.in_graph is not None

    def is_pytorchs(self, in_graphs: bool) -> bool:
        """True if PyTorch's operator computes calls: captured ones with `in_graphs`, otherwise ordinary ones."""
        if in_graphs and self.in_graph is not None:
            return self.in_graph == PYTORCH
        return isinstance(self.run, PyTorch)


def way(conv: Conv, x: Tensor, residual: Tensor | None = None) -> Way:
    """The implementation of a convolution. If nobody has decided it yet, this decides."""
    filter = conv.filter
    layout = problem.memory_format(x, filter)
    if not problem.can_be_ours(x, filter, conv.bias):
        return Way(PyTorch(conv, layout), is_final=False)
    beside = None if residual is None else _beside(conv, x, residual, layout)
    if is_batch_invariant(conv.accuracy):
        # Nothing that is measured decides.
        return Way(_named(KEPT, conv, layout, beside, None), is_final=True)
    after = After(conv.activation, beside, conv.weight.dim() == 2) if conv.is_fused else conv.activation
    now = conv.filters()
    key = key_of(x, filter, conv.bias, conv.options, conv.accuracy, after)
    decision = store.final(_what(conv, now), key) or decide(_question(conv, x, residual, layout, beside, now, key))
    who = decision.now()
    is_kept = now is not None and conv.options.output_padding is None
    if is_kept and KEPT in (decision.choice, decision.in_graph):
        kept = _named(KEPT, conv, layout, beside, decision)
        if who == KEPT in decision.limits and not decision.is_final:
            # Nothing is packed for good by an algorithm that may not stay.
            return Way(replace(kept, filters=unkept), is_final=False)
        if not decision.is_by_hand and not is_room_for_another(decision, now[0], lambda: kept.bytes(x, True)[0]):
            other = way(replace(conv, filters=unkept), x, residual)
            return replace(other, is_final=other.is_final and now[0].refused(KEPT) >= TRIES)
        is_before_a_graph = conv.is_fused and not now[0].bytes and goes_into_a_graph(x) is False
        if is_before_a_graph and decision.choice != KEPT:
            # Otherwise the filter would be packed inside the graph, and every replay would compare it.
            kept(x, residual)
    run = _named(who, conv, layout, beside, decision)
    return Way(run, decision.is_final, None if decision.in_graph == decision.choice else decision.in_graph)


def is_decided_for_pytorch(conv: Conv, x: Tensor, residual: Tensor | None, in_graphs: bool) -> bool | None:
    """True if it is decided that PyTorch computes a convolution whose filter is kept, False if another does. None if `way`
    has to say. The tensors may be stand-ins without memory."""
    decision = store.final(_kept(conv), _key(conv, x, residual, problem.memory_format(x, conv.filter)))
    if decision is None:
        return None
    names = decision.choice, decision.in_graph
    # A layer's filter needs room of its own.
    return None if KEPT in names and x.is_cuda else names[in_graphs] == PYTORCH


def _kept(conv: Conv) -> str:
    return problem.FUSED if conv.is_fused else problem.FORWARD


def _key(conv: Conv, x: Tensor, residual: Tensor | None, layout: torch.memory_format) -> Key:
    beside = None if residual is None else _beside(conv, x, residual, layout)
    after = After(conv.activation, beside, conv.weight.dim() == 2) if conv.is_fused else conv.activation
    return key_of(x, conv.filter, conv.bias, conv.options, conv.accuracy, after)


# The most threads that compile; each needs some hundred MB.
_THREADS = 8


def prepare(convolutions: Iterable[tuple[Conv, Tensor, Tensor | None]]) -> None:
    """Makes the plans by which convolutions with kept filters are going to be computed or decided, several at the same
    time, because a plan may compile kernels for seconds. Each has its image and residual; the tensors may be stand-ins
    without memory. A plan that fails is made again when it is needed."""
    wanted: dict[str, dict[str, Any]] = {}
    for of in convolutions:
        for described in _described(*of):
            wanted.setdefault(repr(described), described)
    if wanted and not any(is_captured(torch.device(d["device"])) for d in wanted.values()):
        _native.conv2d_prepare([*wanted.values()], _THREADS)


def compiles(device: torch.device) -> bool:
    """True if plans for a device compile kernels. A device that is not in use has stand-ins for tensors alone."""
    return device.type == "cuda" and torch.cuda.is_initialized()


def _described(conv: Conv, x: Tensor, residual: Tensor | None) -> Iterator[dict[str, Any]]:
    """The plans that a problem needs, as the native function takes them."""
    filter = conv.filter
    is_ours = problem.can_be_ours(x, filter, conv.bias) and conv.options.output_padding is None
    is_ours = is_ours and not problem.is_video(x)
    if not compiles(x.device) or not is_ours:
        return
    layout = problem.memory_format(x, filter)
    key = _key(conv, x, residual, layout)
    known = expected(_kept(conv), key)
    beside = None if residual is None else _beside(conv, x, residual, layout)
    windrow = _named(KEPT, conv, layout, beside, known)
    kinds = {KEPT: True, PACKED: False}
    names = [KEPT] if known is None else [name for name in kinds if name in (known.choice, known.in_graph)]
    for name in names if windrow.algorithm is None else []:
        yield windrow.described(x, kinds[name], is_wanted=known is not None)


def _what(conv: Conv, now: Filters) -> str:
    if conv.is_fused:
        return problem.FUSED_UNKEPT if now is None else problem.FUSED
    return what_of(now is None, now is not None and now[1])


def what_of(is_changing: bool, is_frozen: bool) -> str:
    return problem.CHANGING if is_changing else problem.FROZEN if is_frozen else problem.FORWARD


def _beside(conv: Conv, x: Tensor, residual: Tensor, layout: torch.memory_format) -> Beside:
    shape = problem.output_shape(x, conv.filter, conv.options)
    fits = [*residual.shape] == shape and residual.dtype == x.dtype
    is_added = fits and problem.is_laid_out(residual, x, layout)
    return Beside(fits, residual.dtype, residual.is_contiguous(memory_format=layout), is_added)


def _named(
    name: str, conv: Conv, layout: torch.memory_format, beside: Beside | None, decision: Decision | None
) -> Any:
    """The candidate of this name, with the settings of the decision."""
    if name == PYTORCH:
        return PyTorch(conv, layout)
    if name == CUDNN_FUSED:
        return CudnnFused(conv, layout)
    if conv.options.output_padding is not None:
        return Transposed(conv, layout)
    adds = beside is not None and beside.is_added
    memory = None if decision is None else decision.limits.get(name)
    algorithm = None if decision is None else decision.algorithm
    filters = conv.filters if name == KEPT else unkept
    return Windrow(conv, layout, filters, adds, beside is not None and not adds, memory, algorithm)


def _question(
    conv: Conv,
    x: Tensor,
    residual: Tensor | None,
    layout: torch.memory_format,
    beside: Beside | None,
    now: Filters,
    key: Key,
) -> Question:
    pytorch, weight = PyTorch(conv, layout), conv.filter

    def ours(wanted: Decision | None) -> Iterable[Candidate] | str:
        windrow = _named(KEPT, conv, layout, beside, wanted)
        is_alike = isinstance(windrow, Windrow) and (conv.is_fused or conv.activation is None)
        if wanted is None and is_alike and windrow.is_cudnns(x):
            return NOTHING_FASTER
        return windrow.candidates(x, residual)  # type: ignore[no-any-return]

    def finish(y: Tensor, part: Range) -> Tensor:
        return activation_of(conv.activation)(y if residual is None else y + residual[part])

    others = []
    is_linear, fits, steepest = conv.weight.dim() == 2, beside is None or beside.fits, steepest_slope(conv.activation)
    if conv.is_fused and x.is_cuda and conv.activation == "relu" and fits and not is_linear:
        others.append(Candidate(CUDNN_FUSED, lambda: CudnnFused(conv, layout)(x, residual)))
    return Question(
        _what(conv, now),
        key,
        lambda: pytorch(x, residual),
        ours,
        others,
        cache=filter_cache(weight, lasts=conv.is_fused),
        image=x.nbytes,
        around=policy.BESIDE_FUSED if conv.is_fused else policy.BESIDE,
        check=check_of(x, weight, conv.bias, conv.options, conv.accuracy, finish, residual, is_linear, steepest),
    )


def look_ahead(x: Tensor, weight: Tensor, options: Options) -> None:
    """Records the memory in use before a layer runs. Modules call it before their decision is remembered."""
    budget.look_ahead(x.device, x.nbytes, problem.result_bytes(x, weight, options))


def is_pytorchs(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, accuracy: str | None, is_frozen: bool
) -> bool | None:
    """True if PyTorch computes this convolution and all wanted gradients, because it is faster at each of them, or
    because Windrow would gain too little in all. The whole call can then be PyTorch's own. None: not decided yet."""
    if is_batch_invariant(accuracy):
        return False
    if type(x) is not Tensor or type(weight) not in (nn.Parameter, Tensor) or x.dim() != weight.dim():
        return None
    if torch._C._len_torch_dispatch_stack() > 0:
        return None
    grad, kind = torch.is_grad_enabled(), "cuda" if x.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    of_filter, of_input = grad and weight.requires_grad, grad and x.requires_grad
    is_video, is_step = problem.is_video(x), of_filter or of_input
    if is_video:
        # PyTorch computes the gradients of both.
        of_input = False
    if options.output_padding is not None and kind == "cuda" and (of_filter or of_input):
        # Ours keeps the interpreter for so long that called steps became slower by a tenth and more.
        return True
    key = key_of(x, weight, bias, options, accuracy, dtype=autocast)
    parts = [what_of(of_filter, is_frozen)]
    parts += [problem.OF_INPUT] * of_input
    if of_filter and not is_video:
        parts.append(problem.OF_BOTH if bias is not None and bias.requires_grad else problem.OF_FILTER)
    decided = [store.final(what, key) for what in parts]
    if None in decided:
        return None
    times: list[tuple[bool, policy.Times]] = [(d.now() != PYTORCH, d.times) for d in decided if d is not None]
    if is_video and is_step:
        # A step with gradients, of which Windrow gains nothing.
        times.append((False, {}))
    return not policy.is_step_worth_it(times, x.is_cuda, is_cast=autocast is not None)
