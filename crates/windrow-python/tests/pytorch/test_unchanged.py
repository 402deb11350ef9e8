"""What a call depends on, compared with what it was."""

import collections

import pytest
import torch
from torch import nn
from windrow import _native

version = torch._C._dynamo.guards.dict_version


class Module(nn.Linear):
    pass


def made(tensors=(), dicts=(), empty=(), modules=()):
    return _native.Unchanged([*dicts], version, [*empty], [*modules], [*tensors])


def parameters(kind=torch.float32):
    return [torch.zeros(size, dtype=kind) for size in ((), (3,), (4, 3), (2, 3, 3, 3), (0, 4), (1, 2, 1, 2, 1, 2))]


def transposed(t):
    t.data = t.data.transpose(0, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t[0].mul_(2),
        lambda t: t.copy_(torch.ones(t.shape)),
        lambda t: torch.nn.init.ones_(t),
        lambda t: setattr(t, "data", t.data.clone()),
        lambda t: setattr(t, "data", t.data[:1]),
        lambda t: setattr(t, "data", t.data.double()),
        lambda t: setattr(t, "__class__", nn.Parameter),
        lambda t: t.resize_(2, 2),
        transposed,
    ],
)
@pytest.mark.parametrize("at", [2, 3])
def test_tensors(change, at):
    tensors = parameters()
    same = made(tensors)
    assert same() and same()
    change(tensors[at])
    assert not same()


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_other_types(kind):
    if kind is torch.bool and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch's guards are not passed")
    tensors = [t for t in parameters(kind) if t.numel() and t.dim() < 6]
    same = made(tensors)
    assert same()
    tensors[2].fill_(1)
    assert not same()


def test_tensors_from_inference_mode_count_no_writes():
    with torch.inference_mode():
        inside = torch.zeros(3)
        same = made([inside])
        inside.add_(1)
        assert same()
        inside.set_(torch.zeros(3))
        assert not same()


def test_dictionaries_and_types():
    one, other = {"a": 1}, {"b": nn.Linear(2, 2)}
    empty, ordered, module = {}, collections.OrderedDict(), nn.Linear(1, 1)
    same = lambda: made((), [one, other, vars(module)], [empty, ordered], [module])
    before = same()
    assert before()
    for change in (
        lambda: one.update(a=2),
        lambda: other.pop("b"),
        lambda: empty.update(c=1),
        lambda: ordered.update(c=1),
        lambda: setattr(module, "more", 1),
        lambda: setattr(module, "__class__", Module),
    ):
        empty.clear()
        ordered.clear()
        before = same()
        assert before()
        change()
        assert not before()


def test_version_numbers_by_the_function():
    """Where dictionaries have no version number of their own."""
    numbers = {"now": 1}
    same = _native.Unchanged([{}, {}], lambda _: numbers["now"], [], [], [])
    assert same()
    numbers["now"] = 2
    assert not same()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="empty"):
        made((), (), [{"a": 1}])
    with pytest.raises(TypeError):
        made((), [[]])
    with pytest.raises(AttributeError):
        made([3])


def test_words():
    memory = torch.arange(10)
    same = _native.Words([memory.data_ptr() + 8 * i for i in (7, 2)])
    assert same() and _native.Words([])()
    memory[3] = 100
    assert same()
    memory[2] = 100
    assert not same()
    for place in (0, memory.data_ptr() + 4):
        with pytest.raises(ValueError, match="address"):
            _native.Words([place])


def test_a_tensor_that_is_swapped_for_another():
    for kind in (nn.Parameter, torch.Tensor):
        tensors = [kind(torch.zeros(4, 3)) for _ in range(3)]
        same = made(tensors[:2])
        assert same()
        torch.utils.swap_tensors(tensors[1], tensors[2])
        assert not same()


def test_memory_that_moves():
    tensors = parameters()
    same = made(tensors)
    tensors[3].untyped_storage().resize_(1 << 20)
    assert not same()
    same = made(tensors)
    assert same()
    tensors[2].share_memory_()
    assert not same()


def test_what_changes_nothing():
    tensors = parameters()
    same = made(tensors)
    held = [t.detach() for t in tensors] + [t.data for t in tensors] + [t.untyped_storage() for t in tensors]
    assert same() and held
    tensors[2].requires_grad_(True)
    assert same()
    held = [t.view_as(t) for t in tensors]
    assert same() and held
