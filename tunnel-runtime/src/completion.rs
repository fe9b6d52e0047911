//! The `completion` command of both programs.

use std::io;

use clap::{Arg, Args, Command, ValueEnum};
use clap_complete::shells::{Bash, Fish, Zsh};
use clap_complete::{Generator, generate};

use crate::output::print;

#[derive(Args, Clone, Copy, Debug)]
pub struct CompletionCommand {
    /// The shell. Load the script with `source <(PROGRAM completion bash)`, the same in zsh after compinit, or in fish
    /// `PROGRAM completion fish | source`.
    shell: Shell,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl CompletionCommand {
    /// Prints the script for the program with this command line.
    ///
    /// # Errors
    /// Fails if standard output fails.
    pub fn run(self, command: Command) -> io::Result<()> {
        let script = match self.shell {
            Shell::Bash => found(command.get_name(), &script(Bash, command.clone())),
            Shell::Zsh => script(Zsh, escaped(command)),
            Shell::Fish => script(Fish, command),
        };
        print(&script).map(drop)
    }
}

fn script(shell: impl Generator, mut command: Command) -> String {
    let name = command.get_name().to_owned();
    // The generator panics if it cannot write, as into a pipe that is closed.
    let mut script = Vec::new();
    generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Gives the commands of a program with a hyphen in its name the labels that the script looks for (clap#6421).
fn found(program: &str, script: &str) -> String {
    let label = |hyphen: &str| program.replace('-', hyphen) + "__subcmd__";
    script.replace(&label("__subcmd__"), &label("__"))
}

/// Escapes what clap_complete leaves as it is for zsh, which takes a colon in a value's name as its end, and the rest as a
/// program to run (clap's users met it: deno#15223).
fn escaped(command: Command) -> Command {
    let escape = |arg: Arg| match arg.get_value_names() {
        Some([name]) => {
            // clap wants it to be static without its feature `string`, and the program ends soon.
            let name: &'static str = name.replace(':', "\\:").leak();
            arg.value_name(name)
        }
        _ => arg,
    };
    command.mut_args(escape).mut_subcommands(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Command {
        let flag = Arg::new("peer").long("peer").value_name("HOST:PORT");
        let inner = Command::new("in-ner").arg(flag.clone());
        Command::new("a-b-c").arg(flag).subcommand(Command::new("outer").subcommand(inner))
    }

    #[test]
    fn bash_finds_the_commands_of_a_program_with_hyphens() {
        let script = found("a-b-c", &script(Bash, program()));
        let set = "cmd=\"a__b__c__subcmd__outer__subcmd__in__subcmd__ner\"";
        assert!(script.contains(set), "{script}");
        assert!(script.contains("\n        a__b__c__subcmd__outer__subcmd__in__subcmd__ner)\n"), "{script}");
    }

    #[test]
    fn zsh_takes_the_whole_name_of_a_value() {
        let script = script(Zsh, escaped(program()));
        assert_eq!(script.matches(":HOST\\:PORT:").count(), 2, "{script}");
        assert!(!script.contains("HOST:PORT"), "{script}");
    }
}
