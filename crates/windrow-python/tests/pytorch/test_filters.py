"""Packed filters are those of the filter as it is, however it came to be so."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
import windrow
from common import TOLERANCE, assert_close, each_device, leaf
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils import dlpack
from windrow.torch import Conv2d, _filters, conv2d, freeze, unfreeze


def network(device):
    """Wide enough that filters are packed for Winograd's algorithm."""
    layers = Conv2d(16, 24, 3, padding=1), Conv2d(24, 16, 3, padding=1)
    return nn.Sequential(*layers).to(device).eval()


def image(device):
    return leaf(2, 16, 20, 20, device=device, grad=False)


def plain(model, x):
    """In f64."""
    x = x.double()
    for module in model:
        x = F.conv2d(x, module.weight.double(), module.bias.double(), padding=1)
    return x


def close(model, x):
    with torch.no_grad():
        assert_close(model(x), plain(model, x))


def fused(optimizer, **options):
    def change(model, x):
        step = optimizer(model.parameters(), lr=0.1, fused=True, **options)
        model(x).square().mean().backward()
        step.step()

    return change


def data(change):
    """A change of each parameter's `.data`, which PyTorch does not count."""

    def every(model, x):
        for p in model.parameters():
            change(p)

    return every


def twice(model, x):
    """The second value may come to lie where the first one lay before."""
    for p in model.parameters():
        p.data = torch.randn_like(p)
    close(model, x)
    for _ in range(2):
        for p in model.parameters():
            p.data = torch.randn_like(p)


def as_vector(model, x):
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 1.5, model.parameters())
    close(model, x)
    # The parameters are views of one vector now.
    vector_to_parameters(vector * -0.5, model.parameters())


def flat_buffer(model, x):
    flat = parameters_to_vector(model.parameters()).detach().clone()
    vector_to_parameters(flat, model.parameters())
    close(model, x)
    flat.mul_(-0.75)


def numpy_alias(model, x):
    if x.is_cuda:
        pytest.skip("NumPy is in main memory")
    for p in model.parameters():
        p.detach().numpy()[:] *= 1.25


def dlpack_alias(model, x):
    for p in model.parameters():
        dlpack.from_dlpack(dlpack.to_dlpack(p.detach())).add_(0.125)


def share_memory(model, x):
    model.share_memory()
    close(model, x)
    for p in model.parameters():
        p.data.mul_(0.5)


def resized_to_nothing_and_back(model, x):
    for p in model.parameters():
        values, storage = p.detach() * 1.5, p.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        p.data.copy_(values)


def types_and_back(model, x):
    model.to(torch.bfloat16).to(torch.float32)


def our_own_write(model, x):
    for p in model.parameters():
        windrow.gelu(p.detach(), out=p.detach())
        windrow.gelu(p, out=p)


def swap_tensors(model, x):
    for module in model:
        torch.utils.swap_tensors(module.weight, nn.Parameter(torch.randn_like(module.weight)))


