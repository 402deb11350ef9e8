//! Sequences in parts, packed sequences, decoding.

use super::causal_conv1d::plain;
use super::*;
use windrow_candle::{CausalConv1dOptions, CausalConv1dUpdateOptions, TensorExt};

#[test]
fn a_sequence_in_parts_equals_the_whole() {
    for device in devices() {
        let (x, w) = (numbers((2, 6, 12), 1, &device), numbers((6, 4), 2, &device));
        let bias = numbers(6, 3, &device);
        let whole = plain(&x, &w, Some(&bias), Activation::Silu);
        let mut state = None;
        let mut at = 0;
        for len in [2, 1, 7, 2] {
            let options = CausalConv1dOptions {
                bias: Some(&bias),
                activation: Activation::Silu,
                initial_states: state.as_ref(),
                ..Default::default()
            };
            let part = x.narrow(2, at, len).unwrap();
            let (y, after) = part.causal_conv1d_with_states(&w, &options).unwrap();
            assert_close(&y, &whole.narrow(2, at, len).unwrap(), 5e-6);
            (state, at) = (Some(after), at + len);
        }
        assert_eq!(values(&state.unwrap()), values(&x.narrow(2, 9, 3).unwrap()));
    }
}

#[test]
fn packed_sequences_do_not_see_each_other() {
    for device in devices() {
        let (x, w) = (numbers((1, 6, 12), 1, &device), numbers((6, 4), 2, &device));
        let parts: Vec<Tensor> = [(0, 5), (5, 1), (6, 6)]
            .into_iter()
            .map(|(at, len)| plain(&x.narrow(2, at, len).unwrap(), &w, None, Activation::Silu))
            .collect();
        let want = Tensor::cat(&parts, 2).unwrap();
        let base = CausalConv1dOptions { activation: Activation::Silu, ..Default::default() };
        for dtype in [DType::I32, DType::U32] {
            let indices = |t: Tensor| t.to_dtype(dtype).unwrap().to_device(&device).unwrap();
            let cu_seqlens = indices(Tensor::new(&[0u32, 5, 6, 12], &Device::Cpu).unwrap());
            let packed = CausalConv1dOptions { cu_seqlens: Some(&cu_seqlens), ..base };
            let (y, states) = x.causal_conv1d_with_states(&w, &packed).unwrap();
            assert_close(&y, &want, 5e-6);
            assert_eq!(states.dims(), [3, 6, 3]);
            let seq_idx = [[7u32, 7, 7, 7, 7, 2, 9, 9, 9, 9, 9, 9]];
            let seq_idx = indices(Tensor::new(&seq_idx, &Device::Cpu).unwrap());
            let numbered = CausalConv1dOptions { seq_idx: Some(&seq_idx), ..base };
            assert_close(&x.causal_conv1d(&w, &numbered).unwrap(), &want, 5e-6);
        }
    }
}

#[test]
fn steps_equal_the_whole() {
    for device in devices() {
        for dtype in DTYPES {
            let cast = |t: Tensor| t.to_dtype(dtype).unwrap();
            let (x, w) = (cast(numbers((2, 6, 9), 1, &device)), cast(numbers((6, 4), 2, &device)));
            let bias = cast(numbers(6, 3, &device));
            let (prefill, activation) = (4, Activation::Silu);
            let options =
                CausalConv1dOptions { bias: Some(&bias), activation, ..Default::default() };
            let whole = x.causal_conv1d(&w, &options).unwrap();
            let start = x.narrow(2, 0, prefill).unwrap();
            let (_, state) = start.causal_conv1d_with_states(&w, &options).unwrap();
            let options =
                CausalConv1dUpdateOptions { bias: Some(&bias), activation, ..Default::default() };
            for t in prefill..9 {
                let token = x.narrow(2, t, 1).unwrap();
                let y = token.causal_conv1d_update(&state, &w, &options).unwrap();
                assert_close(&y, &whole.narrow(2, t, 1).unwrap(), tolerance(dtype));
            }
            assert_eq!(values(&state), values(&x.narrow(2, 6, 3).unwrap()));
        }
    }
}

