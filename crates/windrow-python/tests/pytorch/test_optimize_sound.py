"""`optimize` of models that do more than to call operators one after the other: right, or not fused."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from common import leaf
from torch import nn
from windrow.torch import optimize
from windrow.torch._optimize import Compiled

pytestmark = pytest.mark.usefixtures("nothing_decided")


def conv(c=4, k=4, size=3, **how):
    return nn.Conv2d(c, k, size, padding=size // 2, **how)


class Net(nn.Module):
    """What a function makes of two convolutions and a normalisation."""

    def __init__(self, function=None):
        super().__init__()
        self.a, self.b, self.norm = conv(), conv(size=1), nn.BatchNorm2d(4)
        nn.init.normal_(self.norm.running_mean)
        if function is not None:
            self.function = function

    def forward(self, x):
        return self.function(self, x)


def image():
    return leaf(2, 4, 9, 8, grad=False)


def close(got, want):
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    elif isinstance(want, list | tuple):
        assert type(got) is type(want) and len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            close(g, w)
    elif isinstance(want, dict):
        assert type(got) is type(want) and [*got] == [*want]
        for key in want:
            close(got[key], want[key])
    else:
        assert type(got) is type(want) and got == (pytest.approx(want, 1e-4) if isinstance(want, float) else want)


def as_the_model(model, *inputs, calls=3):
    """Each call of the optimized model gives what one of the model gives, and leaves its inputs as that does."""
    optimized = [optimize(model.eval(), check=check) for check in (False, True)]
    models = [copy.deepcopy(model) for _ in optimized]
    with torch.no_grad():
        for fast, model in zip(optimized, models, strict=True):
            for _ in range(calls):
                given, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
                torch.manual_seed(5)
                want = model(*theirs)
                torch.manual_seed(5)
                close(fast(*given), want)
                close(given, theirs)
    # What is right without its check must not be called wrong by it.
    assert not any("check" in name for name in fast.windrow_report.left), fast.windrow_report
    return fast


def graphs(model):
    return [m for m in model.modules() if isinstance(m, Compiled)]


# Sums in place.


def dropped(m, x):
    y = m.a(x)
    y.add_(m.b(x))
    return y


def dropped_of_the_second(m, x):
    y, z = m.a(x), m.b(x)
    z.add_(y)
    return z * 2, y


def kept_elsewhere(m, x):
    y = m.a(x)
    skips = [y]
    y += m.b(y)
    return torch.cat([y, skips[0]], 1)


def in_a_loop(m, x):
    ys = []
    for _ in range(3):
        y = m.a(x)
        ys.append(y)
        y += m.b(x)
        x = F.relu(y, inplace=True)
    return ys


def of_a_view(m, x):
    y = m.a(x)
    y[:, 1:3].add_(m.b(x)[:, :2])
    return y


def product(m, x):
    y = m.a(x)
    z = y
    y *= m.b(x)
    y -= 1
    return y, z


def by_out(m, x):
    y = m.a(x)
    torch.add(y, m.b(x), out=y)
    return y


def activated_in_place(m, x):
    y = m.a(x)
    F.relu_(y)
    y.add_(m.b(x))
    torch.relu_(y)
    return y


def read_later(m, x):
    y = m.a(x)
    z = m.b(x)
    y += z
    return y * z


def into_the_image(m, x):
    x += 1
    return m.a(x) + x


@pytest.mark.parametrize(
    "function",
    [
        dropped, dropped_of_the_second, kept_elsewhere, in_a_loop, of_a_view, product, by_out, activated_in_place,
        read_later, into_the_image,
    ],
)  # fmt: skip
def test_in_place(function):
    fast = as_the_model(Net(function), image())
    copied = copy.deepcopy(fast)
    torch.save(fast, file := io.BytesIO())
    file.seek(0)
    x = image()
    with torch.no_grad():
        want = fast(x.clone())
        for other in (copied, torch.load(file, weights_only=False)):
            close(other(x.clone()), want)


# State, constants, random numbers, flags.


def keeps_an_image(m, x):
    before = m.__dict__.get("past", torch.zeros(2, 4, 9, 2))
    x = torch.cat([before, x], 3)
    m.past = x[..., -2:]
    return m.a(x)


def keeps_a_list(m, x):
    m.__dict__.setdefault("seen", []).append(m.a(x))
    return torch.stack([y.mean() for y in m.seen])


def counts(m, x):
    m.__dict__["calls"] = m.__dict__.get("calls", 0) + 1
    return m.a(x) * m.calls


def writes_a_table(m, x):
    if "table" not in m._buffers:
        m.register_buffer("table", torch.zeros(4, 1, 1))
    y = m.a(x)
    m.table.add_(y.mean((0, 2, 3))[:, None, None])
    return y + m.table


def writes_a_constant(m, x):
    y = torch.zeros(2, 4, 9, 8)
    y += m.a(x)
    return y


def counts_in_a_buffer(m, x):
    m.norm.num_batches_tracked += 1
    return m.a(x) * m.norm.num_batches_tracked


def random(m, x):
    return m.a(x) + torch.rand(4, 1, 1)


def random_like(m, x):
    return m.a(x) + torch.rand_like(x)


def drops_out(m, x):
    return F.dropout(m.a(x), 0.5, training=True) + F.relu(m.b(x))


def casts(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.a(x)
    return m.b(y.float())


def sizes(m, x):
    return m.a(x) + x.shape[-1], F.relu(m.b(x) + x.size(2) * 2), m.a(x).add(x.dim()), m.a(x) + len(m._modules)


@pytest.mark.parametrize(
    "function",
    [
        keeps_an_image, keeps_a_list, counts, writes_a_table, writes_a_constant, counts_in_a_buffer, random, random_like,
        drops_out, casts, sizes,
    ],
)  # fmt: skip
def test_more_than_operators(function):
    fast = as_the_model(Net(function), image())
    # What is in it is compiled, under its name.
    assert not {"the model", "check"} & {*fast.windrow_report.fused} and "a" in fast.windrow_report.fused
    is_seen = function not in (keeps_an_image, keeps_a_list, counts)
    # The report of the first model: PyTorch up to 2.11 breaks the graph at `setdefault`, and the code behind the break that
    # is left uncompiled for one model it leaves for all, without asking again.
    torch._dynamo.reset()
    fast = optimize(Net(function).eval())
    with torch.no_grad():
        fast(image())
    assert is_seen == (not any(name.endswith(", state") for name in fast.windrow_report.left))


class Configured(Net):
    """That looks up what is no attribute, as models of diffusers do."""

    def __init__(self, function):
        super().__init__(function)
        self._config = {"scale": 2, "sizes": [1, 2]}

    def __getattr__(self, name):
        if "_config" in self.__dict__ and name in self.__dict__["_config"]:
            return self.__dict__["_config"][name]
        return super().__getattr__(name)


def test_attributes_that_are_looked_up():
    model = Configured(lambda m, x: m.a(x) * m.scale + m.sizes[1]).eval()
    fast, x = optimize(model), image()
    with torch.no_grad():
        for _ in range(2):
            close(fast(x), model(x))
        assert "a" in fast.windrow_report.fused and not fast.windrow_report.left
        for change in (lambda m: m._config["sizes"].append(1), lambda m: m._config.update(scale=3)):
            change(model), change(fast)
            close(fast(x), model(x))
        assert "has changed" in fast.windrow_report.left["the model, state"]


class StaysInTraining(Net):
    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d | nn.Dropout):
                module.training = True
        return self


def test_a_normalisation_that_stays_in_training_is_not_folded():
    model = StaysInTraining(lambda m, x: m.norm(m.a(x)))
    fast = as_the_model(model, image())
    assert not any("folded" in what for what in fast.windrow_report.fused.values())
    model = StaysInTraining(lambda m, x: m.b(m.drop(F.relu(m.a(x)))))
    model.drop = nn.Dropout(0.5)
    as_the_model(model, image())


# Modules whose calls do more.


def test_a_forward_of_an_instance():
    def wrap(module):
        inner, more = module.forward, conv()
        module.forward = lambda x: inner(x) + more(x)

    for name in ("0", "1", "2", ""):
        model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(conv(), nn.ReLU()))
        wrap(model.get_submodule(name))
        as_the_model(model, image())
    fast = as_the_model(nn.Sequential(nn.Sequential(conv(), nn.ReLU()), conv()), image())
    x = image()
    want = fast(x)
    wrap(fast[0][0])
    assert not torch.equal(fast(x), want), "one that comes later is called"
    close(fast(x), fast[1](fast[0][1](fast[0][0](x))))


class Twice(nn.Conv2d):
    def __call__(self, x):
        return super().__call__(super().__call__(x))


class OwnCall(Net):
    def __call__(self, x):
        return super().__call__(x) + 1


def test_an_own_call():
    as_the_model(nn.Sequential(Twice(4, 4, 3, padding=1), nn.ReLU(), conv()), image())
    as_the_model(OwnCall(lambda m, x: F.relu(m.a(x))), image())
    as_the_model(nn.Sequential(OwnCall(lambda m, x: F.relu(m.a(x))), nn.ReLU()), image())


def test_hooks_on_containers():
    model = nn.Sequential(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()), conv())
    model[0].register_forward_hook(lambda module, args, y: y + 1)
    as_the_model(model, image())
    fast, x = optimize(nn.Sequential(nn.Sequential(conv(), nn.ReLU()), conv()).eval()), image()
    want, seen = fast(x), []
    for name in ("0", "0.0", "0.1"):
        fast.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    close(fast(x), want)
    assert seen == ["0.0", "0.1", "0"]


def test_hooks_of_a_module_that_comes_later():
    model = nn.Sequential(nn.Sequential(conv(), nn.ReLU()), conv()).eval()
    fast, x = optimize(model), image()
    with torch.no_grad():
        fast(x)
        before = torch._dynamo.config.skip_nnmodule_hook_guards
        fast[0][1] = nn.ReLU()
        fast[0][1].register_forward_hook(lambda module, args, y: y + 1)
        close(fast(x), fast[1](fast[0][0](x).relu() + 1))
    assert torch._dynamo.config.skip_nnmodule_hook_guards == before


# Inputs and results.


def test_a_reset_of_the_compiler():
    """Dynamo gives what it iterates by a name among the model's globals, which a reset removes."""
    model = Net(lambda net, x: net.parts(x))
    model.parts = nn.Sequential(model.a, nn.ReLU(), model.b)
    model.eval()
    fast, x = optimize(model), image()
    with torch.no_grad():
        for _ in range(2):
            for _ in range(3):
                close(fast(x), model(x))
            torch._dynamo.reset()


