from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final, overload

from windrow._activation_names import Activation

class Array(Protocol):
    """Any array with DLPack, in main memory or on a CUDA device."""

    # Libraries differ in the keywords that they take; none is required.
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

A = TypeVar("A", bound=Array)
Accuracy: TypeAlias = Literal["exact", "fp32", "tf32", "half"]
Pair: TypeAlias = int | Sequence[int]

__version__: str

class NotInPlace(ValueError):
    """The error for an array whose memory Windrow cannot read or write without a copy."""

def gelu(
    x: A,
    bias: Array | None = None,
    gate: Array | None = None,
    *,
    approximate: Literal["none", "tanh"] = "none",
    batch_invariant: bool = False,
    out: A | None = None,
    device: str | None = None,
) -> A:
    """`gelu(x + bias) * gate`.

    x, gate: f32, f16 or bf16, of the same shape, any strides. bias: [last dimension of x], f32 or x's
    type. approximate: "none" is `0.5 x erfc(-x / sqrt 2)`, "tanh" the usual approximation by tanh.
    batch_invariant: if true, the bits of an element do not depend on its place or on other elements.
    out: the array that is written and returned; it may be `x`. device: where arrays in main memory
    are computed.

    Raises ValueError if shapes do not match, or if `out` shares memory with an input but is not `x`,
    and TypeError for other element types.
    """

@overload
def causal_conv1d(
    x: A,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: Activation | None = None,
    seq_idx: Array | None = None,
    cu_seqlens: Array | None = None,
    initial_states: Array | None = None,
    return_final_states: Literal[False] = False,
    batch_invariant: bool = False,
    dilation: int = 1,
    out: A | None = None,
    device: str | None = None,
) -> A:
    """`y[b,d,t] = act(bias[d] + sum_k weight[d,k] x[b,d,t-(width-1)+k])`.

    x: [b, d, l], f32, f16 or bf16, any strides, so also a view of a channels-last array.
    weight: [d, width], or [d_out, d, width] for a dense convolution. bias: [d], or [d_out] if dense.
    Both are f32 or of x's type.
    activation: None, "relu", "relu6", "leaky_relu" (with another slope than 0.01: "leaky_relu(0.2)"),
    "hardswish", "silu", "gelu" or "gelu_tanh".
    A row may hold several sequences. `seq_idx` [b, l] i32 gives each token the number of its sequence
    (a negative number is padding, whose result is zero). Or, with b = 1, `cu_seqlens` [sequences + 1]
    i32 or i64 gives the boundaries.
    dilation: the distance of neighbouring taps in tokens: tap k reads token `t - (width - 1 - k) * dilation`.
    initial_states: [b or sequences, d, (width - 1) * dilation], the inputs before each sequence; by
    default zeros.
    return_final_states: if true, the result is `(y, final_states)`. final_states has the shape of
    initial_states.
    batch_invariant: if true, the bits of a sequence do not depend on the other sequences.
    out: the array that is written and returned. device: where arrays in main memory are computed.

    Raises ValueError, TypeError (element types) or IndexError (`cu_seqlens` that does not rise from 0
    to l).
    """

@overload
def causal_conv1d(
    x: A,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: Activation | None = None,
    seq_idx: Array | None = None,
    cu_seqlens: Array | None = None,
    initial_states: Array | None = None,
    return_final_states: Literal[True],
    batch_invariant: bool = False,
    dilation: int = 1,
    out: A | None = None,
    device: str | None = None,
) -> tuple[A, A]: ...
@overload
def causal_conv1d(
    x: A,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: Activation | None = None,
    seq_idx: Array | None = None,
    cu_seqlens: Array | None = None,
    initial_states: Array | None = None,
    return_final_states: bool,
    batch_invariant: bool = False,
    dilation: int = 1,
    out: A | None = None,
    device: str | None = None,
) -> A | tuple[A, A]: ...
def causal_conv1d_split(
    x: A,
    weight: Array,
    bias: Array | None,
    activation: str | None,
    seq_idx: Array | None,
    cu_seqlens: Array | None,
    initial_states: Array | None,
    return_final_states: bool,
    split: Sequence[int],
    batch_invariant: bool,
    dilation: int,
    norm: tuple[int, float] | None,
) -> list[A]: ...
def causal_conv1d_backward(
    dy: A,
    dfinal_states: Array | None,
    x: A,
    weight: Array,
    bias: Array | None,
    activation: str | None,
    seq_idx: Array | None,
    cu_seqlens: Array | None,
    initial_states: Array | None,
    needs: tuple[bool, bool, bool, bool],
    dilation: int = 1,
) -> list[A | None]: ...
def causal_conv1d_update(
    x: A,
    conv_state: Array,
    weight: Array,
    bias: Array | None = None,
    activation: Activation | None = None,
    cache_seqlens: Array | None = None,
    conv_state_indices: Array | None = None,
    *,
    out: A | None = None,
    device: str | None = None,
) -> A:
    """The next step or steps of a causal convolution; `conv_state` is updated in place.

    x: [b, d] or [b, d, l].
    conv_state: [b, d, state_len] of x's type, with state_len at least width - 1: the latest inputs,
    oldest first.
    cache_seqlens: [b] i32 or i64, the number of earlier inputs. With it, conv_state is a ring buffer,
    whose next position is `cache_seqlens % state_len`.
    conv_state_indices: [b] i32 or i64. With it, conv_state is a pool [entries, d, state_len], and row i
    uses entry `conv_state_indices[i]`. If that is negative, the row is padding and its result is zero.
    weight, bias, activation, out and device are those of `causal_conv1d`, but weight is [d, width].

    Raises ValueError, TypeError (element types) or IndexError (a negative value of cache_seqlens, or
    an entry that is not in the pool).
    """

