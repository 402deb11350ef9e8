//! `windrow tune --import`: a table from elsewhere taken over.

use crate::failure::Failure;
use crate::files::{read_text, shown};
use crate::print;
use std::path::Path;
use windrow::tuning;

/// Entries that no plan of this version can take are left out, and the library warns of each.
pub(super) fn run(path: &Path) -> Result<(), Failure> {
    let count = tuning::import(&read_text(path)?)?;
    print::summary(false, format_args!("{}: {count} entries taken over\n", shown(path)))
}
