"""What the passes of `backend="windrow"` make of graphs, and that constants follow their parameters."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from common import ACTIVATIONS, OURS, THEIRS, leaf, needs_driver, normal
from torch import nn
from torch.func import functional_call
from torch._inductor.compile_fx import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from windrow.torch.backend import _compile, _layout, _options, _others, windrow
from windrow.torch.backend._memory import Memory
from windrow.torch.choice import measure, store
from windrow.torch.choice.policy import PYTORCH, Seconds

pytestmark = [
    pytest.mark.usefixtures("nothing_decided"),
    pytest.mark.skipif(torch.__version__ < _options.OLDEST, reason="an old PyTorch, which the backend refuses"),
]
each_graph = pytest.mark.parametrize("rest", ["eager", "inductor"])


@pytest.fixture
def seen(monkeypatch, times, runs_uncompiled):
    """What became of each graph: what was folded and what was fused."""
    times(OURS)
    found = []
    made = _compile._Frozen.__init__

    def told(self, *args):
        made(self, *args)
        found.append(self.what[:2])

    monkeypatch.setattr(_compile._Frozen, "__init__", told)
    return found


def compiled(model, rest="eager", **options):
    # Without Winograd, whose rounding is another; and without the check, which would put PyTorch's results for wrong ones.
    return torch.compile(model, backend=windrow, options={"rest": rest, "accuracy": "exact", "check": False, **options})


class Behind(nn.Module):
    """A convolution and what follows it."""

    def __init__(self, function, c=6):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c)
        self.factor, self.term = nn.Parameter(torch.randn(c, 1, 1)), nn.Parameter(torch.randn(1, c, 1, 1))
        self.wide = nn.Parameter(torch.randn(c, 6))
        self.function = function

    def forward(self, x):
        return self.function(self, self.conv(x))


IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def errors(model, got, x):
    """Of ours and of PyTorch's, relative to f64."""
    with torch.no_grad():
        want, plain = copy.deepcopy(model).double()(x.double()), model(x)
    return [((y.double() - want).norm() / want.norm()).item() for y in (got, plain)]


def check(model, rest="eager", x=IMAGE, **options):
    fast = compiled(model, rest, **options)
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = errors(model, fast(x), x)
            assert ours <= 1.5 * theirs + 1e-6
    return fast


@each_graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in (None, "swish")])
def test_activations(name, dtype, rest, seen):
    model = normal(Behind(lambda m, y: ACTIVATIONS[name](m.norm(y)))).to(dtype)
    check(model, rest, IMAGE.to(dtype))
    assert seen == [(["batch_norm" if rest == "eager" else seen[0][0][0]], [f"conv2d, {name}"])]


MODULES = {
    "relu": nn.ReLU(True),
    "relu6": nn.ReLU6(),
    "silu": nn.SiLU(True),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "hardswish": nn.Hardswish(True),
    "leaky_relu": nn.LeakyReLU(),
    "leaky_relu(0.2)": nn.LeakyReLU(0.2, inplace=True),
    "leaky_relu(0)": nn.LeakyReLU(0),
    "leaky_relu(1.5)": nn.LeakyReLU(1.5),
    "leaky_relu(-0.5)": nn.LeakyReLU(-0.5),
}


@each_graph
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, rest, seen):
    nan = torch.full([1], float("nan"))
    if (name, rest) == ("leaky_relu(0)", "inductor") and not torch.compile(lambda x: x * 0)(nan).isnan():
        pytest.skip("PyTorch up to 2.11 makes 0 of a product with 0 before anything is fused")
    check(normal(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), MODULES[name])), rest)
    assert seen[0][1] == [f"conv2d, {name}"]


@each_graph
@pytest.mark.parametrize("kind", [nn.Mish, nn.ELU, nn.Sigmoid, lambda: nn.Hardtanh(0, 5), nn.Softplus])
def test_other_activations(kind, rest, seen):
    check(normal(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), kind())), rest)
    assert seen[0][1] == ["conv2d"]


@each_graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_almost_leaky_relu(dtype, rest, seen):
    """Another side, another limit, another condition, another reader, or the product alone."""
    others = [
        lambda m, y: torch.where(y > 0, y * 0.2, y),
        lambda m, y: torch.where(y > 1, y, y * 0.2),
        lambda m, y: torch.where(m.term > 0, y, y * 0.2),
        lambda m, y: F.leaky_relu(y, 0.2) + y.sigmoid(),
        lambda m, y: y * 0.2,
    ]
    for other in others:
        model = normal(Behind(other)).to(dtype)
        check(model, rest, IMAGE.to(dtype))
        assert not any("leaky_relu" in what for what in seen.pop()[1])