def causal_conv1d_update_if_plain(
    x: A,
    conv_state: Array,
    weight: Array,
    bias: Array | None,
    activation: str | None,
    cache_seqlens: Array | None,
    conv_state_indices: Array | None,
) -> A | None: ...
def conv2d(
    x: A,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    residual: Array | None = None,
    activation: Activation | None = None,
    accuracy: Accuracy | None = None,
    algorithm: str | None = None,
    batch_invariant: bool = False,
    out: A | None = None,
    device: str | None = None,
    filters: tuple[FilterCache, bool] | None = None,
) -> A:
    """Two-dimensional convolution, by Winograd if filter and stride allow it and the error stays within
    `accuracy` (default "fp32").

    x: [n, c, h, w], f32, f16 or bf16, any strides; the result [n, k, oh, ow] is channels-last if x
    is. weight: [k, c / groups, r, s] of x's type; bias: [k], f32 or x's type.
    stride, padding, dilation: a number for both directions, or two numbers (rows, columns).
    residual: an array with the type, shape and strides of the result. It is added before the
    activation.
    activation: None, "relu", "relu6", "leaky_relu" (with another slope than 0.01: "leaky_relu(0.2)"),
    "hardswish", "silu", "gelu" or "gelu_tanh", applied to the result.
    accuracy: "exact" (no Winograd), "fp32", "tf32" or "half".
    algorithm: one of `Conv2dPlan.algorithms`; None lets the cost model choose.
    batch_invariant: if true, the bits of an image do not depend on the other images.
    out: the array that is written and returned. device: where arrays in main memory are computed.

    Raises ValueError, TypeError (element types) or NotImplementedError (an algorithm that cannot
    compute this case).
    """

def conv3d(
    x: A,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    time_padding: str | None = "zeros",
    initial_frames: Array | None = None,
    final_frames: Array | None = None,
    residual: Array | None = None,
    activation: Activation | None = None,
    accuracy: Accuracy | None = None,
    algorithm: str | None = None,
    batch_invariant: bool = False,
    out: A | None = None,
    filters: tuple[FilterCache, bool] | None = None,
    memory: int | None = None,
) -> A:
    """Three-dimensional convolution, by Winograd if filter and stride allow it and the error stays within `accuracy`
    (default "fp32").

    x: [n, c, t, h, w], f32, f16 or bf16, any strides; the result [n, k, ot, oh, ow] is channels-last if x
    is. weight: [k, c / groups, kt, r, s] of x's type; bias: [k], f32 or x's type.
    stride, padding, dilation: a number for all directions, or three numbers (frames, rows, columns).
    time_padding: "zeros"; "causal", which reads the (kt - 1) * dilation frames before the first one, zeros without
    initial_frames; or "causal_repeat", with the first frame in place of zeros.
    initial_frames: the frames before the first one, [n, c, (kt - 1) * dilation, h, w]. final_frames: an array of this
    shape, which the frames after the last one would follow; it is written, and may be initial_frames.
    residual, activation, accuracy, algorithm, batch_invariant and out: as for `conv2d`.

    Raises ValueError, TypeError (element types) or NotImplementedError (an algorithm that cannot
    compute this case).
    """