def times_factor(net, x):
    return net.b(net.a(x).relu()) * FACTOR.value


class Factor:
    value = 2.0


FACTOR, OTHER = Factor(), 0


def test_globals_that_change(monkeypatch):
    """Of the model's module and of others, and globals that the model does not read."""
    model = Net(times_factor).eval()
    fast, x = optimize(model), image()
    other = Factor()
    other.value = 3.0
    with torch.no_grad():
        for change in (
            lambda: monkeypatch.setitem(globals(), "OTHER", 1),
            lambda: monkeypatch.setitem(globals(), "FACTOR", other),
            lambda: monkeypatch.setattr(other, "value", 4.0),
            lambda: monkeypatch.setattr(F, "unread", 1, raising=False),
            lambda: monkeypatch.setattr(F, "conv2d", lambda *args, conv=F.conv2d: conv(*args) + 1),
        ):
            for _ in range(3):
                close(fast(x), model(x))
            change()
            for _ in range(3):
                close(fast(x), model(x))


class Last(nn.Module):
    def __init__(self, take, give=lambda y: y):
        super().__init__()
        self.conv, self.take, self.give = nn.Sequential(conv(), nn.ReLU()), take, give

    def forward(self, given):
        return self.give(self.conv(self.take(given)))


@pytest.mark.parametrize(
    "given, take",
    [
        (lambda x: [x * 2, x], lambda given: given[-1]),
        (lambda x: (x, x + 1), lambda given: given[0] + given[1]),
        (lambda x: {"image": x, "scale": 2}, lambda given: given["image"] * given["scale"]),
        (lambda x: {"images": [x, x]}, lambda given: given["images"][1]),
        (lambda x: [x, x], lambda given: torch.stack(given).sum(0)),
        (lambda x: (x, 3), lambda given: given[0] + len(given)),
    ],
)
@pytest.mark.parametrize(
    "give",
    [lambda y: [y, y + 1], lambda y: (y, {"y": y}), lambda y: {"a": y, "n": 3}, lambda y: y.shape, lambda y: y.mean().item()],
)
def test_containers(given, take, give):
    as_the_model(Last(take, give), given(image()))