@each_graph
def test_a_shortcut(rest, seen):
    check(normal(Behind(lambda m, y: F.relu(m.norm(y) + y.flip(0)[:1].expand_as(y) * 2))), rest)
    # With PyTorch's operators one by one the normalisation is a convolution of its own, which takes the addition.
    assert seen[0][1] == ["conv2d", *["conv2d, added, relu"] * (rest == "eager")]
    seen.clear()
    check(normal(Behind(lambda m, y: F.relu(m.conv(torch.cat([y[:, :2], y[:, 3:4]], 1)) + m.conv(y[:, 3:])))), rest)
    assert seen[0][1] == ["conv2d", "conv2d, added, relu", "conv2d"]


FOLDED = {
    "norm": lambda m, y: m.norm(y),
    "twice": lambda m, y: m.norm(m.norm(y)),
    "factor": lambda m, y: y * m.factor,
    "first": lambda m, y: m.factor * y,
    "term": lambda m, y: y + m.term,
    "less": lambda m, y: y - m.term,
    "from": lambda m, y: m.term - y,
    "share": lambda m, y: y / m.factor.square(),
    "number": lambda m, y: 3 - (y * 2 + 1) / 7,
    "all": lambda m, y: -m.norm(y * m.factor - 1) * m.factor + m.term,
}


@each_graph
@pytest.mark.parametrize("function", FOLDED.values(), ids=FOLDED)
def test_folded(function, rest, seen):
    check(normal(Behind(function)), rest)
    ((folded, fused),) = seen
    assert len(folded) == 1 and fused == ["conv2d"]


LEFT = {
    "another axis": lambda m, y: y * m.wide[0],
    "rows": lambda m, y: y * m.wide[0][:, None],
    "pixels": lambda m, y: y * m.wide,
    "read twice": lambda m, y: y * m.factor + y,
    "a share of it": lambda m, y: m.factor / y,
    "of the image": lambda m, y: y * y.mean((2, 3), keepdim=True),
}


@each_graph
@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_not_folded(function, rest, seen):
    check(normal(Behind(function)), rest)
    assert seen[0][0] == []


def test_what_pytorch_is_faster_at_is_left_to_inductor(seen, times):
    times(THEIRS)
    model = normal(Behind(lambda m, y: F.relu(m.norm(y))))
    numbers = torch.get_rng_state()
    check(model, "inductor")
    assert len(seen[0][0]) == 1 and seen[0][1] == []
    assert torch.equal(torch.get_rng_state(), numbers)


def frozen_on(model, device, dtype, decompositions, in_graphs):
    """A model's graph after the passes, and its inputs: tensors without memory."""
    state = model.state_dict()

    def function(x, *tensors):
        return (functional_call(model, dict(zip(state, tensors, strict=True)), (x,)),)

    with FakeTensorMode(), torch.no_grad():
        inputs = [torch.empty(16, 3, 6, 6, device=device, dtype=dtype)]
        inputs += [torch.empty(t.shape, dtype=t.dtype, device=device) for t in state.values()]
        graph = make_fx(function, decompositions, tracing_mode="fake")(*inputs)
        options = _options.Options()
        return _compile._Frozen(graph, inputs, range(1, len(inputs)), options, decompositions, in_graphs), inputs


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("is_ours", [(False, True), (True, False), (True, True), (False, False)])
def test_graphs_of_cuda_have_a_choice_of_their_own(is_ours, in_graphs, monkeypatch):
    called, captured = ((0.5, 0.5) if ours else (2.0, 2.0) for ours in is_ours)

    def found(device, runs):
        # A call takes the interpreter's time here, a graph the device's.
        return {name: Seconds(1.0, 8.0) if name == PYTORCH else Seconds(captured[0], 8 * called[1]) for name in runs}

    monkeypatch.setattr(measure, "times_of", found)
    model = normal(Behind(lambda m, y: F.relu(m.norm(y))))
    frozen, _ = frozen_on(model, "cpu", torch.float32, select_decomp_table(), in_graphs)
    (decision,) = store.every()
    assert ((decision.choice != PYTORCH), (decision.in_graph != PYTORCH)) == is_ours
    assert frozen.what[1] == (["conv2d, relu"] if is_ours[in_graphs] else [])


