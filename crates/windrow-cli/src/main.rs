//! The `windrow` command.

fn main() -> std::process::ExitCode {
    windrow_cli::main()
}
