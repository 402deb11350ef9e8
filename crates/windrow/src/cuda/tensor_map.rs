//! Descriptors for the tensor copy engine of compute capability 9.0 and later.

use super::Gpu;
use crate::{DType, Result};
use cudarc::driver::sys;

/// Describes a channels-last tensor and the boxes that kernels copy from it: a kernel parameter.
/// What lies outside the tensor is read as zero. Pixels of a box are 64 bytes of channels, swizzled.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// `dims` and `boxes` are [c, w, h, n], `strides` those of w, h, n in elements; c has stride 1.
    /// The address must be aligned to 16 bytes, as must be all strides.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend) if the driver refuses.
    pub(crate) fn new(
        gpu: &Gpu,
        dtype: DType,
        address: *const u8,
        dims: [usize; 4],
        strides: [usize; 3],
        boxes: [usize; 4],
    ) -> Result<Self> {
        let element = match dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            DType::F64 | DType::I32 | DType::I64 => {
                unreachable!("specs allow f32, f16 and bf16")
            }
        };
        let dims = dims.map(|d| d as u64);
        let strides = strides.map(|s| (s * dtype.size()) as u64);
        let boxes = boxes.map(|b| b as u32);
        let mut map = TensorMap(sys::CUtensorMap { opaque: [0; 16] });
        let _current = gpu.enter()?;
        // SAFETY: the device is current; the arrays have the rank's length; the map is 64-byte aligned. The address is
        // only stored.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                element,
                4,
                address.cast_mut().cast(),
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        gpu.check(result, "cuTensorMapEncodeTiled")?;
        Ok(map)
    }
}