PADDED = {
    "both": ((1, 1, 2, 2), 0.0, True),
    "rows": ((2, 2), 0.0, True),
    "one end": ((0, 1, 0, 1), 0.0, False),
    "ones": ((1, 1, 1, 1), 1.0, False),
    "less": ((-1, -1, -1, -1), 0.0, False),
}


@each_graph
@pytest.mark.parametrize("pads, number, is_folded", PADDED.values(), ids=PADDED)
def test_padding(pads, number, is_folded, rest, seen, monkeypatch):
    graphs = []
    made = _compile.fold_padding
    monkeypatch.setattr(_compile, "fold_padding", lambda graph: (made(graph), graphs.append(str(graph))))
    conv = nn.Conv2d(3, 4, 3, padding=(1, 0), stride=2, groups=1)
    check(nn.Sequential(Padded(pads, number), conv).eval(), rest)
    assert ("constant_pad_nd" not in graphs[0]) == is_folded


class Padded(nn.Module):
    def __init__(self, pads, number):
        super().__init__()
        self.pads, self.number = pads, number

    def forward(self, x):
        return F.pad(x, self.pads, value=self.number)


@each_graph
def test_a_filter_that_is_computed(rest, seen):
    model = normal(Behind(lambda m, y: m.norm(y)))
    torch.nn.utils.parametrizations.weight_norm(model.conv)
    fast = check(model, rest)
    with torch.no_grad():
        model.conv.parametrizations.weight.original0 *= 2
        ours, theirs = errors(model, fast(IMAGE), IMAGE)
    assert ours <= 1.5 * theirs + 1e-6 and len(seen) == 1


def test_a_filter_that_is_an_argument(seen):
    def function(x, weight):
        return F.relu(F.conv2d(x, weight))

    fast = compiled(function)
    with torch.no_grad():
        for _ in range(3):
            weight = leaf(4, 3, 3, 3, grad=False)
            torch.testing.assert_close(fast(IMAGE, weight), function(IMAGE, weight))
            weight.mul_(2)
            torch.testing.assert_close(fast(IMAGE, weight), function(IMAGE, weight))
    assert seen[0] == ([], [])


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_under_autocast(given, seen):
    model = normal(Behind(lambda m, y: F.silu(m.norm(y))))
    fast = compiled(model, "inductor")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = fast(IMAGE.to(given))
        want = model(IMAGE.to(given))
    assert y.dtype == want.dtype and seen[0][1] == ["conv2d, silu"]
    torch.testing.assert_close(y.float(), want.float(), rtol=5e-2, atol=5e-2)


def test_not_frozen(seen):
    check(normal(Behind(lambda m, y: F.relu(m.norm(y)))), freeze=False)
    assert seen[0] == ([], [])


def in_front(model, y):
    """As in DenseNet: the image is read elsewhere too, so its normalisation is not folded."""
    return torch.cat([y, F.relu(model.norm(y))], 1)


@each_graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_front_of_a_convolution(dtype, rest, seen):
    model = normal(Behind(in_front)).to(dtype)
    for image in (IMAGE, IMAGE.contiguous(memory_format=torch.channels_last), IMAGE[:1, :, :1, :1]):
        check(model, rest, image.to(dtype))
        # As a convolution its activation is fused; in f32 alone, where its weights are not rounded.
        is_one = rest == "eager" and dtype == torch.float32
        assert seen.pop() == ([], ["conv2d", "conv2d, relu"] if is_one else ["conv2d"])


def test_gradients_are_not_folded(seen):
    model = normal(Behind(lambda m, y: m.norm(y)))
    compiled(model)(IMAGE).sum().backward()
    assert model.norm.weight.grad is not None and not seen


CHANGES = {
    "a filter": lambda m: m.conv.weight.mul_(2),
    "a bias": lambda m: m.conv.bias.add_(1),
    "statistics": lambda m: m.norm.running_mean.add_(1),
    "data": lambda m: setattr(m.norm.weight, "data", m.norm.weight.data * 3),
    "a parameter": lambda m: setattr(m.conv, "weight", nn.Parameter(m.conv.weight * 2)),
    "a state": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "a low rank": lambda m: m.conv.weight.data.flatten(1).addmm_(torch.randn(6, 1), torch.randn(1, 27)),
    "type": lambda m: m.to(torch.bfloat16),
    "norm": lambda m: setattr(m, "norm", normal(nn.BatchNorm2d(6))),
}


