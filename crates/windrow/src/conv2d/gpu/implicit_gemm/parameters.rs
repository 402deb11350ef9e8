//! The parameters of the product (`implicit_gemm.cuh`).

use crate::conv2d::gpu::Divisor;
use crate::conv2d::gpu::shape::ConvShape;
use crate::conv2d::gpu::shared::frames::FrameParams;
use crate::gpu::{TensorMap, params};

params! {
    pub(super) struct Params: ConvShape {
        pub(super) map: TensorMap,
        pub(super) filter: *const u8,
        pub(super) filter_inverse: *const u8,
        pub(super) pixels: i32,
        pub(super) r: i32,
        pub(super) group_c: i32,
        pub(super) unit_k: i32,
        pub(super) steps: i32,
        pub(super) tiles: i32,
        pub(super) image_pixels: Divisor,
        pub(super) pitch: Divisor,
        pub(super) k_blocks: Divisor,
        pub(super) unit_blocks: Divisor,
        pub(super) group_k: Divisor,
        pub(super) c: Divisor,
        pub(super) s: Divisor,
    }

    pub(super) struct VideoParams: Params {
        pub(super) initial_map: TensorMap,
        pub(super) frames: FrameParams,
        pub(super) frame_r: Divisor,
        pub(super) all_c: i32,
    }
}