class Ordered(dict):
    pass


@pytest.mark.parametrize("kind", [OrderedDict, Ordered, dict])
def test_dictionaries_of_other_kinds(kind):
    as_the_model(Last(lambda x: x, lambda y: kind(y=y)), image())


def is_tensor(m, x):
    y = m.a(x)
    return m.b(y) if isinstance(y, torch.Tensor) and torch.jit.isinstance(y, torch.Tensor) else y


def is_no_list(m, x):
    y = m.a(x)
    return m.b(y) if not isinstance(y, list | tuple | nn.Parameter) and torch.is_tensor(y) else y


def as_a_tensor(m, x):
    # Compiled code asks, too, and would read memory that is none of a tensor's.
    return m.a(x) + torch.as_tensor(m.b(x))


@pytest.mark.parametrize("function", [is_tensor, is_no_list, as_a_tensor])
def test_a_model_that_asks_for_types(function):
    as_the_model(Net(function), image())


def test_other_kinds_of_input():
    model = Last(lambda given: given if isinstance(given, torch.Tensor) else given[-1]).eval()
    fast, x = optimize(model), image()
    with torch.no_grad():
        for given in (x, [x, x], (x,), x[0], x.double().float(), x.contiguous(memory_format=torch.channels_last)):
            close(fast(given), model(given))


