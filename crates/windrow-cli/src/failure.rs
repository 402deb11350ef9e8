//! Why the command ends with another status than 0.

use crate::files::{FileError, Reason};

/// The failure of a command, by exit status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Arguments or data that cannot be used, or a machine that lacks something: status 2.
    #[error("{0}")]
    Input(String),
    /// Nobody reads standard output any more: status 0, without a word.
    #[error("standard output is closed")]
    ClosedPipe,
    /// A result that differs from the oracle: status 1.
    #[error("{0}")]
    Verification(String),
}

impl Failure {
    /// The exit status of the command.
    pub(crate) fn status(&self) -> u8 {
        match self {
            Failure::ClosedPipe => 0,
            Failure::Verification(_) => 1,
            Failure::Input(_) => 2,
        }
    }
}

impl From<windrow::Error> for Failure {
    fn from(e: windrow::Error) -> Self {
        match e {
            windrow::Error::Verification { .. } => Failure::Verification(e.to_string()),
            e => Failure::Input(e.to_string()),
        }
    }
}

impl From<FileError> for Failure {
    fn from(e: FileError) -> Self {
        match e.reason {
            Reason::ClosedPipe => Failure::ClosedPipe,
            _ => Failure::Input(e.to_string()),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        Failure::Input(e.to_string())
    }
}
