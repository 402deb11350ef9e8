//! Project tasks, run as `cargo xtask TASK`.

mod accuracy_picture;
mod amd;
mod api;
mod date;
mod dist;
mod examples;
mod figures;
mod filled;
mod form;
mod house;
mod imports;
mod kernels;
#[path = "../../windrow-cli/src/lines.rs"]
mod lines;
mod networks_cpu_table;
mod pages;
mod published_table;
mod python;
mod record;
mod records;
mod speed_picture;
mod steps;
mod svg;
mod tables;
mod test;
mod ways_picture;
mod wheel;

use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask TASK

  test             everything that has to pass before a change is merged, but for PyTorch
  test --torch     the same with PyTorch, whose environment takes 5 GB on first use
  test --torch V   only the tests on PyTorch, on version V (such as 2.4.1) and without its newer companions
  amd              compile the kernels for AMD's chips and execute them in the emulator
  amd --all        the same with all kernels and listed cases for each chip, and write the result into the records
  api              write docs/api.txt, the public surface of the crates
  house            check the plan of the sources: layers, circles of imports, long files, and that three sample changes
                   touch the files that docs/ARCHITECTURE.md names
  dist             make target/dist, what a release publishes (wheels, source packages, crates, the command, checksums),
                   and check it in new environments
  kernels          make target/kernels/windrow, a folder for the Hugging Face Hub's kernels, and check it
  record           measure this machine, and AMD's GPUs in it, into benchmarks/record/DATE-MACHINE
  readme           write the tables and pictures of the pages from the records that they name, and lay out the
                   records with one case a line
  readme --check   fail if they are not so, if a page gives a figure without a record, if a record names no commit,
                   if a link or anchor leads nowhere, or if a page is too wide";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    if let Some(cargo) = std::env::var_os(python::REAL_CARGO) {
        return python::as_cargo(&cargo, &args);
    }
    let result = match args[..] {
        ["test"] => test::run(false),
        ["test", "--torch"] => test::run(true),
        ["test", "--torch", version] => python::test_on(version),
        ["amd"] => amd::run(false),
        ["amd", "--all"] => amd::run(true),
        ["api"] => api::write(),
        ["house"] => house::check().and_then(|()| house::samples(&mut steps::Steps::default())),
        ["dist"] => dist::build(),
        ["kernels"] => kernels::build(),
        ["record"] => record::run(),
        ["readme"] => records::lay_out().and_then(|()| filled::write()),
        ["readme", "--check"] => test::pages(),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
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
