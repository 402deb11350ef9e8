"""What vLLM and SGLang call, beside a plain definition, with each option; their modules are stand-ins."""

import sys
from types import ModuleType

import pytest
import torch
import windrow.sglang
import windrow.vllm
from common import assert_close, each_device, each_dtype
from torch.nn.functional import conv1d, silu

WIDTH = 4


def convolve(window, tokens, weight, bias, activation):
    """[dim, n] tokens behind a window [dim, width - 1]: y, and both one behind the other."""
    whole = torch.cat([window, tokens], 1)
    y = conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]
    return (silu(y) if activation else y), whole


def problem(tokens, dim, pool, dtype, device, state_len=WIDTH - 1, channel_last=True):
    x = torch.randn(tokens, dim).to(device, dtype).T
    states = torch.randn(pool, state_len, dim).to(device, dtype).transpose(1, 2)
    if not channel_last:
        x, states = x.contiguous(), states.contiguous()
    weight = torch.randn(dim, WIDTH).to(device, dtype)
    return x, states, weight, torch.randn(dim).to(device, dtype)


def index(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


@each_device
@each_dtype
@pytest.mark.parametrize("channel_last", [True, False])
@pytest.mark.parametrize("biased, activation", [(True, "silu"), (False, None), (True, True)])
@pytest.mark.parametrize("lengths", [[3, 1, 0, 40, 2], [70, 130, 1]])
def test_prompts(device, dtype, channel_last, biased, activation, lengths):
    dim, n = 72, len(lengths)
    tokens = sum(lengths) + 3
    x, states, weight, bias = problem(tokens, dim, 2 * n + 1, dtype, device, 5, channel_last)
    bias = bias if biased else None
    indices = list(range(2 * n, 0, -2))
    indices[1] = 0
    has = [i % 3 != 0 for i in range(n)]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    want, kept = torch.zeros_like(x, dtype=torch.float64), states.double()
    for i, (state, start, end) in enumerate(zip(indices, starts, starts[1:])):
        if state == 0 or start == end:
            continue
        window = kept[state, :, : WIDTH - 1] * has[i]
        y, whole = convolve(
            window, x[:, start:end].double(), weight.double(), None if bias is None else bias.double(), activation
        )
        want[:, start:end] = y
        kept[state, :, : WIDTH - 1] = whole[:, 1 - WIDTH :]
    given = states.clone(memory_format=torch.preserve_format)
    y = windrow.vllm.causal_conv1d_fn(
        x,
        weight,
        bias,
        states,
        index(starts, device),
        index(indices, device),
        torch.tensor(has, device=device),
        activation,
        metadata=object(),
    )
    assert_close(y, want)
    assert torch.equal(states.double(), kept)
    # SGLang's padding is another index, and there may be more of them than sequences.
    indices[1] = -1
    indices.append(1 << 20)
    y = windrow.sglang.causal_conv1d_fn(
        x,
        weight,
        bias,
        given,
        index(starts, device, torch.int64),
        lengths,
        index(indices, device),
        torch.tensor(has, device=device),
        activation,
    )
    assert_close(y, want)
    assert torch.equal(given.double(), kept)


@each_device
def test_prompts_without_flags(device):
    x, states, weight, bias = problem(9, 16, 3, torch.float32, device)
    starts, indices = index([0, 9], device), index([2], device)
    before = states.double()
    y = windrow.sglang.causal_conv1d_fn(x, weight, bias, states.clone(), starts, [9], indices)
    zeros = torch.zeros(16, WIDTH - 1, dtype=torch.float64, device=device)
    assert_close(y, convolve(zeros, x.double(), weight.double(), bias.double(), True)[0])
    y = windrow.vllm.causal_conv1d_fn(x, weight, bias, states, starts, indices)
    assert_close(y, convolve(zeros, x.double(), weight.double(), bias.double(), True)[0])
    assert torch.equal(states[2], x[:, 1 - WIDTH :]) and torch.equal(states[1].double(), before[1])


@each_device
def test_prompts_of_another_type(device):
    x, states, weight, bias = problem(9, 16, 3, torch.float32, device)
    half = states.to(torch.bfloat16)
    y = windrow.vllm.causal_conv1d_fn(
        x, weight, bias, half, index([0, 9], device), index([1], device), torch.tensor([False], device=device)
    )
    assert y.dtype == torch.float32
    assert torch.equal(half[1], x[:, 1 - WIDTH :].to(torch.bfloat16))


@each_device
@pytest.mark.parametrize("types", [(torch.float32, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_filters_of_another_type(device, types):
    """As good as the same numbers in f32, in the filter, in the bias and in both."""
    x, states, weight, bias = problem(9, 16, 3, types[0], device)
    starts, indices = index([0, 9], device), index([1], device)
    for given in ([weight.to(types[1]), bias], [weight, bias.to(types[1])], [weight.to(types[1]), bias.to(types[1])]):
        wide = [t.float() for t in given]
        for module in (windrow.vllm, windrow.sglang):

            def prompt(filters, module=module):
                flags = torch.tensor([True], device=device)
                rest = (starts, [9], indices, flags) if module is windrow.sglang else (starts, indices, flags)
                return module.causal_conv1d_fn(x, *filters, states.clone(), *rest)

            def step(filters, module=module):
                tokens = x[:, :2].t().contiguous()
                return module.causal_conv1d_update(tokens, states.clone(), *filters, "silu", conv_state_indices=index([1, 2], device))

            for function in (prompt, step):
                y = function(given)
                assert y.dtype == types[0] and torch.equal(y, function(wide))


@each_device
@each_dtype
@pytest.mark.parametrize("start, pieces", [(0, [40]), (0, [16, 3, 21]), (6, [1, 9, 1, 29]), (15, [1, 33])])
def test_prefix_caching(device, dtype, start, pieces):
    """A prompt in pieces, in blocks of 16 tokens, beside one that is whole: the state at the end of each block."""
    dim, size = 40, 16
    tokens = sum(pieces)
    x, states, weight, bias = problem(tokens, dim, 20, dtype, device)
    table = [[11, 7, 9, 3, 5, 0]]
    states[:] = float("nan")
    window = torch.randn(dim, WIDTH - 1).to(device, dtype)
    has = start > 0
    if has:
        states[table[0][(start - 1) // size]] = window
    before = window.double() if has else torch.zeros_like(window, dtype=torch.float64)
    want, whole = convolve(before, x.double(), weight.double(), bias.double(), True)
    done, outputs = start, []
    for piece in pieces:
        first, last = done // size, (done + piece - 1) // size
        outputs.append(
            windrow.vllm.causal_conv1d_fn(
                x[:, done - start : done - start + piece],
                weight,
                bias,
                states,
                index([0, piece], device),
                index(table, device),
                torch.tensor([has or done > start], device=device),
                block_idx_first_scheduled_token=index([first], device),
                block_idx_last_scheduled_token=index([last], device),
                initial_state_idx=index([max(done - 1, 0) // size], device),
                num_computed_tokens=index([done], device),
                block_size_to_align=size,
            )
        )
        done += piece
        for block in range(start // size, last + 1):
            end = min((block + 1) * size, done) - start
            assert torch.equal(states[table[0][block]].double(), whole[:, end : end + WIDTH - 1])
    assert_close(torch.cat(outputs, 1), want)
    unused = [s for s in range(20) if s not in table[0][(start - 1) // size if has else 0 : last + 1]]
    assert states[unused].isnan().all()


@each_device
@each_dtype
@pytest.mark.parametrize("form", ["bd", "bdl", "packed"])
@pytest.mark.parametrize("with_out", [False, True])
def test_decoding(device, dtype, form, with_out):
    dim, batch = 72, 5
    lengths = {"bd": [1] * batch, "bdl": [3] * batch, "packed": [2, 1, 0, 3, 1]}[form]
    x, states, weight, bias = problem(sum(lengths), dim, 12, dtype, device, 6)
    indices = [4, 0, 9, 1, 0] if form != "packed" else [4, 6, 9, 1, 0]
    given, before, kept = x.clone(), states.clone(), states.double()
    want = torch.zeros_like(x, dtype=torch.float64)
    start = 0
    for state, length in zip(indices, lengths):
        if state and length:
            y, whole = convolve(
                kept[state, :, : WIDTH - 1],
                given[:, start : start + length].double(),
                weight.double(),
                bias.double(),
                True,
            )
            want[:, start : start + length] = y
            kept[state, :, : WIDTH - 1] = whole[:, 1 - WIDTH :]
        start += length
    shape = {
        "bd": lambda t: t.T,
        "bdl": lambda t: t.reshape(dim, batch, 3).transpose(0, 1),
        "packed": lambda t: t.T,
    }[form]
    tokens, starts = shape(x).clone(), None
    if form == "packed":
        starts = index([0, *torch.tensor(lengths).cumsum(0).tolist()], device)
    out = torch.empty_like(tokens) if with_out else None
    y = windrow.vllm.causal_conv1d_update(
        tokens,
        states,
        weight,
        bias,
        "silu",
        conv_state_indices=index(indices, device),
        query_start_loc=starts,
        max_query_len=3,
        out=out,
    )
    assert y.data_ptr() == (tokens if out is None else out).data_ptr()
    assert_close(y, shape(want))
    assert torch.equal(states.double(), kept)
    if form != "packed" and not with_out:
        minus = [state or -1 for state in indices]
        y = windrow.sglang.causal_conv1d_update(
            shape(given), before, weight, bias, "silu", conv_state_indices=index(minus, device)
        )
        assert_close(y, shape(want))
        assert torch.equal(before.double(), kept)


@each_device
@each_dtype
@pytest.mark.parametrize("packed", [False, True])
def test_drafts(device, dtype, packed):
    """Steps of four tokens, of which some are accepted each time, are the sequence of what was accepted."""
    dim, drafts, batch = 40, 4, 3
    _, states, weight, bias = problem(1, dim, 7, dtype, device, WIDTH - 1 + drafts - 1)
    indices = [2, 5, 1]
    accepted = [[1, 1, 1], [4, 2, 1], [1, 3, 2], [2, 4, 4]]
    kept = [states[s, :, : WIDTH - 1].double() for s in indices]
    for counts in accepted:
        x = torch.randn(batch, drafts, dim).to(device, dtype).transpose(1, 2)
        # What a call before has accepted, the states already hold.
        for i, count in enumerate(counts):
            kept[i] = states[indices[i], :, count - 1 : count + WIDTH - 2].double()
        want = [convolve(kept[i], x[i].double(), weight.double(), bias.double(), True) for i in range(batch)]
        more = {}
        if packed:
            more = {"query_start_loc": index([0, 4, 8, 12], device), "max_query_len": drafts}
        y = windrow.vllm.causal_conv1d_update(
            x.transpose(1, 2).reshape(-1, dim).clone() if packed else x.clone(),
            states,
            weight,
            bias,
            "silu",
            conv_state_indices=index(indices, device),
            num_accepted_tokens=index(counts, device),
            **more,
        )
        y = y.reshape(batch, drafts, dim).transpose(1, 2) if packed else y
        assert_close(y, torch.stack([y for y, _ in want]))
        for i, (_, whole) in enumerate(want):
            assert torch.equal(states[indices[i]].double(), whole[:, 1:])


@each_device
def test_decoding_in_blocks(device):
    """The state is read from one block of a table and written to another."""
    x, states, weight, bias = problem(2, 16, 9, torch.float32, device)
    before = states.clone()
    table = index([[3, 5], [6, 8]], device)
    y = windrow.vllm.causal_conv1d_update(
        x.T,
        states,
        weight,
        bias,
        conv_state_indices=table,
        block_idx_last_scheduled_token=index([1, 0], device),
        initial_state_idx=index([0, 0], device),
        out=torch.empty_like(x.T),
    )
    for i, (read, written) in enumerate([(3, 5), (6, 6)]):
        want, whole = convolve(
            before[read].double(), x[:, i : i + 1].double(), weight.double(), bias.double(), False
        )
        assert_close(y[i], want[:, 0])
        assert torch.equal(states[written].double(), whole[:, 1:])
    assert torch.equal(states[3], before[3])


def test_what_is_wrong_is_said():
    x, states, weight, bias = problem(4, 16, 3, torch.float32, "cpu")
    starts, one = index([0, 4], "cpu"), index([1], "cpu")
    with pytest.raises(IndexError, match="conv_state_indices"):
        windrow.vllm.causal_conv1d_fn(x, weight, bias, states, starts, index([3], "cpu"))
    with pytest.raises(ValueError, match="'gelu'"):
        windrow.vllm.causal_conv1d_fn(x, weight, bias, states, starts, one, activation="gelu")
    with pytest.raises(ValueError, match="conv_state_indices"):
        windrow.vllm.causal_conv1d_update(x.T, states, weight, query_start_loc=starts)
    with pytest.raises(ValueError, match="`out`"):
        windrow.vllm.causal_conv1d_update(x.T, states, weight, out=x)
    with pytest.raises(ValueError, match="dimensions"):
        windrow.vllm.causal_conv1d_fn(x[None], weight, bias, states, starts, one)
    with pytest.raises(ValueError, match="cache_seqlens"):
        windrow.sglang.causal_conv1d_update(x.T, states, weight, cache_seqlens=one)
    rows, links = x.T[:1, :, None], index([[0]], "cpu")
    with pytest.raises(ValueError, match="next_sibling"):
        windrow.sglang.causal_conv1d_update(rows, states, weight, retrieve_next_token=links)
    with pytest.raises(IndexError, match="next_token"):
        windrow.sglang.causal_conv1d_update(
            rows, states, weight, retrieve_next_token=links, retrieve_next_sibling=links
        )


def test_functions_for_the_cpu():
    """State 0 is one for prompts there, and none for steps."""
    x, states, weight, bias = problem(4, 16, 2, torch.float32, "cpu")
    window, zero = states[0].clone(), index([0], "cpu")
    y = windrow.vllm.causal_conv1d_fn_cpu(
        x, weight, bias, states, index([0, 4], "cpu"), zero, torch.tensor([True]), True, null_block_id=0
    )
    assert_close(y, convolve(window.double(), x.double(), weight.double(), bias.double(), True)[0])
    assert torch.equal(states[0], x[:, 1:])
    y = windrow.vllm.causal_conv1d_fn_cpu(x, weight, bias, states, index([0, 4], "cpu"), index([-1], "cpu"))
    assert not y.any()
    y = windrow.vllm.causal_conv1d_update_cpu(x.T[:1].clone(), states, weight, bias, "silu", zero)
    assert not y.any() and torch.equal(states[0], x[:, 1:])
    starts = index([0, 1], "cpu")
    y = windrow.vllm.causal_conv1d_update_cpu(x.T[:1].clone(), states, weight, bias, "silu", zero, starts, -1)
    assert_close(y.T, convolve(x[:, 1:].double(), x[:, :1].double(), weight.double(), bias.double(), True)[0])


def test_operators_for_the_cpu(monkeypatch):
    """Those of vLLM are replaced together, where all have the arguments that are known."""
    name = "vllm._custom_ops"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)

    def causal_conv1d_weight_pack(weight): ...
    def causal_conv1d_fwd_cpu(
        x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu_activation, is_weight_packed
    ): ...
    def causal_conv1d_update_cpu(
        x, conv_states, weight, bias, silu_activation, conv_state_indices, is_weight_packed, num_accepted_tokens=None
    ): ...
    def of_the_future(x, something): ...

    module.causal_conv1d_weight_pack = causal_conv1d_weight_pack
    module.causal_conv1d_fwd_cpu = causal_conv1d_fwd_cpu
    for update in (of_the_future, causal_conv1d_update_cpu):
        module.causal_conv1d_update_cpu = update
        windrow.vllm.register()
        is_known = update is causal_conv1d_update_cpu
        assert (module.causal_conv1d_fwd_cpu is not causal_conv1d_fwd_cpu) == is_known
        assert (module.causal_conv1d_update_cpu is not update) == is_known

    x, states, weight, bias = problem(6, 16, 3, torch.float32, "cpu", WIDTH + 1)
    packed, kept = module.causal_conv1d_weight_pack(weight), states.double()
    one = index([1], "cpu")
    y = module.causal_conv1d_fwd_cpu(
        x, packed, bias, states, index([0, 6], "cpu"), one, torch.tensor([True]), True, True
    )
    want, whole = convolve(kept[1, :, : WIDTH - 1], x.double(), weight.double(), bias.double(), True)
    assert_close(y, want)
    assert torch.equal(states[1, :, : WIDTH - 1], x[:, 1 - WIDTH :])
    for tokens, accepted in ((x.T[:1], None), (x.T[None, :3], index([2], "cpu"))):
        kept, given = states.double(), tokens.clone()
        y = module.causal_conv1d_update_cpu(tokens, states, packed, None, False, one, True, accepted)
        first = 0 if accepted is None else 1
        rows = tokens.reshape(-1, 16).T.double()
        want, whole = convolve(kept[1, :, first : first + WIDTH - 1], rows, weight.double(), None, False)
        assert torch.equal(tokens, given) and y.shape == tokens.shape
        assert_close(y.reshape(-1, 16).T, want)
        after = whole[:, 1 - WIDTH :] if accepted is None else whole[:, 1:]
        assert torch.equal(states[1, :, : after.shape[1]].double(), after)


def tree_links(parents):
    """First children and next siblings of tokens with these parents, as SGLang makes them."""
    next_token, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for token in range(len(parents) - 1, 0, -1):
        next_sibling[token] = next_token[parents[token]]
        next_token[parents[token]] = token
    return next_token, next_sibling


@each_device
@each_dtype
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("with_indices", [False, True])
@pytest.mark.parametrize("dim", [40, 7])
def test_windows_and_trees_of_drafts(device, dtype, trees, with_indices, dim):
    """A step of drafts keeps the window behind each; with trees every token follows its ancestors."""
    drafts, batch = 6, 4
    _, states, weight, bias = problem(1, dim, 7, dtype, device, WIDTH - 1)
    x = torch.randn(batch, drafts, dim).to(device, dtype).transpose(1, 2)
    indices, slots = [2, 5, -1, 1], [3, 0, 4, 2]
    parents = [[0, 0, 0, 1, 1, 4], [0, 0, 1, 2, 3, 4], [0] * drafts, [0, 0, 0, 0, 2, 2]]
    if not trees:
        parents = [[max(t - 1, 0) for t in range(drafts)]] * batch
    windows = torch.full((8, drafts, dim, WIDTH - 1), -7.0).to(device, dtype)
    want_windows, want_states, want = windows.double(), states.double(), torch.zeros_like(x, dtype=torch.float64)
    for i, state in enumerate(indices):
        if state < 0:
            continue
        slot = slots[i] if with_indices else state
        for t in range(drafts):
            line, token = [], t
            while token > 0:
                line.insert(0, token)
                token = parents[i][token]
            tokens = x[i][:, [0, *line]].double()
            window = want_states[state]
            y, whole = convolve(window, tokens, weight.double(), bias.double(), True)
            want[i, :, t] = y[:, -1]
            want_windows[slot, t] = whole[:, 1 - WIDTH :]
    for i, state in enumerate(indices):
        if state >= 0:
            want_states[state] = x[i][:, 1 - WIDTH :].double()
    more = {}
    if trees:
        # A column more than there are tokens, as buffers for graphs have.
        links = [[[*row, -9] for row in column] for column in zip(*map(tree_links, parents))]
        more["retrieve_next_token"], more["retrieve_next_sibling"] = (
            index(rows, device, torch.int64) for rows in links
        )
        more["retrieve_parent_token"] = index([[-7] * (drafts + 1)] * batch, device, torch.int64)
    if with_indices:
        more["intermediate_state_indices"] = index(slots, device)
    given = x.clone()
    y = windrow.sglang.causal_conv1d_update(
        x,
        states,
        weight,
        bias,
        "silu",
        conv_state_indices=index(indices, device),
        intermediate_conv_window=windows,
        **more,
    )
    assert_close(y, want)
    assert torch.equal(x, given)
    assert torch.equal(states.double(), want_states)
    assert torch.equal(windows.double(), want_windows)
    if trees:
        kept = [[*row, -7] if state >= 0 else [-7] * (drafts + 1) for row, state in zip(parents, indices)]
        assert more["retrieve_parent_token"].tolist() == kept


@pytest.mark.parametrize("name", ["num_accept_tokens", "num_accepted_tokens"])
def test_accepted_drafts_of_sglang(name):
    x, states, weight, bias = problem(1, 16, 3, torch.float32, "cpu", WIDTH + 1)
    x = torch.randn(1, 16, 3)
    window = states[2, :, 1:WIDTH].double()
    y = windrow.sglang.causal_conv1d_update(
        x, states, weight, bias, conv_state_indices=index([2], "cpu"), **{name: index([2], "cpu")}
    )
    want, whole = convolve(window, x[0].double(), weight.double(), bias.double(), False)
    assert_close(y[0], want)
    assert torch.equal(states[2].double(), whole[:, 1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs():
    """A captured step follows the tokens and indices that are in its tensors when it is replayed."""
    dim, batch = 64, 4
    x, states, weight, bias = problem(batch, dim, 9, torch.bfloat16, "cuda")
    tokens, indices = x.T.clone(), index([1, 2, 3, 4], "cuda")
    out = torch.empty_like(tokens)

    def step():
        windrow.vllm.causal_conv1d_update(
            tokens, states, weight, bias, "silu", conv_state_indices=indices, out=out
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for changed in ([5, 6, 0, 0], [8, 0, 1, 2]):
        tokens.copy_(torch.randn_like(tokens))
        indices.copy_(index(changed, "cuda"))
        want_states = states.clone()
        want = windrow.vllm.causal_conv1d_update(
            tokens.clone(), want_states, weight, bias, "silu", conv_state_indices=indices
        )
        graph.replay()
        assert torch.equal(out, want) and torch.equal(states, want_states)