NORMS = {"folded": lambda m, y: m.norm(y), "as it is": lambda m, y: F.relu(y), "in front": in_front}


@pytest.mark.parametrize("function", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change, function, seen):
    model = normal(Behind(function))
    fast = check(model)
    with torch.no_grad():
        change(model)
        x = IMAGE.to(model.conv.weight.dtype)
        for _ in range(2):
            ours, theirs = errors(model, fast(x), x)
            assert ours <= 1.5 * theirs + 1e-6


@pytest.mark.parametrize("is_made", [True, False])
def test_inference_mode(is_made, seen):
    with torch.inference_mode(is_made):
        model = normal(Behind(lambda m, y: m.norm(y)))
    fast = compiled(model)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(fast(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-4)
            model.norm.running_mean.add_(1)
            model.conv.weight.mul_(2)
            torch.testing.assert_close(fast(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_model_of_inference_mode_is_captured(rest):
    with torch.inference_mode():
        model = normal(Behind(lambda m, y: m.norm(y))).cuda()
        fast, image = compiled(model, rest), IMAGE.cuda()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                fast(image)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(image)
        graph.replay()
        torch.testing.assert_close(y, model(image), rtol=1e-3, atol=1e-3)


def test_models_of_one_structure(seen):
    function = lambda m, y: m.norm(y)
    models = [normal(Behind(function)) for _ in range(2)]
    fast = [compiled(model) for model in models]
    with torch.no_grad():
        for _ in range(2):
            for model, ours in zip(models, fast, strict=True):
                torch.testing.assert_close(ours(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-4)


def test_memory_of_a_dropped_model(seen):
    model = normal(Behind(lambda m, y: m.norm(y)))
    made = []
    fold = _compile.ConstantsCache._computed

    def kept(self, *args):
        found = fold(self, *args)
        made.extend(weakref.ref(t) for t in found.constants)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compile.ConstantsCache, "_computed", kept)
        check(model)
    assert made and all(t() is not None for t in made)
    del model
    gc.collect()
    # What was held by the model's parameters is let go by their end.
    gc.collect()
    assert all(t() is None for t in made)


@each_graph
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu6", "hardswish", "leaky_relu(0.2)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_of_images(dtype, activation, rest, seen):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.norm, self.one, self.other = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
            self.scale = nn.Parameter(torch.randn(8, 1, 1))

        def forward(self, x):
            x = self.conv(x)
            y = self.other(ACTIVATIONS[activation](self.one(self.norm(x.permute(0, 2, 3, 1)))))
            return x + self.scale * y.permute(0, 3, 1, 2)

    check(Block().eval().to(dtype), rest, IMAGE.to(dtype))
    # Inductor gains nothing by convolutions in place of products in bf16.
    converted = (["mul"], ["conv2d", f"conv2d, {activation}", "conv2d, added"])
    assert seen == [converted if rest == "eager" or dtype == torch.float32 else ([], ["conv2d"])]


@each_graph
def test_other_readers_of_linear_layers(rest, seen):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.one, self.other = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.one(self.conv(x).permute(0, 2, 3, 1))
            z = F.gelu(y)
            return self.other(z).permute(0, 3, 1, 2), y * 2, z + 1

    model = Block().eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, rest)(IMAGE), model(IMAGE), rtol=1e-5, atol=1e-5)
    assert seen == [([], ["conv2d", "linear"])]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layouts(layout, seen):
    class Model(Behind):
        def forward(self, x):
            y = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
            return y, y.view(2, 3, -1) if y.is_contiguous() else y.flatten(1)

    model = normal(Model(None)).to(memory_format=layout)
    x = IMAGE.contiguous(memory_format=layout)
    with torch.no_grad():
        for got, want in zip(compiled(model)(x), model(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert got.stride() == want.stride()


def test_the_layout_of_kernels_that_the_tracer_does_not_know(seen):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)).eval()
    with torch.no_grad():
        assert compiled(model)(IMAGE).stride() == model(IMAGE).stride() == (128, 16, 4, 1)


class Told:
    """The names that a report is told."""

    def __init__(self):
        self.names = {}

    def fused(self, name, what):
        self.names[name] = what

    def left(self, name, why):
        pass


def test_gelu_and_large_groups(seen, monkeypatch):
    called = []
    ours = lambda *args: called.append(args[1]) or F.group_norm(*args)
    # Of results in channels-last, which newer versions of PyTorch tell, none is Windrow's.
    monkeypatch.setattr(_compile, "to_channels_last", lambda *_: None)
    monkeypatch.setattr(_others, "pays", lambda x, groups: groups == 2)
    monkeypatch.setattr(_others, "group_norm", ours)
    monkeypatch.setattr(_others, "gelu_of_any", lambda x, kind: called.append(kind) or F.gelu(x, approximate=kind))
    norms = [nn.GroupNorm(2, 4), nn.GroupNorm(4, 4), nn.GroupNorm(2, 4, affine=False)]
    told = Told()
    check(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.GELU(), *norms, nn.GELU("tanh")).eval(), report=told)
    assert called == ["none", 2, 2, "tanh"] * 2
    assert {name: what for name, what in told.names.items() if name != "0"} == {
        "2": "gelu", "3": "group_norm", "5": "group_norm", "6": "gelu",
    }  # fmt: skip
    check(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.GELU()).eval(), "inductor")
    assert len(called) == 8, "Inductor computes them with what stands around them"


