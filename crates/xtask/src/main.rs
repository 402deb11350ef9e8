//! Project tasks, run as `cargo xtask TASK`.

mod date;
mod figures;
mod python;
mod readme;
mod record;
mod steps;
mod tables;
mod test;

use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask TASK

  test             everything that has to pass before a change is merged, but for PyTorch
  test --torch     the same with PyTorch, whose environment takes 5 GB on first use
  record           measure this machine into benchmarks/record/DATE-MACHINE
  readme           write the README's tables from the record that it names
  readme --check   fail if the README's tables are not those of the record, or if a page gives a figure
                   without a record";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args[..] {
        ["test"] => test::run(false),
        ["test", "--torch"] => test::run(true),
        ["record"] => record::run(),
        ["readme"] => readme::write(),
        ["readme", "--check"] => readme::check().and_then(|()| figures::check()),
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
