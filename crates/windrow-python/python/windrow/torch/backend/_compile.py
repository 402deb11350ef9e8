"""The way from PyTorch's graph to the function that Dynamo calls."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from windrow.torch._batch_invariant import NOT_PROMISED, is_batch_invariant, others
from windrow.torch._sequence import called_alone
from windrow.torch.backend._check import Check
from windrow.torch.backend._choice import is_pytorchs, is_step_pytorchs
from windrow.torch.backend._concat import concatenate_in_place, write_in_place
from windrow.torch.backend._constants import Constants, ConstantsCache, Make, Run, value
from windrow.torch.backend._convolutions import to_windrows
from windrow.torch.backend._fold import fold
from windrow.torch.backend._fuse import fuse, results
from windrow.torch.backend._group_norm import by_channels
from windrow.torch.backend._image_steps import image_steps_to_modules, steps
from windrow.torch.backend._layout import lay_out_images, lay_out_normalised, lay_out_videos, to_channels_last
from windrow.torch.backend._linear import linear_to_convolutions, rows_to_convolutions
from windrow.torch.backend._memory import Memory
from windrow.torch.backend._modules import to_modules
from windrow.torch.backend._norms import norms_to_convolutions
from windrow.torch.backend._options import Options
from windrow.torch.backend._others import others_to_windrows, read_without_copies
from windrow.torch.backend._padding import fold_padding
from windrow.torch.backend._report import name_of
from windrow.torch.backend._results import fix_shared_results
from windrow.torch.backend._upsampling import whole_upsampling

_log = logging.getLogger(__name__.rpartition(".")[0])


def by_inductor(graph: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """The function in which Inductor compiles what the passes leave of the decomposed graph."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner, select_decomp_table

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        if not how.get("is_inference"):
            _training(module, options)
            return compile_fx_inner(module, inputs, **how)
        static, in_graphs = how.get("static_input_idxs") or (), bool(how.get("cudagraphs"))
        frozen = _Frozen(module, inputs, static, options, select_decomp_table(), in_graphs)
        how["static_input_idxs"] = frozen.static
        return frozen.call(compile_fx_inner(module, frozen.inputs, **how))

    # AOTAutograd's cache on disk holds only what Inductor made of a graph, without the constants around it.
    with config.patch(enable_autograd_cache=False):
        return compile_fx(graph, [*inputs], inner_compile=inner, config_patches=dict(options.inductor) or None)