def test_group_norms_in_channels_last(seen, monkeypatch):
    called = []

    def ours(x, *rest):
        called.append(x.is_contiguous(memory_format=torch.channels_last))
        return F.group_norm(x, *rest).contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(_others, "pays_in_channels_last", lambda x, groups: True)
    monkeypatch.setattr(_others, "group_norm_in_channels_last", ours)
    norm = lambda m, y: F.group_norm(y, 2, m.factor.flatten(), m.term.flatten())
    # On CUDA PyTorch copies the image of the normalisation.
    copied = lambda m, y: norm(m, y.contiguous()) + y
    for f in (norm, copied, lambda m, y: F.silu(norm(m, y)).reshape(2, -1)):
        check(Behind(f).eval().to(memory_format=torch.channels_last))
    assert called and all(called)
    # Someone sees the strides inside.
    count = len(called)
    check(Behind(lambda m, y: norm(m, y).as_strided((2, 3), (1, 2)) + 1).eval().to(memory_format=torch.channels_last))
    assert len(called) == count


def test_convolutions_read_what_is_copied(seen, monkeypatch):
    """Beside a normalisation in channels-last."""
    monkeypatch.setattr(_others, "pays_in_channels_last", lambda x, groups: True)
    replaced, found = _others.others_to_windrows, []

    def spy(graph, report):
        replaced(graph, report)
        found.extend((node.target, [read.target for read in node.all_input_nodes]) for node in graph.nodes)

    monkeypatch.setattr(_compile, "others_to_windrows", spy)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.norm = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), nn.GroupNorm(2, 6)

        def forward(self, x):
            y = self.first(x)
            copy = y.contiguous()
            return self.second(copy) + self.norm(y), copy

    model = normal(Model()).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for got, want in zip(compiled(model)(IMAGE), model(IMAGE), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert got.stride() == want.stride()
    *_, second = (reads for target, reads in found if target is _others.CONV2D_FUSED)
    assert second[0] is _others.CONV2D_FUSED
    # That this copy is a result stays.
    assert torch.ops.aten.clone.default in dict(found)


def test_nothing_is_copied_to_be_read(seen, monkeypatch):
    """As by dropout, which older versions of PyTorch make a copy in inference."""
    replaced, copies = _others.others_to_windrows, []

    def spy(graph, report):
        replaced(graph, report)
        found = [node for node in graph.nodes if node.target is torch.ops.aten.clone.default]
        copies.extend(node for node in found if "memory_format" not in node.kwargs)

    monkeypatch.setattr(_compile, "others_to_windrows", spy)
    check(Behind(lambda m, y: F.silu(F.dropout(torch.tanh(y).clone(), training=False)) + y.clone().clone()).eval())
    assert not copies
    # Results share no memory with others.
    model = Behind(lambda m, y: (torch.tanh(y), y.clone(), y.clone()[:, 1:])).eval()
    with torch.no_grad():
        results = compiled(model)(IMAGE)
        for got, want in zip(results, model(IMAGE), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len({t.untyped_storage().data_ptr() for t in results}) == 3 and len(copies) == 2


def test_memory_of_a_graph():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 4), (4, 8), (8, 2)))

        def forward(self, x):
            first, second, third, last = self.convs
            y = first(x)
            inner = second(y.relu()).view(2, 4, 36)[:, :, :].view(2, 4, 6, 6)
            return last(y + third(inner))

    tensors = {**Model().state_dict()}
    with torch.no_grad():
        run = lambda x, *given: functional_call(Model(), dict(zip(tensors, given, strict=True)), (x,))
        graph = make_fx(run, tracing_mode="fake")(torch.randn(2, 3, 6, 6), *tensors.values()).graph
    memory, channel = Memory(graph), 4 * 2 * 36
    convs = [node for node in graph.nodes if node.target is torch.ops.aten.convolution.default]
    assert [memory.beside(node, node.args[0]) for node in convs] == [0, 8 * channel, 8 * channel, 0]
    # The sum's other part is the residual, if it is fused.
    assert memory.beside(convs[2], convs[2].args[0], convs[0]) == 0
    # The second: the first's result, that of ReLU, and its own.
    assert memory.peak == (8 + 8 + 4) * channel
    assert memory.device == torch.device("cpu")
    of_any = torch.fx.Graph()
    assert Memory(of_any).device is None


