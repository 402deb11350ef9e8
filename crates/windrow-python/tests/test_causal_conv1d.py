"""`windrow.causal_conv1d` and `causal_conv1d_update` against the f64 reference."""

import numpy as np
import pytest
import reference
import windrow
from arrays import dtypes, normal, strided
from hypothesis import given
from hypothesis import strategies as st

sizes = st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 30))
widths = st.integers(1, 7)
activations = st.sampled_from([None, "silu", "relu", "leaky_relu(-0.5)", "hardswish", "gelu", "gelu_tanh"])


@given(st.data(), sizes, widths, dtypes, activations, st.booleans())
def test_any_strides(data, size, width, dtype, activation, wide_weight):
    x = data.draw(strided(size, dtype))
    weight_type = np.float32 if wide_weight else dtype
    weight = data.draw(strided((size[1], width), weight_type))
    bias = data.draw(st.none() | strided(size[1:2], weight_type))
    y = windrow.causal_conv1d(x, weight, bias, activation=activation)
    reference.assert_close(y, *reference.causal_conv1d(x, weight, bias, activation))


@given(st.data(), sizes, widths, dtypes)
def test_states_continue_a_sequence(data, size, width, dtype):
    b, d, l = size
    x = data.draw(strided(size, dtype))
    weight = normal((d, width))
    initial = data.draw(strided((b, d, width - 1), dtype))
    y, final = windrow.causal_conv1d(
        x, weight, initial_states=initial, return_final_states=True, activation="silu"
    )
    want, scale = reference.causal_conv1d(x, weight, None, "silu", initial_states=initial)
    reference.assert_close(y, want, scale)
    joined = np.concatenate([initial, x], axis=2)
    assert np.array_equal(final, joined[:, :, joined.shape[2] - (width - 1) :])
    cut = data.draw(st.integers(0, l))
    first, state = windrow.causal_conv1d(
        x[:, :, :cut], weight, initial_states=initial, return_final_states=True, activation="silu"
    )
    second = windrow.causal_conv1d(
        x[:, :, cut:], weight, initial_states=state, activation="silu"
    )
    reference.assert_close(np.concatenate([first, second], axis=2), want, scale)


@given(st.data(), sizes, widths, dtypes, st.booleans())
def test_packed_by_seq_idx(data, size, width, dtype, with_states):
    b, d, l = size
    x = data.draw(strided(size, dtype))
    weight = normal((d, width))
    steps = data.draw(st.lists(st.integers(0, 1), min_size=b * l, max_size=b * l))
    seq_idx = np.cumsum(np.array(steps, np.int32).reshape(b, l), axis=1, dtype=np.int32)
    padding = data.draw(st.integers(0, l))
    seq_idx[:, l - padding :] = -1
    initial = normal((b, d, width - 1), dtype) if with_states else None
    y = windrow.causal_conv1d(x, weight, seq_idx=seq_idx, initial_states=initial)
    reference.assert_close(
        y, *reference.causal_conv1d(x, weight, seq_idx=seq_idx, initial_states=initial)
    )


@given(st.data(), widths, st.integers(1, 9), st.sampled_from([np.int32, np.int64]), st.booleans())
def test_packed_by_cu_seqlens(data, width, d, index_type, with_states):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    x = data.draw(strided((1, d, sum(lengths)), np.float32))
    weight = normal((d, width))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(index_type)
    initial = normal((len(lengths), d, width - 1)) if with_states else None
    y, final = windrow.causal_conv1d(
        x, weight, cu_seqlens=cu_seqlens, initial_states=initial, return_final_states=True
    )
    for i, (start, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:], strict=False)):
        before = initial[i : i + 1] if with_states else None
        part = x[:, :, start:end]
        want, scale = reference.causal_conv1d(part, weight, initial_states=before)
        reference.assert_close(y[:, :, start:end], want, scale)
        _, state = windrow.causal_conv1d(
            part, weight, initial_states=before, return_final_states=True
        )
        assert np.array_equal(final[i], state[0])


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 9), widths)
def test_dense_weight(data, b, d_in, l, width):
    d_out = data.draw(st.integers(1, 5))
    x = data.draw(strided((b, d_in, l), np.float32))
    weight = normal((d_out, d_in, width))
    y = windrow.causal_conv1d(x, weight)
    padded = np.pad(reference.f64(x), ((0, 0), (0, 0), (width - 1, 0)))
    want, scale = np.zeros((b, d_out, l)), np.zeros((b, d_out, l))
    for k in range(width):
        part = padded[:, :, k : k + l]
        want += np.einsum("oi,bil->bol", reference.f64(weight[:, :, k]), part)
        scale += np.einsum("oi,bil->bol", np.abs(weight[:, :, k]), np.abs(part))
    reference.assert_close(y, want, scale)


