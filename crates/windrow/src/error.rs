//! The one error type of the library.

use crate::{DType, Device};

/// A result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the library. Each message names the argument, what was given and what was
/// expected. An operator that returns an error before it starts has not touched its outputs; the
/// variants that can come later say what was written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong number of dimensions.
    #[error("`{arg}` has {given} dimensions, expected {expected}")]
    Rank {
        /// Argument name.
        arg: &'static str,
        /// Its rank.
        given: usize,
        /// The expected value, in words.
        expected: &'static str,
    },
    /// A tensor has the wrong shape.
    #[error("`{arg}` has shape {given:?}, expected {expected}")]
    Shape {
        /// Argument name.
        arg: &'static str,
        /// Its shape.
        given: Vec<usize>,
        /// The expected shape or condition, in words.
        expected: String,
    },
    /// A tensor has the wrong element type.
    #[error("`{arg}` is {given}, expected {expected}")]
    DType {
        /// Argument name.
        arg: &'static str,
        /// Its element type.
        given: DType,
        /// The expected value.
        expected: String,
    },
    /// A tensor has strides that the operator cannot take.
    #[error("`{arg}` has strides {given:?}, expected {expected}")]
    Strides {
        /// Argument name.
        arg: &'static str,
        /// Its strides, in elements.
        given: Vec<isize>,
        /// The expected value.
        expected: String,
    },
    /// Two elements of an output share memory.
    #[error(
        "`{arg}` with shape {shape:?} and strides {strides:?} maps several elements to the same \
         memory, expected every element of an output to have its own"
    )]
    OverlappingOutput {
        /// Argument name.
        arg: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<isize>,
    },
    /// An output shares memory with an input in a way the operator does not allow.
    #[error("`{output}` shares memory with `{input}`, expected {expected}")]
    Aliasing {
        /// The output.
        output: &'static str,
        /// The input that it overlaps.
        input: &'static str,
        /// The allowed values.
        expected: &'static str,
    },
    /// The memory given is too small for shape and strides.
    #[error("`{arg}` reaches elements {first}..={last}, but the memory given has {len}")]
    OutOfBounds {
        /// Argument name.
        arg: &'static str,
        /// Lowest element index reached.
        first: i128,
        /// Highest element index reached.
        last: i128,
        /// Number of elements given.
        len: usize,
    },
    /// A scalar parameter is out of range.
    #[error("`{name}` is {given}, expected {expected}")]
    Parameter {
        /// Parameter name.
        name: &'static str,
        /// The given value.
        given: String,
        /// The expected value.
        expected: String,
    },
    /// An index tensor holds a value out of range.
    #[error("`{arg}`[{position}] is {given}, expected {expected}")]
    Index {
        /// Argument name.
        arg: &'static str,
        /// Position in the index tensor.
        position: usize,
        /// The value found.
        given: i64,
        /// The expected value.
        expected: String,
    },
    /// A product of sizes does not fit in 64 bits, or exceeds what memory can address.
    #[error("the size of `{what}` overflows: {detail}")]
    SizeOverflow {
        /// The thing that has this size.
        what: &'static str,
        /// The sizes multiplied.
        detail: String,
    },
    /// A tensor is on another device than the plan.
    #[error("`{arg}` is on {given}, expected {expected}")]
    WrongDevice {
        /// Argument name.
        arg: &'static str,
        /// The device where it is.
        given: Device,
        /// The device where it should be.
        expected: Device,
    },
    /// The scratch memory of a run is too small: a plan says how much it needs.
    #[error(
        "`workspace` is {given} bytes, expected at least {needed} bytes (see `workspace_bytes()` of \
         the plan)"
    )]
    WorkspaceTooSmall {
        /// Its size in bytes.
        given: usize,
        /// The size that the run needs.
        needed: usize,
    },
    /// A filter was packed for a plan that packs otherwise.
    #[error("`{arg}` is packed for {given}, expected a filter packed for {expected}")]
    ForeignPack {
        /// Argument name.
        arg: &'static str,
        /// The form for which it was packed.
        given: String,
        /// The form that is needed.
        expected: String,
    },
    /// The combination asked for is not offered.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The request.
        what: String,
        /// Why not, and what to use instead.
        reason: String,
    },
    /// Memory could not be had.
    #[error("out of memory on {device}: {bytes} bytes were asked for")]
    OutOfMemory {
        /// The device.
        device: Device,
        /// The bytes that were asked for.
        bytes: usize,
    },
    /// The device asked for does not exist or cannot be used.
    #[error("no device {device}: {reason}")]
    NoDevice {
        /// The device.
        device: String,
        /// Why.
        reason: String,
    },
    /// A device library returned an error.
    #[error("{what} failed on {device}: {detail}")]
    Backend {
        /// The call or kernel.
        what: String,
        /// The device.
        device: Device,
        /// The library's own words.
        detail: String,
    },
    /// The ranks of a job could not work together: one failed, hangs or never came. Outputs of the
    /// collective operations under way are undefined, and the group is of no more use.
    #[error("rank {rank} of {world}: {what} failed: {detail}")]
    Parallel {
        /// The rank that reports it.
        rank: usize,
        /// Number of ranks.
        world: usize,
        /// The operation.
        what: String,
        /// The cause.
        detail: String,
    },
    /// `Verify::On`: a result differs from the oracle by more than the tolerance. The output has
    /// been written and is wrong.
    #[error("{op} differs from its f64 oracle: {detail}")]
    Verification {
        /// Operator and algorithm.
        op: String,
        /// Error counts and sizes.
        detail: String,
    },
}

impl Error {
    /// A scalar parameter that is out of range.
    pub fn parameter(
        name: &'static str,
        given: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Error::Parameter { name, given: given.to_string(), expected: expected.into() }
    }

    /// A tensor whose shape is wrong.
    pub fn shape(arg: &'static str, given: &[usize], expected: impl Into<String>) -> Self {
        Error::Shape { arg, given: given.to_vec(), expected: expected.into() }
    }

    /// A tensor whose element type is wrong.
    pub fn dtype(arg: &'static str, given: DType, expected: impl Into<String>) -> Self {
        Error::DType { arg, given, expected: expected.into() }
    }

    /// A combination that is not offered.
    pub fn unsupported(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Unsupported { what: what.into(), reason: reason.into() }
    }
}
