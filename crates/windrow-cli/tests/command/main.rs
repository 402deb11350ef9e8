//! The command as its users run it.

mod bad_input;
mod folder;
mod good_input;
mod inputs;
mod limits;
mod outputs;
mod terminal;
mod tune;
