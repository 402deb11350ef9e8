//! `windrow completions` and `windrow man`: the command described for shells and for `man`.

use crate::Command;
use crate::failure::Failure;
use crate::print;
use clap::CommandFactory;
use clap_complete::Shell;

/// Print a script that completes the command's arguments in a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow completions bash > ~/.local/share/bash-completion/completions/windrow
  windrow completions zsh > ~/.zfunc/_windrow
  windrow completions fish > ~/.config/fish/completions/windrow.fish")]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

/// Print the manual page of the command, or of one of its commands.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow man | man -l -
  windrow man run conv2d > ~/.local/share/man/man1/windrow-run-conv2d.1")]
pub(crate) struct Man {
    /// The command, as it is called
    commands: Vec<String>,
}

pub(crate) fn run(args: &Completions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Command::command(), "windrow", &mut script);
    print::out(String::from_utf8_lossy(&script))
}

pub(crate) fn man(args: &Man) -> Result<(), Failure> {
    let mut command = Command::command();
    command.build();
    for name in &args.commands {
        let found = command.find_subcommand(name).cloned();
        command = found.ok_or_else(|| Failure::Input(format!("no command `{name}`")))?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    print::out(String::from_utf8_lossy(&page))
}
