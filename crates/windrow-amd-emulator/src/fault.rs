//! What goes wrong.

use std::fmt;

/// What a kernel did that it may not do, or what is not known of it.
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
