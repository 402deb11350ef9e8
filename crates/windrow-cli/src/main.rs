//! The `windrow` command.

#[global_allocator]
static MEMORY: windrow_cli::Memory = windrow_cli::Memory;

fn main() -> std::process::ExitCode {
    windrow_cli::main()
}