def conv2d_backward(
    dy: A,
    x: A,
    weight: Array,
    bias: Array | None,
    options: tuple[Pair, Pair, Pair, int],
    accuracy: str | None,
    needs: tuple[bool, bool, bool],
) -> list[A | None]: ...
def conv_transpose2d(
    x: A,
    weight: Array,
    options: tuple[Pair, Pair, Pair, int],
    output_padding: Pair,
    accuracy: str | None,
) -> A:
    """Transposed convolution, without bias: the data gradient of the convolution of the result."""

def conv_transpose2d_bytes(
    x: Array,
    weight: Array,
    options: tuple[Pair, Pair, Pair, int],
    output_padding: Pair,
    accuracy: str | None,
) -> int:
    """The bytes that `conv_transpose2d` needs in addition to its tensors."""

def conv_transpose2d_backward(
    dy: A,
    x: A,
    weight: Array,
    options: tuple[Pair, Pair, Pair, int],
    accuracy: str | None,
    needs: tuple[bool, bool],
) -> list[A | None]: ...
def conv_transpose2d_backward_bytes(
    dy: Array,
    x: Array,
    weight: Array,
    options: tuple[Pair, Pair, Pair, int],
    accuracy: str | None,
    needs: tuple[bool, bool],
) -> int:
    """The bytes that `conv_transpose2d_backward` needs in addition to its tensors."""

def conv2d_algorithm(
    x: Array,
    weight: Array,
    bias: Array | None,
    named: dict[str, Any],
    is_kept: bool,
) -> str:
    """The name of the algorithm that `conv2d` chooses."""

def conv2d_bytes(
    x: Array,
    weight: Array,
    bias: Array | None,
    named: dict[str, Any],
    residual: bool,
    is_kept: bool,
) -> tuple[int, int]:
    """The bytes that `conv2d` needs in addition to its tensors: for the packed filter, and for the rest."""

def conv3d_bytes(
    x: Array,
    weight: Array,
    bias: Array | None,
    named: dict[str, Any],
    residual: bool,
    is_kept: bool,
) -> tuple[int, int]:
    """The bytes that `conv3d` needs in addition to its tensors: for the packed filter, and for the rest."""

def conv2d_prepare(convolutions: list[dict[str, Any]], threads: int) -> list[str | None]:
    """Makes the plans of `conv2d` for these convolutions, at most `threads` at a time and one for each CPU. Each is
    described by `device`, `dtype`, `x` and `weight` (shape and strides), `has_bias`, `residual`, `named` (options),
    `is_kept`, `unless` (no plan is made if one of these algorithms is chosen), and `much` (if the packed filter has more
    bytes, the plan that packs on each call is made, too). Returns an error's message for each convolution without a plan,
    otherwise None."""

def conv2d_backward_bytes(
    dy: Array,
    x: Array,
    weight: Array,
    options: tuple[Pair, Pair, Pair, int],
    accuracy: str | None,
) -> int:
    """The bytes that `conv2d_backward` needs in addition to its tensors."""

def conv2d_plans() -> list[tuple[list[int], list[int], str]]:
    """The plans kept for later calls, the most recently used one first: shape of the image, shape of the filter,
    and the plan's description."""

def causal_conv1d_serving(
    x: A,
    order: str,
    conv_states: Array,
    weight: Array,
    bias: Array | None,
    activation: str | None,
    query_start_loc: Array | None,
    conv_state_indices: Array | None,
    null_index: int | None,
    has_initial_state: Array | None = None,
    num_accepted_tokens: Array | None = None,
    initial_block: Array | None = None,
    last_block: Array | None = None,
    first_block: Array | None = None,
    tokens_before: Array | None = None,
    block_size: int = 0,
    intermediate_windows: Array | None = None,
    intermediate_indices: Array | None = None,
    next_token: Array | None = None,
    next_sibling: Array | None = None,
    parent_token: Array | None = None,
    norm: tuple[int, float] | None = None,
    out: A | None = None,
    out2: A | None = None,
    out3: A | None = None,
) -> A:
    """The convolution of the next tokens of many sequences; their states are updated in place. `order` names the
    dimensions of `x` and the result: "bdl", "bd" (one token in each row), "dl" or "ld" (one row).
    `intermediate_windows` and `parent_token` are written, too. With `out2` and `out3`, the channels are divided among
    `out` and these. With a `norm`, heads of so many channels of the first two outputs are divided by their L2 norm; the
    second number is epsilon."""