# What a module reads of the modules in it.


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.stride = conv(), nn.BatchNorm2d(4), 2
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))

    def features(self, x):
        return self.conv(x)

    @property
    def channels(self):
        return self.conv.out_channels


class Parent(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.encoder, self.head, self.function = Encoder(), conv(), function
        self.net = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.ReLU())
        self.list = nn.ModuleList([nn.Sequential(conv(), nn.ReLU()) for _ in range(3)])
        self.dict = nn.ModuleDict({"a": nn.Sequential(conv(), nn.ReLU())})

    def forward(self, x, stop=None):
        return self.function(self, x)


def one_by_one(m, x):
    for layer in m.net:
        x = layer(x)
    return x


def from_the_end(m, x):
    for layer in [*m.net][::-1]:
        x = layer(x)
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.encoder(x) * m.encoder.stride,
        lambda m, x: m.encoder.features(x) + m.encoder(x),
        lambda m, x: m.head(m.encoder(x)) * m.encoder.channels,
        lambda m, x: m.net(x) * len(m.net),
        lambda m, x: m.net[:2](x) + m.net[2:4](x) + m.net(x),
        lambda m, x: m.net[0](x) + m.net[-1](x),
        lambda m, x: m.encoder.conv(x) * m.encoder.conv.weight.mean(),
        one_by_one,
        from_the_end,
        lambda m, x: m.list[1](m.list[0](x)) + m.list[1:][0][0](x),
        lambda m, x: m.dict["a"](x) if "a" in m.dict else x,
        lambda m, x: m.encoder.forward(x) + nn.Module.__call__(m.encoder, x),
        lambda m, x: m.net(x) if type(m.net).__name__ == "Sequential" and isinstance(m.encoder, Encoder) else x,
    ],
)
def test_children(function):
    fast = as_the_model(Parent(function), image())
    assert len(graphs(fast)) == 15 and isinstance(fast, Parent)


def test_the_class_and_what_is_saved():
    model = Encoder().eval()
    fast, x = optimize(model), image()
    assert isinstance(fast, Encoder) and fast.stride == 2 and fast.channels == 4 and graphs(fast) == [fast, fast.conv]
    assert model.state_dict().keys() == fast.state_dict().keys()
    other = Encoder().eval()
    with torch.no_grad():
        close(fast.features(x), model.features(x))
        close(fast(x), model(x))
        fast.load_state_dict(other.state_dict())
        close(fast(x), other(x))
        for change in ("conv", "norm"):
            fast.get_submodule(change).load_state_dict(model.get_submodule(change).state_dict())
        fast.conv.weight.mul_(1)
        close(fast(x), model(x))
        fast.norm = nn.Identity()
        close(fast(x), F.relu(model.conv(x)))
        again = optimize(fast)
        close(again(x), fast(x))
        double = copy.deepcopy(optimize(model)).double()
        close(double(x.double()).float(), model(x))
        swapped = torch.func.functional_call(optimize(model), {"conv.weight": other.conv.weight}, x)
        close(swapped, torch.func.functional_call(model, {"conv.weight": other.conv.weight}, x))


def test_normalisations_of_others():
    class FrozenBatchNorm2d(nn.BatchNorm2d):
        pass

    model = nn.Sequential(conv(), FrozenBatchNorm2d(4), nn.ReLU()).eval()
    nn.init.normal_(model[1].running_mean)
    assert "folded 1, relu" in as_the_model(model, image()).windrow_report.fused["0"]
    ops = pytest.importorskip("torchvision.ops")
    model = nn.Sequential(conv(), ops.FrozenBatchNorm2d(4), nn.ReLU()).eval()
    nn.init.normal_(model[1].running_mean)
    assert "folded 1, relu" in as_the_model(model, image()).windrow_report.fused["0"]


def test_normalisations_with_an_activation():
    layers = pytest.importorskip("timm.layers")
    for act, what in ((nn.ReLU, "folded 1, relu"), (nn.Hardswish, "folded 1, hardswish"), (nn.SiLU, "folded 1, silu")):
        model = nn.Sequential(conv(), layers.BatchNormAct2d(4, act_layer=act), conv()).eval()
        nn.init.normal_(model[1].running_mean)
        assert as_the_model(model, image()).windrow_report.fused["0"].endswith(what)
    model = nn.Sequential(layers.StdConv2d(4, 4, 3), nn.ReLU()).eval()
    assert [*as_the_model(model, image()).windrow_report.fused] == ["0"]
