//! Random cases of `windrow verify --random` with the fuzzer's bytes as choices.

#![no_main]

use libfuzzer_sys::fuzz_target;
use windrow::verify::{Choices, try_choices};

fuzz_target!(|data: &[u8]| try_choices("conv3d", Choices::from_bytes(data)));