def gelu_backward(
    dy: A,
    x: A,
    bias: Array | None,
    gate: Array | None,
    approximate: str,
    needs: tuple[bool, bool, bool],
) -> list[A | None]: ...
def is_only_recorded(*tensors: object) -> bool: ...
def is_plain(*tensors: object) -> bool: ...
def use_openmp(gomp_parallel: int) -> None: ...

@final
class Conv2dPlan:
    """A convolution whose algorithm is chosen once, for arrays with the types, shapes and strides of these.

    The arguments are those of `conv2d`. The contents of the arrays are not read.
    """

    def __init__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        activation: Activation | None = None,
        accuracy: Accuracy | None = None,
        algorithm: str | None = None,
        batch_invariant: bool = False,
        device: str | None = None,
    ) -> None: ...
    @property
    def algorithm(self) -> str:
        """The name of the chosen algorithm."""
    @property
    def algorithms(self) -> list[str]:
        """The names of all algorithms that can compute this convolution on the plan's device."""
    @property
    def workspace_bytes(self) -> int:
        """The bytes of scratch memory of one run."""
    def explain(self) -> str:
        """The plan in one line: algorithm with its parameters, device and blocking."""
    def pack(self, weight: Array) -> PackedWeights:
        """Packs a filter once, for any number of runs."""
    def __call__(
        self,
        x: A,
        weight: Array | PackedWeights,
        bias: Array | None = None,
        *,
        out: A | None = None,
    ) -> A:
        """Runs the convolution; `weight` is an array, or what `pack` returned."""

@final
class PackedWeights:
    """A filter packed by `Conv2dPlan.pack`."""

@final
class Conv2dCall:
    """A prepared call of `conv2d` on PyTorch's tensors.

    Images, filters, biases, residuals and `out` must have the types, shapes and strides of those it was made from.
    With other tensors, or if PyTorch's dispatcher is needed for them, a call does nothing and returns None."""

    def __init__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        named: dict[str, Any],
        filters: tuple[FilterCache, bool] | None,
        residual: bool = False,
        out: Array | None = None,
    ) -> None: ...
    def __call__(
        self, x: A, weight: Array, bias: Array | None, residual: Array | None = None, out: A | None = None
    ) -> A | None: ...

@final
class BoundCall:
    """A call with its filter and bias: a `Conv2dCall`, or a function of the same arguments."""

    def __init__(self, call: Callable[..., Any], weight: Array, bias: Array | None = None) -> None: ...
    @property
    def call(self) -> Any: ...
    @property
    def weight(self) -> Any: ...
    @property
    def bias(self) -> Any: ...
    def __call__(self, x: A, residual: Array | None = None, out: A | None = None) -> A | None: ...

@final
class KnownCalls:
    """The calls of a convolution with one filter and bias, and what computes them."""

    def __init__(self, weight: Array, bias: Array | None, may_use_tf32: Callable[[], bool]) -> None:
        """`may_use_tf32` says if PyTorch's own operator may compute f32 on CUDA in TF32."""
    def __call__(
        self, x: A, weight: Array, bias: Array | None, residual: Array | None = None, out: A | None = None
    ) -> A | None:
        """The result by what computed a call like this one. None if there was none with this filter and bias, if PyTorch's
        dispatcher is needed, or if what computed it takes these tensors no more."""
    def are_of(self, weight: Array, bias: Array | None) -> bool:
        """Whether the calls are of this filter and this bias."""
    def keep(self, run: Callable[..., Any], x: Array, residual: Array | None = None, out: Array | None = None) -> None:
        """Remembers that `run` computes calls like this one."""
    def find(self, x: Array, residual: Array | None = None, out: Array | None = None) -> Any:
        """What computes calls like this one; None if nothing is known."""
    def clear(self) -> None: ...

@final
class Layers:
    """The modules of convolutions that are called by an operator, without a module."""

    def __init__(self) -> None: ...
    def find(self, weight: Array, bias: Array | None, rest: tuple[Any, ...]) -> Any:
        """The module of a convolution, as long as filter and bias lie where they lay. `rest` are the arguments of the
        operator behind its tensors."""
    def keep(
        self, weight: Array, bias: Array | None, rest: tuple[Any, ...], module: object, calls: KnownCalls
    ) -> None: ...
    def drop(self, place: int) -> None:
        """Forgets the modules of the filter that was at an address."""

