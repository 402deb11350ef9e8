//! The gradients of a convolution on the CPU: each is computed by the first way of its list that takes it.

mod bias;
mod data;
mod weight_product;

use self::bias::BiasGradient;
use self::data::DataGradient;
use self::weight_product::WeightProduct;
use super::gradient::WeightGradient;
use super::method::Task;
use super::winograd::WinogradWeight;
use crate::{Error, Result};

/// A way to compute a gradient: the gradient bound to the task, or `None` if another way is expected to be faster.
type Way<G> = fn(&Task<'_>) -> Result<Option<G>>;

/// The methods for the gradient of x, the fastest first.
const DATA: [Way<DataGradient>; 4] =
    [data::by_mirrored, data::by_tiles, data::by_taps, data::by_products];

/// The methods for the gradient of the filter, the fastest first.
const WEIGHT: [Way<Box<dyn WeightGradient>>; 2] = [WinogradWeight::prepare, WeightProduct::prepare];

/// The first method that supports the task, prepared for it.
fn first<G>(ways: &[Way<G>], task: &Task<'_>) -> Result<G> {
    for way in ways {
        if let Some(gradient) = way(task)? {
            return Ok(gradient);
        }
    }
    Err(Error::unsupported("a gradient of this convolution", "no method computes it"))
}

/// The prepared gradients of a convolution.
#[derive(Debug)]
pub(crate) struct Backward {
    pub(crate) data: DataGradient,
    pub(crate) weight: Box<dyn WeightGradient>,
    pub(crate) bias: BiasGradient,
}

impl Backward {
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new(task: Task<'_>) -> Result<Self> {
        Ok(Backward {
            data: first(&DATA, &task)?,
            weight: first(&WEIGHT, &task)?,
            bias: BiasGradient::new(task),
        })
    }

    /// Bytes of scratch memory of [`WeightGradient::run`].
    pub(crate) fn weight_bytes(&self) -> usize {
        self.weight.scratch_len() * size_of::<f32>()
    }
}