#[test]
fn states_of_a_pool_are_chosen_by_index() {
    for device in devices() {
        let (x, w) = (numbers((2, 6, 1), 1, &device), numbers((6, 4), 2, &device));
        let pool = numbers((5, 6, 3), 4, &device);
        let before = pool.copy().unwrap();
        let indices = Tensor::new(&[3i32, 1], &device).unwrap();
        let options =
            CausalConv1dUpdateOptions { conv_state_indices: Some(&indices), ..Default::default() };
        let y = x.causal_conv1d_update(&pool, &w, &options).unwrap();
        for (row, state) in [(0, 3), (1, 1)] {
            let own = before.narrow(0, state, 1).unwrap().copy().unwrap();
            let plain = CausalConv1dUpdateOptions::default();
            let want = x.narrow(0, row, 1).unwrap().causal_conv1d_update(&own, &w, &plain).unwrap();
            assert_close(&y.narrow(0, row, 1).unwrap(), &want, 1e-6);
            assert_eq!(values(&pool.narrow(0, state, 1).unwrap()), values(&own));
        }
        for untouched in [0, 2, 4] {
            let (now, then) = (pool.get(untouched).unwrap(), before.get(untouched).unwrap());
            assert_eq!(values(&now), values(&then));
        }
    }
}

#[test]
fn ring_buffers_hold_what_shifted_states_hold() {
    for device in devices() {
        let (x, w) = (numbers((2, 6, 7), 1, &device), numbers((6, 4), 2, &device));
        let whole = plain(&x, &w, None, Activation::Identity);
        let ring = Tensor::zeros((2, 6, 4), DType::F32, &device).unwrap();
        for t in 0..7 {
            let before = Tensor::new(&[t as i32; 2], &device).unwrap();
            let options =
                CausalConv1dUpdateOptions { cache_seqlens: Some(&before), ..Default::default() };
            let token = x.narrow(2, t, 1).unwrap();
            let y = token.causal_conv1d_update(&ring, &w, &options).unwrap();
            assert_close(&y, &whole.narrow(2, t, 1).unwrap(), 5e-6);
        }
    }
}

#[test]
fn errors_name_what_is_wrong() {
    for device in devices() {
        let (x, w) = (numbers((2, 6, 1), 1, &device), numbers((6, 4), 2, &device));
        let none = CausalConv1dUpdateOptions::default();
        let short = numbers((2, 6, 2), 1, &device);
        let words = &["causal_conv1d_update", "conv_state", "at least 3"];
        assert_error(x.causal_conv1d_update(&short, &w, &none), words);

        let tracked = var((2, 6, 3), 1, &device);
        assert_error(x.causal_conv1d_update(&tracked, &w, &none), &["conv_state", "gradient"]);

        let both = numbers((2, 6, 4), 1, &device);
        let (state, token) = (both.narrow(2, 0, 3).unwrap(), both.narrow(2, 3, 1).unwrap());
        let words = &["conv_state", "shares storage", "`x`"];
        assert_error(token.causal_conv1d_update(&state, &w, &none), words);

        let state = numbers((2, 6, 3), 1, &device);
        let x = var((2, 6, 1), 1, &device);
        let y = x.causal_conv1d_update(&state, &w, &none).unwrap();
        let words = &["backward is not supported", "causal_conv1d_update"];
        assert_error(y.sum_all().unwrap().backward(), words);
    }
}

#[test]
fn an_index_out_of_range_is_refused() {
    let device = Device::Cpu;
    let (x, w) = (numbers((2, 6, 1), 1, &device), numbers((6, 4), 2, &device));
    let pool = numbers((5, 6, 3), 4, &device);
    let indices = Tensor::new(&[3i32, 5], &device).unwrap();
    let options =
        CausalConv1dUpdateOptions { conv_state_indices: Some(&indices), ..Default::default() };
    let words = &["`conv_state_indices`[1] is 5"];
    assert_error(x.causal_conv1d_update(&pool, &w, &options), words);
}