@final
class ShortOperator:
    """The function by which an operator is called. It calls the kernel itself if the dispatcher would do nothing else."""

    def __init__(
        self,
        dispatched: Callable[..., Any],
        kernel: Callable[..., Any] | None,
        tensors: int,
        layers: Layers | None = None,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

@final
class ImageStep:
    """The mean of an image, its product with a gate, a sum, pooling, upsampling or a copy, in f32 and channels-last on the
    CPU.

    With other tensors than those that it was made for, or if PyTorch's dispatcher is needed for them, a call does
    nothing and returns None."""

    @staticmethod
    def of(
        operation: str, window: Sequence[int], x: A, second: A | None = None, out: A | None = None
    ) -> ImageStep | None:
        """operation: "mean", "sigmoid" or "hardsigmoid" (of `second`, times `x`), "add" (of `second`), "max_pool2d",
        "avg_pool2d", "upsample", "copy", and "channels_last", the copy of a row-major image.
        window: height, width, strides and padding of a pooling; how often an upsampling repeats rows and columns. out:
        where results are written. None if other tensors only are computed. Raises ValueError for another operation."""
    def __call__(self, x: A, second: A | None = None, out: A | None = None) -> A | None: ...

@final
class ImageView:
    """A value of a sequence that is not computed."""

    @staticmethod
    def channels(x: Array, first: int, count: int) -> ImageView | None:
        """Some channels of an image in main memory. None if they do not follow each other."""
    @staticmethod
    def memory(like: Array) -> ImageView | None:
        """Memory like that of a tensor. None if that is not main memory, or has gaps."""

@final
class Unchanged:
    """What a call depends on, compared with what it was."""

    def __init__(
        self,
        dicts: Sequence[dict[Any, Any]],
        version: Callable[[dict[Any, Any]], int],
        empty: Sequence[dict[Any, Any]],
        modules: Sequence[object],
        tensors: Sequence[Array],
    ) -> None:
        """version: PyTorch's function that gives the version number of a dictionary. `empty` are dictionaries that must
        stay empty, and `modules` objects that must keep their types. Raises ValueError if a dictionary is not empty."""
    def __call__(self) -> bool:
        """True if all is as it was, but for writes to tensors from inference mode, which do not count them."""

@final
class Words:
    """Words of memory, compared with what they were."""

    def __init__(self, places: Sequence[int]) -> None:
        """`places` are addresses of words of 8 bytes, which the caller may read, now and at each call. Raises ValueError
        for other addresses."""
    def __call__(self) -> bool:
        """True if all are as they were."""

@final
class Conv2dSequence:
    """A sequence of calls on the CPU, each of which reads images or results of earlier calls.

    With other tensors than those that the calls were made for, or if PyTorch's dispatcher is needed for them, a call
    does nothing and returns None. Images and results are values, numbered in this order."""

    def __init__(
        self,
        images: int,
        steps: Sequence[tuple[Conv2dCall | ImageStep | ImageView, int | None, int | None, int | None]],
        results: Sequence[int],
        filters: Sequence[tuple[Array, Array | None]],
        flat: Sequence[int] = (),
    ) -> None:
        """`steps` are calls, each with the values that it reads, the image, and what a convolution adds, a gate or a second
        image, and with the value that it writes to. `flat` are results with one pixel that are given as matrices, and
        `filters` those of the convolutions. Raises ValueError if a step does not fit those before it, or a filter its
        convolution."""
    def __call__(self, images: Sequence[A]) -> list[A] | None: ...

@final
class FilterCache:
    """A cache of the packed forms of one filter, which it compares by content."""

    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int:
        """The bytes of the packed forms."""
    @property
    def promised(self) -> int:
        """The bytes announced by `promise`."""
    def promise(self, bytes: int) -> None:
        """Announces that `bytes` bytes are going to be packed in a graph."""
    def refuse(self, mode: str) -> None:
        """Records that there was no memory for the filter's layer in `mode`."""
    def refused(self, mode: str) -> int:
        """The number of calls of `refuse` for `mode`."""
    def clear(self) -> None:
        """Drops the packed forms."""

@final
class Tensor:
    """A result for a caller whose array type Windrow does not know. It supports DLPack only."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Case:
    """A test case of an operator, for comparison with its reference implementation in f64 (the oracle)."""

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """The operator, algorithm, element type and layout."""
    def __call__(self) -> list[tuple[str, int, int, float]]:
        """Runs the case. Returns for each tensor that is compared: its name, the number of elements, the number of
        wrong ones, and the largest absolute error."""

def verification_cases(device: str) -> list[Case]:
    """All test cases that a device can run."""

def devices() -> list[tuple[str, str]]:
    """The devices that can be used: for each its name, as the argument `device` takes it, and a description."""