@given(st.data(), st.integers(1, 4), st.integers(1, 20), widths, dtypes, activations, st.booleans())
def test_update_equals_the_whole(data, b, d, width, dtype, activation, pooled):
    steps = data.draw(st.integers(1, 4))
    state_len = width - 1 + data.draw(st.integers(0, 3))
    x = data.draw(strided((b, d, steps), dtype))
    weight, bias = normal((d, width)), normal((d,))
    indices = None
    entries = b
    if pooled:
        entries = b + 3
        kind = data.draw(st.sampled_from([np.int32, np.int64]))
        indices = np.array(data.draw(st.permutations(range(entries)))[:b], kind)
    state = np.array(data.draw(strided((entries, d, state_len), dtype)))
    rows = range(b) if indices is None else indices
    before = state.copy()
    joined = np.concatenate([before[list(rows)], x], axis=2)
    y = windrow.causal_conv1d_update(
        x, state, weight, bias, activation, conv_state_indices=indices
    )
    initial = joined[:, :, state_len - (width - 1) : state_len]
    reference.assert_close(
        y, *reference.causal_conv1d(x, weight, bias, activation, initial_states=initial)
    )
    expected = before.copy()
    expected[list(rows)] = joined[:, :, joined.shape[2] - state_len :]
    assert state.tobytes() == expected.tobytes()


@given(st.data(), st.integers(1, 3), st.integers(1, 9), widths, dtypes)
def test_update_of_a_ring(data, b, d, width, dtype):
    state_len = max(width - 1, 1) + data.draw(st.integers(0, 3))
    state = normal((b, d, state_len), dtype)
    x = normal((b, d), dtype)
    weight = normal((d, width))
    kind = data.draw(st.sampled_from([np.int32, np.int64]))
    lengths = np.array(data.draw(st.lists(st.integers(0, 99), min_size=b, max_size=b)), kind)
    expected = state.copy()
    past = np.zeros((b, d, width - 1), dtype)
    for i in range(b):
        for k in range(width - 1):
            past[i, :, k] = state[i, :, (lengths[i] - (width - 1) + k) % state_len]
        expected[i, :, lengths[i] % state_len] = x[i]
    y = windrow.causal_conv1d_update(x, state, weight, cache_seqlens=lengths)
    want, scale = reference.causal_conv1d(x[:, :, None], weight, initial_states=past)
    reference.assert_close(y, want[:, :, 0], scale[:, :, 0])
    assert state.tobytes() == expected.tobytes()


def test_padding_rows_of_an_update():
    x, weight = normal((3, 4)), normal((4, 4))
    state = normal((5, 4, 3))
    before = state.copy()
    indices = np.array([2, -1, 0], np.int32)
    y = windrow.causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    assert (y[1] == 0).all() and (y[0] != 0).any()
    assert np.array_equal(state[[1, 3, 4]], before[[1, 3, 4]])
    assert not np.array_equal(state[[0, 2]], before[[0, 2]])


def test_errors():
    x, weight = normal((2, 3, 5)), normal((3, 4))
    with pytest.raises(ValueError, match="`x` has 2 dimensions"):
        windrow.causal_conv1d(x[0], weight)
    with pytest.raises(ValueError, match="`weight` has shape"):
        windrow.causal_conv1d(x, normal((4, 4)))
    with pytest.raises(ValueError, match="activation"):
        windrow.causal_conv1d(x, weight, activation="mish")
    with pytest.raises(TypeError, match="`seq_idx` is i64"):
        windrow.causal_conv1d(x, weight, seq_idx=np.zeros((2, 5), np.int64))
    with pytest.raises(IndexError, match="cu_seqlens"):
        windrow.causal_conv1d(x[:1], weight, cu_seqlens=np.array([0, 6], np.int32))
    with pytest.raises(IndexError, match="conv_state_indices"):
        windrow.causal_conv1d_update(
            normal((1, 3)), normal((2, 3, 3)), weight, conv_state_indices=np.array([2], np.int32)
        )
    with pytest.raises(ValueError, match="`conv_state` has shape"):
        windrow.causal_conv1d_update(normal((1, 3)), normal((1, 3, 2)), weight)
    state = normal((1, 3, 3))
    with pytest.raises(ValueError, match="shares memory"):
        windrow.causal_conv1d_update(state[:, :, 0], state, weight)