def by_eager(graph: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """The function in which PyTorch's operators run one by one."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    def divided(*given: Any, **how: Any) -> Any:
        try:
            return default_partition(*given, **how)
        except AssertionError:
            # PyTorch 2.8 divides some graphs of sizes that change only in its other way, which computes more.
            return min_cut_rematerialization_partition(*given, **how)

    def trained(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        lay_out_normalised(module.graph)
        _training(module, options)
        return make_boxed_func(module.forward)

    def inferred(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        lay_out_normalised(module.graph)
        frozen = _Frozen(module, inputs, _static_inputs(), options, None)
        return frozen.call_bound(lambda bound: make_boxed_func(called_alone(bound)))

    made = aot_autograd(
        fw_compiler=trained, bw_compiler=trained, inference_compiler=inferred, partition_fn=divided,
        keep_inference_input_mutations=True,
    )  # fmt: skip
    with whole_upsampling():
        return made(graph, inputs)  # type: ignore[no-any-return]


def _static_inputs() -> Sequence[int]:
    """The indices of parameters and buffers among the inputs of the graph that is being compiled."""
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return () if metadata is None else metadata.static_input_indices or ()


def _training(module: fx.GraphModule, options: Options) -> None:
    # Padding is folded for inference only: the backward graph may read the image with its zeros.
    are_left = lambda node: is_step_pytorchs(node, options.accuracy)
    to_windrows(module.graph, options.accuracy, True, None, lambda conv: are_left(conv.node), are_left)
    module.recompile()


class _Frozen:
    """An inference graph after the passes. `decompositions`: the table that the graph was decomposed by; None if
    operators run one by one. `in_graphs`: Inductor captures the compiled code into CUDA graphs."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        static: Sequence[int],
        options: Options,
        decompositions: Any,
        in_graphs: bool = False,
    ) -> None:
        self.module, self.ran, graph = module, options.ran, module.graph
        before = [node for node in graph.nodes if node.op == "placeholder"]
        self.check = check = Check.of(module, static, options, decompositions is not None)
        read_without_copies(graph)
        fold_padding(graph)
        to_channels_last(module, decompositions is None, is_batch_invariant(options.accuracy))
        shares = decompositions is not None
        self.constants = constants = Constants(module, static if options.freeze else (), in_graphs, shares)
        linear_to_convolutions(graph, constants, options.accuracy, decompositions)
        if decompositions is None:
            rows_to_convolutions(graph, constants, options.accuracy)
        else:
            lay_out_images(graph)
        groups = 0 if decompositions is None else by_channels(graph)
        memory = Memory(graph)
        memory.expect()
        folded = fold(graph, constants)
        norms = norms_to_convolutions(graph, constants, options.accuracy) if decompositions is None else 0
        convolved = lambda: results(graph, constants, decompositions) | (steps(graph) if decompositions is None else set())
        copies = concatenate_in_place(graph, convolved, decompositions is not None)
        fused = fuse(graph, constants, options.accuracy, decompositions, memory, options.report)
        # Inductor fuses more with PyTorch's own.
        is_left = lambda conv: decompositions is not None and is_pytorchs(conv, options.accuracy, in_graphs, memory)
        rest = to_windrows(graph, options.accuracy, False, options.report, is_left)
        written = write_in_place(graph, copies)
        if decompositions is not None:
            lay_out_videos(graph)
            fix_shared_results(graph)
        # What was folded into convolutions, what these became, and the number of other convolutions.
        self.what = folded, fused, rest
        counts = "folded into convolutions: %s; fused: %s; other convolutions: %d; group norms: %d; batch norms: %d"
        counts += "; parts of concatenations: %d, %d of them by convolutions"
        _log.info(counts, *self.what, groups, norms, len(copies), written)
        if check is not None:
            check.look(graph, constants)
        self.bind: Callable[..., fx.GraphModule] | None = None
        if decompositions is None:
            if not is_batch_invariant(options.accuracy):
                others_to_windrows(graph, options.report)
            image_steps_to_modules(module, options.report)
            self.bind, names = to_modules(module, constants)
            if check is not None:
                check.named(names)
        if options.report is not None and is_batch_invariant(options.accuracy):
            for node in others(graph):
                options.report.left(name_of(node), f"{node.target}: {NOT_PROMISED}")
        # The inputs that only the prologue or modules read.
        gone = {node for node in (*constants.watched, *constants.inputs) if not node.users}
        for node in gone:
            graph.erase_node(node)
        graph.lint()
        module.recompile()
        position = {node: i for i, node in enumerate(before)}
        self.watched = [position[node] for node in constants.watched]
        self.passed = [i for i, node in enumerate(before) if node not in gone]
        self.made = [i for i, node in enumerate(constants.inputs) if node not in gone]
        self.inputs = [inputs[i] for i in self.passed] + [value(constants.inputs[i]) for i in self.made]
        self.static = [new for new, i in enumerate(self.passed) if i in {*static}]
        self.static += range(len(self.passed), len(self.inputs))

    def call(self, inner: Run) -> Run:
        """The function of the graph's inputs, made from `inner`, which takes the remaining inputs and the constants."""
        return self._held(inner, lambda constants: (inner, None))

    def call_bound(self, boxed: Callable[[fx.GraphModule], Run]) -> Run:
        """The function of the graph's inputs, made by `boxed` from the graph with the constants in it."""
        bind = self.bind
        assert bind is not None

        def make(constants: Sequence[Any]) -> tuple[Run, Any]:
            whole = bind(constants)
            return boxed(whole), whole

        run = self._held(boxed(self.module), make)
        for node in self.module.graph.nodes:
            # The tracer's values hold all tensors that it has seen, parameters too.
            node.meta = {}
        return run

    def _held(self, whole: Run, bound: Make) -> Run:
        check, ran, passed, made = self.check, self.ran, self.passed, self.made
        if not self.watched:
            if check is None:
                return whole

            def checked(inputs: list[Any]) -> Any:
                return check.call(inputs, whole, (), None) if check.is_pending else whole(inputs)

            checked._boxed_call = True  # type: ignore[attr-defined]
            return checked

        def make(constants: Sequence[Any]) -> tuple[Run, Any]:
            (inner, modules), rest = bound(constants), [constants[i] for i in made]

            def compute(inputs: list[Any]) -> Any:
                given = [inputs[i] for i in passed]
                inputs.clear()
                return inner(given + rest)

            return compute, modules

        held = ConstantsCache(self.constants, self.watched, passed, make)

        def run(inputs: list[Any]) -> Any:
            found = held.found(inputs)
            if check is not None and check.is_pending:
                return check.call(inputs, found.run, found.constants, found.modules)
            if ran is None:
                return found.run(inputs)
            given = [*inputs]
            results = found.run(inputs)
            ran(found, given, results)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run
