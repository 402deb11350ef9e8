"""PyTorch's settings of TF32: those of before 2.9, those since, and both in every order."""

import contextlib
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from common import OURS, THEIRS, leaf
from torch import nn
from windrow.torch import _precision, conv2d, optimize, patch
from windrow.torch._conv2d import accuracy_of
from windrow.torch._precision import flags, may_use_tf32

backends = torch.backends
IS_NEW = hasattr(torch._C, "_get_fp32_precision_getter")

# Below `torch.backends`; what is set, and to what.
OLD = [(f"{where}.allow_tf32", value) for where in ("cudnn", "cuda.matmul") for value in (True, False)]
NEW = [
    (f"{where}fp32_precision", value)
    for where in ("", "cudnn.", "cudnn.conv.", "cudnn.rnn.", "cuda.matmul.")
    for value in ("ieee", "tf32")
]
SETTINGS = OLD + NEW * IS_NEW


def put(setting):
    path, value = setting
    *names, name = path.split(".")
    where = backends
    for each in names:
        where = getattr(where, each)
    setattr(where, name, value)


def put_back():
    for where in [backends, backends.cudnn] if IS_NEW else []:
        where.fp32_precision = "none"
    backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def _put_back():
    put_back()
    yield
    put_back()


def old_flag(where):
    """None where it cannot say what is set."""
    with contextlib.suppress(RuntimeError):
        return where.allow_tf32
    return None


def test_a_flag_that_can_be_read_says_the_same():
    read = 0
    for settings in itertools.product(SETTINGS, repeat=3):
        put_back()
        for setting in settings:
            put(setting)
        for is_linear, where in ((False, backends.cudnn), (True, backends.cuda.matmul)):
            flag = old_flag(where)
            read += flag is not None
            assert flag is None or may_use_tf32(is_linear) == flag, settings
    assert read >= len(SETTINGS) ** 3 / 2


@pytest.mark.skipif(not IS_NEW, reason="PyTorch before 2.9")
def test_a_setting_that_no_flag_can_express_is_followed():
    backends.cudnn.conv.fp32_precision = "tf32"
    assert old_flag(backends.cudnn) is None
    assert may_use_tf32() and not may_use_tf32(is_linear=True)
    backends.cudnn.conv.fp32_precision = "ieee"
    backends.cuda.matmul.fp32_precision = "tf32"
    assert not may_use_tf32() and may_use_tf32(is_linear=True)


def test_what_a_computation_depends_on(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    backends.cudnn.allow_tf32 = True
    assert flags(on_gpu) == (False, True) and flags(on_gpu, is_linear=True) == (False, False)
    # Nothing else is computed in TF32.
    assert flags(SimpleNamespace(is_cuda=True, dtype=torch.float16)) == flags(torch.zeros(1)) == (False, False)
    for setting in SETTINGS:
        put(setting)
        for is_linear in (False, True):
            assert (accuracy_of(None, on_gpu, is_linear) == "tf32") == may_use_tf32(is_linear), setting


class Block(nn.Module):
    """Every operator of Windrow's that may follow these settings."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.up, self.linear = nn.ConvTranspose2d(6, 4, 2), nn.Linear(4, 5)
        self.line = nn.Conv1d(5, 3, 3)

    def forward(self, x):
        y = self.conv(x).relu()
        y = self.up(self.other(y) + y)
        y = self.linear(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.line(y.flatten(2))


@pytest.mark.usefixtures("nothing_decided")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s[0]}={s[1]}")
@pytest.mark.parametrize("factor", [OURS, THEIRS], ids=["ours", "theirs"])
def test_models_compute_under_each(setting, factor, times):
    times(factor)
    plain, x = Block().eval(), leaf(2, 4, 7, 8)
    want = plain(x)
    (gradient,) = torch.autograd.grad(want.sum(), x)
    fast, patched = optimize(plain), Block().eval()
    patched.load_state_dict(plain.state_dict())
    patch(patched)
    own = lambda y: conv2d(y, plain.conv.weight, plain.conv.bias, padding=1)
    for is_set in (False, True):
        if is_set:
            put(setting)
        for _ in range(3):
            for model in (fast, patched):
                with torch.no_grad():
                    torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-5)
            got = patched(x)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], gradient, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(own(x), plain.conv(x), atol=1e-5, rtol=1e-5)


def test_pytorch_before_the_settings(monkeypatch):
    monkeypatch.setattr(_precision, "_setting", None)
    for setting in OLD:
        put(setting)
        for is_linear, where in ((False, backends.cudnn), (True, backends.cuda.matmul)):
            assert may_use_tf32(is_linear) == where.allow_tf32


@pytest.mark.parametrize("is_linear", [False, True])
def test_compiled(is_linear):
    # PyTorch 2.4 compiles no function without operators.
    add = lambda x: x + (1 if may_use_tf32(is_linear) else 2)
    compiled = torch.compile(add, fullgraph=True, backend="eager")
    for value in (False, True):
        torch.compiler.reset()
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = value
        assert compiled(torch.zeros(1)).item() == (1 if value else 2)


def test_an_import_leaves_the_compiler_alone():
    """It takes several times as long to import as Windrow does."""
    code = "import sys, torch; before = {*sys.modules}; import windrow.torch; print(sorted({*sys.modules} - before))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "torch._dynamo" not in loaded and "windrow.torch" in loaded