def swapped_by_load_state_dict(model, x):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({k: v + 0.25 for k, v in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def low_rank_merge(model, x):
    for module in model:
        a, b = torch.randn(2, module.weight[0].numel()), torch.randn(module.out_channels, 2)
        module.weight.data += (b @ a).reshape(module.weight.shape).to(x.device)


def averages(model, x):
    """As diffusers' EMAModel does it: `copy_to`, then `restore`."""
    parameters = list(model.parameters())
    shadow = [0.5 * p.detach() for p in parameters]
    stored = [p.detach().cpu().clone() for p in parameters]
    for s, p in zip(shadow, parameters, strict=True):
        p.data.copy_(s.to(p.device).data)
    close(model, x)
    for c, p in zip(stored, parameters, strict=True):
        p.data.copy_(c.data)
    close(model, x)
    for s, p in zip(shadow, parameters, strict=True):
        p.data.copy_(s.data)


def counted(model, x):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def new_parameter(model, x):
    for module in model:
        module.weight = nn.Parameter(torch.randn_like(module.weight))


def load_state_dict(model, x):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def other_layout(model, x):
    model.to(memory_format=torch.channels_last)


CHANGES = {
    "fused SGD": fused(torch.optim.SGD, momentum=0.9),
    "fused Adam": fused(torch.optim.Adam),
    "fused AdamW": fused(torch.optim.AdamW),
    "fused Adagrad": fused(torch.optim.Adagrad),
    "clamp_": data(lambda p: p.data.clamp_(-0.01, 0.01)),
    "normal_": data(lambda p: p.data.normal_()),
    "copy_": data(lambda p: p.data.copy_(torch.randn_like(p))),
    "one value": data(lambda p: p.data.view(-1)[-1:].add_(1)),
    **{
        f.__name__: f
        for f in [
            twice,
            as_vector,
            flat_buffer,
            numpy_alias,
            dlpack_alias,
            share_memory,
            resized_to_nothing_and_back,
            types_and_back,
            our_own_write,
            swap_tensors,
            swapped_by_load_state_dict,
            low_rank_merge,
            averages,
            counted,
            new_parameter,
            load_state_dict,
            other_layout,
        ]
    },
}


@each_device
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(device, change):
    if change == "share_memory" and device == "cuda":
        pytest.skip("memory of a GPU is shared as it is")
    if change == "fused Adagrad" and device == "cuda":
        pytest.skip("PyTorch fuses Adagrad on the CPU only")
    model, x = network(device), image(device)
    for _ in range(2):
        close(model, x)
        close(model, x)
        CHANGES[change](model, x)
        close(model, x)
    # Another image size may want another packing of the same filter.
    close(model, leaf(1, 16, 4, 4, device=device, grad=False))
    close(model, x)


@each_device
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_training_with_a_fused_optimizer(device, optimizer):
    """The losses are those of PyTorch's own convolutions, with evaluation between the steps."""
    if (device, optimizer) == ("cuda", "Adagrad"):
        pytest.skip("PyTorch fuses Adagrad on the CPU only")
    ours = network(device)
    theirs = copy.deepcopy(ours)
    for module in theirs:
        module.__class__ = nn.Conv2d
    x, losses = image(device), []
    for model in (ours, theirs):
        step = getattr(torch.optim, optimizer)(model.parameters(), lr=0.02, fused=True)
        losses.append([])
        for _ in range(4):
            loss = model(x).square().mean()
            step.zero_grad()
            loss.backward()
            step.step()
            with torch.no_grad():
                losses[-1].append(model(x).square().mean())
    torch.testing.assert_close(*losses, rtol=2e-3, atol=1e-5)
    assert losses[0][0] != losses[0][-1]


@each_device
def test_compiled_graphs_see_changes(device):
    model, x = network(device), image(device)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert_close(compiled(x), plain(model, x))
            for p in model.parameters():
                p.data.mul_(1.5)


@each_device
def test_autocast_keeps_what_is_packed(device):
    model, x = network(device), image(device)

    def call():
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            y = model(x)
        # Two layers, so two roundings of everything beside those of the results.
        error = (y.double() - plain(model, x)).abs().max()
        assert error <= 4 * TOLERANCE[y.dtype] * y.abs().max()
        return _filters.kept_bytes(x.device)

    kept = call()
    # On a GPU some algorithms read the filter where it lies.
    assert kept > 0 or device == "cuda"
    for _ in range(3):
        assert call() == kept
        model[0].weight.data.mul_(1.5)


@each_device
def test_module_is_copied_and_saved(device):
    model, x = network(device), image(device)
    close(model, x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    assert set(state) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for twin in [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]:
        close(twin, x)
        with torch.no_grad():
            twin[0].weight.mul_(3)
        close(twin, x)
    close(model, x)
    model.load_state_dict(state)
    close(model, x)


def test_what_is_packed_goes_with_the_filter():
    def kept():
        gc.collect()
        return _filters.kept_bytes(torch.device("cpu")), len(_filters._storages)

    before = kept()
    model, x = network("cpu"), image("cpu")
    close(model, x)
    assert kept()[0] > before[0]
    model[0].weight.data = torch.randn_like(model[0].weight)
    close(model, x)
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
    close(model, x)
    copies = [copy.deepcopy(model) for _ in range(3)]
    for twin in copies:
        close(twin, x)
    del model, copies, twin
    assert kept() == before


def test_plain_tensors_are_kept_from_the_second_call_on():
    cpu, x = torch.device("cpu"), image("cpu")
    weight = torch.randn(24, 16, 3, 3)

    def call(weight):
        assert_close(conv2d(x, weight), F.conv2d(x.double(), weight.double()))
        return _filters.kept_bytes(cpu)

    before = _filters.kept_bytes(cpu)
    assert call(weight) == before
    assert call(weight) > before
    weight.numpy()[:] = 1
    call(weight)
    # One that is made for each call is not: its packed form would go with it.
    kept = _filters.kept_bytes(cpu)
    for _ in range(3):
        assert call(weight * 2) == kept


def test_training_keeps_nothing():
    model, x = network("cpu"), image("cpu")
    before = _filters.kept_bytes(torch.device("cpu"))
    for _ in range(2):
        model(x).sum().backward()
    assert _filters.kept_bytes(torch.device("cpu")) == before
    assert_close(model(x).detach(), plain(model, x).detach())


@each_device
def test_frozen_filters_are_not_looked_at(device):
    model, x = network(device), image(device)
    assert freeze(model) is model
    close(model, x)
    with torch.no_grad():
        want = plain(model, x)
        for p in model.parameters():
            if p.dim() == 4:
                p.data.view(-1)[:1].add_(1)
        # The promise is broken: what was packed is used. On a GPU some algorithms read the filter where it lies.
        if device == "cpu":
            assert_close(model(x), want)
        twin = copy.deepcopy(model)
        close(twin, x)
    assert unfreeze(model) is model
    close(model, x)
    freeze(model)
    close(model, x)
    # A filter that is replaced is another one.
    for module in model:
        module.weight.data = torch.randn_like(module.weight)
    close(model, x)
    new_parameter(model, x)
    close(model, x)
    # So is one in training.
    model(x).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    assert_close(model(x).detach(), plain(model, x).detach())


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
def test_a_graph_follows_the_filter_and_outlives_the_module():
    model, x = network("cuda"), image("cuda")
    weights = [module.weight for module in model]
    biases = [module.bias for module in model]
    close(model, x)  # Compiles the kernels, which a capture does not allow.
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(3):
            graph.replay()
            assert_close(y, plain(model, x))
            for w in weights:
                w.data.mul_(0.75)
        # A call outside packs for itself.
        close(model, x)
        graph.replay()
        assert_close(y, plain(model, x))
        model = None
        gc.collect()
        other = network("cuda")
        close(other, x)
        x.normal_()
        graph.replay()
        want = x.double()
        for w, b in zip(weights, biases, strict=True):
            want = F.conv2d(want, w.double(), b.double(), padding=1)
        assert_close(y, want)


@needs_cuda
def test_streams_that_share_a_module():
    """Each changes the filter only after the other one has read it, as events order it."""
    model, x = network("cuda"), image("cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    results, wanted = [], []
    torch.cuda.synchronize()
    with torch.no_grad():
        for i in range(12):
            stream, other = streams[i % 2], streams[1 - i % 2]
            stream.wait_stream(other)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                for p in model.parameters():
                    p.data.mul_(-0.9)
                results.append(model(x))
                wanted.append(plain(model, x))
            # Both read the same filter at the same time.
            other.wait_stream(stream)
            with torch.cuda.stream(other):
                results.append(model(x))
                wanted.append(plain(model, x))
    torch.cuda.synchronize()
    for y, want in zip(results, wanted, strict=True):
        assert_close(y, want)
