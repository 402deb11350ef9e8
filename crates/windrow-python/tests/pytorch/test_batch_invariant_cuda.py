"""On a GPU, the bits of an image or a sequence do not depend on what else is in its batch."""

import random

import pytest
import torch
import windrow.torch
import windrow.vllm
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Images of the largest batch, and the batches whose bits are compared with its bits.
IMAGES = 256
BATCHES = [(3, 4), (0, 1), (255, 256), (2, 4), (101, 103), (0, 7), (9, 16), (249, 256), (0, 64), (77, 141)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TILES = ["winograd_gemm_f2", "winograd_gemm_f4", "winograd_gemm_f6"]
ALGORITHMS = [None, "direct", "im2col_gemm", "implicit_gemm", "winograd_row", *TILES]

# [c, h, w, k, taps, stride, padding, groups]
LAYERS = {
    "rows": (64, 14, 14, 64, 3, 1, 1, 1),
    "rows of two images in a block": (32, 7, 9, 72, 3, 1, 1, 1),
    # In f16 and bf16, batches have blocks of 64 to 256 channels.
    "blocks of the batch": (64, 14, 14, 256, 3, 1, 1, 1),
    "odd channels": (21, 9, 11, 19, 3, 1, 0, 1),
    "one tap, odd images": (64, 7, 7, 128, 1, 1, 0, 1),
    "one tap, whole warps": (128, 8, 8, 64, 1, 1, 0, 1),
    "one pixel": (96, 1, 1, 40, 1, 1, 0, 1),
    "stride": (64, 15, 13, 96, 3, 2, 1, 1),
    "split sums": (512, 3, 3, 64, 3, 1, 1, 1),
    "large taps": (24, 11, 10, 32, 5, 1, 2, 1),
    "few taps": (3, 17, 15, 32, 3, 2, 1, 1),
    "few outputs": (48, 9, 9, 4, 3, 1, 1, 1),
    "depthwise": (48, 13, 12, 48, 3, 1, 1, 48),
    "groups of four": (48, 9, 7, 48, 3, 1, 1, 12),
    "groups of three": (36, 9, 7, 24, 3, 2, 1, 12),
    "groups of many": (128, 8, 7, 128, 3, 1, 1, 2),
}


def bits(t):
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def same(a, b):
    """True for equal bits, also of NaN."""
    return torch.equal(bits(a), bits(b))


def laid_out(t, last):
    return t.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def problem(name, dtype, last):
    c, h, w, k, taps, stride, padding, groups = LAYERS[name]
    x = torch.randn(IMAGES, c, h, w, device="cuda")
    # Their neighbours must not notice.
    x[5] *= 1e4
    x[6, 0, 0, 0] = float("inf")
    x[76] *= 1e-6
    weight = torch.randn(k, c // groups, taps, taps, device="cuda") / (taps * taps * c // groups) ** 0.5
    options = {"stride": stride, "padding": padding, "groups": groups, "batch_invariant": True}
    return laid_out(x.to(dtype), last), weight.to(dtype), torch.randn(k, device="cuda"), options


def compared(run, x, wanted=None):
    """The number of images whose bits were compared with those of the whole batch."""
    whole, count = run(x), 0
    for first, end in BATCHES:
        got = run(x[first:end])
        for mine, all in zip(got, whole, strict=True):
            wrong = [first + i for i in range(end - first) if not same(mine[i], all[first + i])]
            assert not wrong, f"images {wrong[:9]} of {first}..{end}"
            count += end - first
    return count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_images(name, dtype):
    choices = random.Random(f"{name} {dtype}")
    last = choices.random() < 0.5
    accuracies = ["fp32", "fp32", "tf32", "exact"] if dtype == torch.float32 else [None, None, "fp32"]
    x, weight, bias, options = problem(name, dtype, last)
    if choices.random() < 0.3:
        options["activation"] = "silu"
    options["accuracy"] = choices.choice(accuracies)
    count = 0
    for algorithm in ALGORITHMS:
        options["algorithm"] = algorithm

        def run(x):
            x = x.detach().requires_grad_(algorithm is None)
            y = windrow.torch.conv2d(x, weight, bias.to(dtype), **options)
            if algorithm is not None:
                return (y,)
            # The same gradient for each image, whatever is beside it.
            dy = torch.linspace(-1, 1, y[0].numel(), device="cuda").view(y[0].shape).to(dtype).expand_as(y)
            return y.detach(), torch.autograd.grad(y, x, laid_out(dy, last))[0]

        try:
            run(x[:1])
        except NotImplementedError:
            assert algorithm is not None
            continue
        count += compared(run, x)
    # Of all layers and types more than 10,000.
    assert count >= 300


# Of videos of 7 frames: [c, h, w, k], taps, stride and padding, of which the first is of frames.
VIDEOS = {
    "rows": ((64, 12, 10, 64), (3, 3, 3), (1, 1, 1), (0, 1, 1)),
    "odd channels": ((21, 9, 7, 19), (3, 3, 3), (1, 1, 1), (0, 0, 0)),
    "frames alone": ((48, 6, 5, 96), (3, 1, 1), (1, 1, 1), (0, 0, 0)),
    "images": ((32, 7, 9, 72), (1, 3, 3), (1, 1, 1), (0, 1, 1)),
    "stride": ((64, 9, 8, 32), (3, 3, 3), (1, 2, 2), (0, 1, 1)),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VIDEOS)
def test_videos(name, dtype, last):
    """Videos alone and in a batch, whole and in chunks, by every algorithm and the one that is chosen."""
    (c, h, w, k), taps, stride, padding = VIDEOS[name]
    form = torch.channels_last_3d if last else torch.contiguous_format
    x = torch.randn(9, c, 7, h, w, device="cuda")
    x[5] *= 1e4
    x[6, 0, 0, 0, 0] = float("inf")
    x = x.to(dtype).contiguous(memory_format=form)
    weight = (torch.randn(k, c, *taps, device="cuda") / (c * taps[0] * taps[1] * taps[2]) ** 0.5).to(dtype)
    options = {"stride": stride, "padding": padding, "batch_invariant": True, "time_padding": "causal"}
    options["accuracy"] = "fp32" if dtype == torch.float32 else "half"
    count, before = 0, torch.zeros(9, c, taps[0] - 1, h, w, device="cuda", dtype=dtype).contiguous(memory_format=form)
    for algorithm in [None, "direct", "im2col_gemm", "implicit_gemm", "winograd_row"]:
        run = lambda x, **more: windrow.conv3d(x, weight, algorithm=algorithm, **options, **more)
        try:
            whole = run(x)
        except NotImplementedError:
            assert algorithm is not None
            continue
        for first, end in [(3, 4), (0, 1), (2, 4), (0, 7), (5, 9)]:
            assert same(run(x[first:end]), whole[first:end]), f"{algorithm} of {first}..{end}"
            count += end - first
        for n in (1, 2, 3):
            state, parts = before.clone(memory_format=torch.preserve_format), []
            for t in range(0, 7, n):
                frames = {"initial_frames": state, "final_frames": state} if taps[0] > 1 else {}
                parts.append(run(x[:, :, t : t + n], **frames))
            assert same(torch.cat(parts, 2), whole), f"{algorithm} in chunks of {n}"
            count += 9
    assert count >= 80


def test_cudnn_is_refused():
    x, weight, _, options = problem("rows", torch.float16, True)
    with pytest.raises(NotImplementedError, match="batch_invariant"):
        windrow.torch.conv2d(x, weight, **options, algorithm="cudnn", accuracy="half")


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels-last"])
@pytest.mark.parametrize("size", [5, 14, 31, 70])
@pytest.mark.parametrize("channels", [(24, 40), (256, 128), (512, 512)], ids=str)
def test_products_of_the_library_keep_their_order(channels, size, last):
    """cuBLASLt's algorithm is the one for eight images, whatever the number of tiles is."""
    (c, k), images = channels, 64 if size < 70 else 16
    x = laid_out(torch.randn(images, c, size, size, device="cuda"), last)
    weight = torch.randn(k, c, 3, 3, device="cuda") / (9 * c) ** 0.5
    for algorithm in TILES:
        for dtype, accuracy in [(torch.float32, "fp32"), (torch.float32, "tf32"), (torch.float16, "half")]:
            if accuracy != "fp32" and algorithm == TILES[2]:
                continue
            options = {"batch_invariant": True, "algorithm": algorithm, "accuracy": accuracy}
            run = lambda x: windrow.torch.conv2d(x, weight.to(x.dtype), padding=1, **options)
            whole = run(x.to(dtype))
            for first, end in [(0, 1), (3, 5), (images - 1, images), (1, 8), (2, 11), (0, images // 2)]:
                got = run(x[first:end].to(dtype))
                assert same(got, whole[first:end]), f"{algorithm} {dtype} {accuracy}, images {first} to {end}"


def test_without_the_option_bits_depend_on_the_batch():
    """Otherwise the comparisons would show nothing."""

    def differ(name, dtype):
        x, weight, _, options = problem(name, dtype, True)
        options["batch_invariant"] = False
        run = lambda x: (windrow.torch.conv2d(x, weight, accuracy="half", **options),)
        try:
            compared(run, x)
        except AssertionError:
            return True
        return False

    assert any(differ(name, torch.float32) for name in ("one tap, odd images", "split sums", "rows", "stride"))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_filters_are_the_same_each_time(dtype, last):
    for name in ("rows", "stride", "one tap, odd images", "few taps"):
        x, weight, bias, options = problem(name, dtype, last)
        x = torch.nan_to_num(x, posinf=1.0)[:64].clamp(-4, 4)
        weight, bias = weight.requires_grad_(), bias.to(dtype).requires_grad_()

        def run():
            y = windrow.torch.conv2d(laid_out(x, last), weight, bias, **options)
            return torch.autograd.grad(y.sum(), [weight, bias])

        first = run()
        windrow.torch.conv2d(laid_out(x[:1], last), weight.detach(), **options)
        assert all(same(a, b) for a, b in zip(run(), first, strict=True)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patched(dtype):
    model = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU())
    model = model.append(nn.Conv2d(64, 96, 1)).append(nn.ConvTranspose2d(96, 24, 2, 2)).eval().to("cuda", dtype)
    x = torch.randn(64, 3, 30, 26, device="cuda", dtype=dtype)
    with torch.no_grad():
        want = model(x)
        before = len(windrow.torch.decisions())
        report = windrow.torch.patch(model, batch_invariant=True)
        whole = model(x)
        for first, end in [(3, 4), (0, 7), (40, 64)]:
            assert same(model(x[first:end]), whole[first:end])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x[3:4])
        graph.replay()
        assert same(captured, whole[3:4])
    assert len(windrow.torch.decisions()) == before
    assert not report.left
    torch.testing.assert_close(whole, want, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled(dtype):
    from windrow.torch.backend import windrow as backend

    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 1), nn.ReLU()).eval().to("cuda", dtype)
    x = torch.randn(64, 3, 17, 15, device="cuda", dtype=dtype)
    options = {"batch_invariant": True, "rest": "eager"}
    for make in (
        lambda: torch.compile(model, backend=backend, options=options, dynamic=False),
        lambda: windrow.torch.optimize(model, batch_invariant=True, rest="eager"),
    ):
        compiled = make()
        with torch.no_grad():
            whole = compiled(x)
            for first, end in [(3, 4), (0, 7)]:
                assert same(compiled(x[first:end]), whole[first:end])


@pytest.mark.parametrize("order", ["channel-first", "channels-last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4, 5, 8, 20])
def test_tokens(width, dtype, order):
    """Prefill, chunks of a prompt, decoding and drafts of the same tokens."""
    d, tokens = 256, 900
    weight, bias = torch.randn(d, width, device="cuda"), torch.randn(d, device="cuda")
    weight, bias = weight.to(dtype), bias.to(dtype)
    x = torch.randn(3, d, tokens, device="cuda", dtype=dtype)
    if order == "channels-last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    how = {"activation": "silu", "batch_invariant": True}
    whole = windrow.torch.causal_conv1d_fn(x, weight, bias, **how)
    one = x[1:2]
    assert same(windrow.torch.causal_conv1d_fn(one, weight, bias, **how), whole[1:2])
    zeros = lambda: torch.zeros(1, width - 1, d, device="cuda", dtype=dtype).transpose(1, 2)

    def chunk(part, state):
        y, last = windrow.torch.causal_conv1d_fn(
            part, weight, bias, initial_states=state, return_final_states=True, **how
        )
        state.copy_(last)
        return y

    def served(part, state):
        starts = torch.tensor([0, part.shape[2]], device="cuda", dtype=torch.int32)
        indices = torch.zeros(1, device="cuda", dtype=torch.int32)
        has = torch.ones(1, device="cuda", dtype=torch.bool)
        rows, rest = part[0].T.contiguous().T, (state, starts, indices, has, "silu")
        return windrow.vllm.causal_conv1d_fn(rows, weight, bias, *rest, null_block_id=None)[None]

    def step(part, state):
        return windrow.torch.causal_conv1d_update(part, state, weight, bias, "silu")

    pieces = {chunk: [7, 64, 8192], served: [1, 7, 64, 8192], step: [1, 4]}
    for way, n in [(way, n) for way, sizes in pieces.items() for n in sizes]:
        state, end = zeros(), tokens if n > 4 else 60
        parts = [way(one[:, :, t : min(t + n, end)], state) for t in range(0, end, n)]
        got = torch.cat(parts, 2)
        wrong = (bits(got) != bits(whole[1:2, :, :end])).nonzero()
        assert not len(wrong), f"{way.__name__} of {n} tokens: {wrong[:4].tolist()}"


def test_dense_weights_are_refused():
    x, weight = torch.randn(2, 8, 9, device="cuda"), torch.randn(4, 8, 3, device="cuda")
    with pytest.raises(NotImplementedError, match="batch_invariant"):
        windrow.torch.causal_conv1d_fn(x, weight, batch_invariant=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(dtype, approximate):
    x = (3 * torch.randn(40, 53, device="cuda")).to(dtype)
    x[3, 5], x[7, 0] = float("inf"), 1e4
    run = lambda x: windrow.torch.gelu(x, approximate, batch_invariant=True)
    whole = run(x)
    for first, end in [(0, 1), (3, 4), (5, 7), (13, 40)]:
        assert same(run(x[first:end]), whole[first:end])
