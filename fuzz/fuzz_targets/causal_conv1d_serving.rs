//! Random cases of `windrow verify --random` with the fuzzer's bytes as choices.

#![no_main]

use libfuzzer_sys::fuzz_target;
use windrow::verify::{Choices, try_choices};

fuzz_target!(|data: &[u8]| try_choices("causal_conv1d_serving", Choices::from_bytes(data)));
