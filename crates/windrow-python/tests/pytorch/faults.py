"""Wrong compiled graphs, which the check has to find."""

from windrow.torch._fused import FusedConv2d
from windrow.torch._library import OPERATORS
from windrow.torch.backend import _constants, _fuse


def copy_constants(monkeypatch):
    """Constants that are no parameters, so that a fault in them is not one of the model."""
    monkeypatch.setattr(_constants, "_owner", lambda *_: None)


def drop_a_bias(monkeypatch):
    copy_constants(monkeypatch)
    computed = _constants.ConstantsCache._computed

    def wrong(self, *args):
        found = computed(self, *args)
        bias = next(c for c in found.constants if c.dim() == 1)
        bias[bias.abs().argmax()] = 0
        return found

    monkeypatch.setattr(_constants.ConstantsCache, "_computed", wrong)


def change_an_activation(monkeypatch):
    activated, changed = _fuse.activated, []

    def wrong(*args):
        found = activated(*args)
        if found is None or changed:
            return found
        changed.append(found[0])
        return "gelu" if found[0] != "gelu" else "relu", found[1]

    monkeypatch.setattr(_fuse, "activated", wrong)


def repeat_a_border_row(monkeypatch):
    """Of the first convolution by 3x3 that is called."""
    forward, one = FusedConv2d.forward, []

    def wrong(self, *args):
        y = forward(self, *args)
        if self.weight.shape[-1] == 3 and not one:
            one.append(self)
        if self in one:
            y[:, :, -1] = y[:, :, -2]
        return y

    monkeypatch.setattr(FusedConv2d, "forward", wrong)


def miss_a_residual(monkeypatch):
    called = _fuse.called

    def wrong(graph, last, operator, *args):
        if operator is OPERATORS.conv2d_fused.default:
            args = (*args[:3], None, *args[4:])
        return called(graph, last, operator, *args)

    monkeypatch.setattr(_fuse, "called", wrong)


def keep_a_stale_filter(monkeypatch):
    copy_constants(monkeypatch)
    computed = _constants.ConstantsCache._computed

    def wrong(self, *args):
        found = computed(self, *args)
        filter = next(c for c in found.constants if c.dim() == 4)
        filter.copy_(filter.flip(0))
        return found

    monkeypatch.setattr(_constants.ConstantsCache, "_computed", wrong)


FAULTS = [drop_a_bias, change_an_activation, repeat_a_border_row, miss_a_residual, keep_a_stale_filter]
