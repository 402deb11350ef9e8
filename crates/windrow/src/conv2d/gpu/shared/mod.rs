//! The code that several methods share: headers, operands, packed filters, f32 numbers split into f16 parts, copies of
//! x.

pub(super) mod facts;
pub(super) mod frames;
pub(super) mod input;
pub(super) mod matrix;
pub(super) mod packs;
pub(super) mod parameters;
pub(super) mod parts;
pub(super) mod shape;
pub(super) mod split;
pub(super) mod video_input;
pub(super) mod weight_product;

use crate::gpu::Source;

/// Alignment of packed filters and of the parts of scratch memory, in bytes.
pub(super) const ALIGNMENT: usize = 256;

/// Variants of the kernels here.
pub(super) const KERNELS: &[&str] = &[
    "final_frames.cu conv2d_final_frames_{f32,f16,bf16} CHANNELS_INNER={0,1} by:conv3d",
    "frame_max.cu conv2d_frame_max_f32 by:conv3d sm_90",
    "image_max.cu conv2d_image_max_f32",
    "pack_input.cu conv2d_winograd_row_input_{f32,f16,bf16} sm_90",
];

/// A header in the folder of the file that names it.
macro_rules! header {
    ($name:literal) => {
        Source { name: $name, text: include_str!($name), includes: &[] }
    };
}

pub(super) const CONV2D: Source = header!("conv2d.cuh");
pub(super) const HOPPER: Source = header!("hopper.cuh");
pub(super) const TURN: Source = header!("turn.cuh");

/// A kernel's source in the folder of the file that names it, with its method's own headers there.
macro_rules! source {
    ($name:literal $(, $header:literal)*) => {
        crate::gpu::Source {
            name: $name,
            text: include_str!($name),
            includes: &[
                crate::conv2d::gpu::shared::CONV2D,
                crate::conv2d::gpu::shared::HOPPER,
                crate::conv2d::gpu::shared::TURN,
                $(crate::gpu::Source { name: $header, text: include_str!($header), includes: &[] }),*
            ],
        }
    };
}
pub(super) use source;