def traced_as(function, x):
    return make_fx(function, tracing_mode="fake")(x)


@pytest.mark.parametrize(
    "function",
    [lambda x: F.silu(x), lambda x: (F.silu(x).view(2, -1), x + 1), lambda x: (x + 1).view(2, 2, 4, 15).mean(2), lambda x: (x,)],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_results_keep_their_layout(function, is_last):
    x = torch.randn(2, 8, 3, 5)
    traced = traced_as(function, x)
    for _ in range(2):
        assert _layout.keep_results(traced.graph)
    traced.recompile()
    given = x.contiguous(memory_format=torch.channels_last) if is_last else x
    for got, want in zip(tree_leaves(traced(given)), tree_leaves(function(x)), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_attention_without_dropout_draws_nothing(name):
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    names = [argument.name for argument in operator._schema.arguments]
    graph = torch.fx.Graph()
    called = lambda *args, **kwargs: graph.call_function(operator, args, kwargs)
    before = [None] * names.index("dropout_p")
    for node, draws in [
        (called(*before), False),
        (called(*before, 0.0, False), False),
        (called(*before, 0.5, False), True),
        (called(*before, dropout_p=0.5), True),
    ]:
        assert _layout.sees_strides(node) == draws
    assert _layout.sees_strides(graph.call_function(torch.ops.aten.rand_like.default, (None,)))


@pytest.mark.parametrize("function", [lambda x: x.as_strided((2, 3), (1, 2)) + 1, lambda x: F.silu(x)[:, 1:]])
def test_graphs_that_see_strides_stay(function):
    traced = traced_as(function, torch.randn(2, 8, 3, 5))
    code = traced.code
    assert not _layout.keep_results(traced.graph)
    traced.recompile()
    assert traced.code == code


class LooksUp(Behind):
    """That has its own way to find what is no attribute, as models of diffusers."""

    def __getattr__(self, name):
        return super().__getattr__(name)


def test_names_where_attributes_are_looked_up(seen):
    told = Told()
    check(LooksUp(lambda m, y: F.relu(y)).eval(), report=told)
    assert [*told.names] == ["conv"]


@pytest.mark.skipif(needs_driver(), reason=f"PyTorch {torch.__version__} asks for a driver to lay them out")
@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_devices_agree(dtype, in_graphs):
    """On CUDA without a device: tensors without memory say where an operator would be given two devices."""
    model = normal(Behind(lambda m, y: F.relu(m.term - m.norm(y) * m.factor + 1))).to(dtype)
    frozen, tensors = frozen_on(model, "cuda", dtype, None, in_graphs)
    assert len(frozen.what[0]) == 1 and frozen.what[1:] == (["conv2d, relu"], 0)
    with tensors[0].fake_mode, torch.no_grad():
        given = [tensors[i] for i in frozen.watched]
        results = frozen.constants.prologue()(*given)
    assert {*((*t.shape, t.dtype, t.device.type) for t in results)} == {(6, 3, 3, 3, dtype, "cuda"), (6, dtype, "cuda")}
