//! Faults of kernels.

use std::fmt;

/// A forbidden action of a kernel, or an instruction that the emulator does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(String);

impl Fault {
    pub fn new(what: impl fmt::Display) -> Self {
        Fault(what.to_string())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Fault::new(error)
    }
}
