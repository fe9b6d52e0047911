//! Commands and flags of a program, from what it prints with `--help`.
use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::command::{output, program};

/// The help of one command.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Help {
    /// Paragraphs, each on a line.
    pub(crate) about: String,
    pub(crate) usage: String,
    pub(crate) commands: Vec<String>,
    /// Flags and arguments by the headings above them.
    groups: Vec<(String, Vec<Flag>)>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Flag {
    pub(crate) name: String,
    pub(crate) text: String,
    pub(crate) default: String,
}

/// Returns the help of the program and of all its commands, each with the words that lead to it.
pub(crate) fn of_program(path: &Path, name: &str) -> Result<Vec<(Vec<String>, Help)>> {
    let mut all = Vec::new();
    let mut left = vec![vec![name.to_owned()]];
    while let Some(words) = left.pop() {
        let help = ask(path, &words[1..])?;
        let below = |command: &String| [&*words, std::slice::from_ref(command)].concat();
        left.extend(help.commands.iter().rev().map(below));
        all.push((words, help));
    }
    Ok(all)
}

fn ask(path: &Path, words: &[String]) -> Result<Help> {
    // In a flag's help is the value of its variable.
    let text = output(program(path).args(words).arg("--help").env_clear())?;
    let help = parse(&text);
    ensure!(
        !help.usage.is_empty() && !help.groups.is_empty(),
        "{words:?} --help has no usage or no flags:\n{text}"
    );
    Ok(help)
}

impl Help {
    /// Names of all flags and arguments.
    pub(crate) fn names(&self) -> BTreeSet<&str> {
        self.groups.iter().flat_map(|(_, flags)| flags).map(|flag| &*flag.name).collect()
    }

    /// True if a command takes the program's own flags, whose names are `known`, so that they need not be listed again.
    pub(crate) fn takes_all(&self, known: &BTreeSet<&str>) -> bool {
        // `--help` and `--state-dir` alone are no reason.
        self.names().intersection(known).count() > 10
    }

    /// Flags and arguments to list by their headings, without `--help` and `--version`.
    pub(crate) fn listed(&self, known: &BTreeSet<&str>) -> Vec<(&str, Vec<&Flag>)> {
        let takes_all = self.takes_all(known);
        let is_left_out = |name: &str| {
            name.ends_with("--help") || name.ends_with("--version") || (takes_all && known.contains(name))
        };
        let is_listed = |flag: &&Flag| !is_left_out(&flag.name);
        let groups =
            self.groups.iter().map(|(heading, flags)| (&**heading, flags.iter().filter(is_listed).collect()));
        groups.filter(|(_, flags): &(_, Vec<_>)| !flags.is_empty()).collect()
    }
}

/// Reads both of clap's layouts: descriptions beside the flags, and below them.
pub(crate) fn parse(text: &str) -> Help {
    let mut help = Help::default();
    let mut heading = String::new();
    for line in text.lines() {
        let content = line.trim();
        let indent = line.len() - line.trim_start().len();
        if let Some(usage) = content.strip_prefix("Usage: ") {
            help.about.truncate(help.about.trim_end().len());
            usage.clone_into(&mut help.usage);
            "Usage".clone_into(&mut heading);
        } else if indent == 0 && content.ends_with(':') {
            content.trim_end_matches(':').clone_into(&mut heading);
        } else if content.is_empty() {
            if heading.is_empty() {
                help.about.push('\n');
            }
        } else if heading.is_empty() {
            help.about = format!("{} {content}", help.about).trim_start().replace("\n ", "\n");
        } else if heading == "Usage" {
            help.usage = format!("{}\n{content}", help.usage);
        } else if heading == "Commands" {
            help.commands
                .extend(content.split("  ").next().filter(|name| *name != "help").map(str::to_owned));
        } else {
            if help.groups.last().is_none_or(|(last, _)| *last != heading) {
                help.groups.push((heading.clone(), Vec::new()));
            }
            let Some((_, flags)) = help.groups.last_mut() else { continue };
            if indent <= 6 && content.starts_with(['-', '<', '[']) {
                let (name, text) = content.split_once("  ").unwrap_or((content, ""));
                flags.push(Flag { name: name.to_owned(), text: text.trim().to_owned(), ..Flag::default() });
            } else if let Some(flag) = flags.last_mut() {
                flag.text = format!("{} {content}", flag.text).trim().to_owned();
            }
        }
    }
    for flag in help.groups.iter_mut().flat_map(|(_, flags)| flags) {
        if let Some((before, default)) = flag.text.split_once("[default: ")
            && let Some((default, after)) = default.split_once(']')
        {
            (flag.default, flag.text) = (default.to_owned(), format!("{}{after}", before.trim_end()));
        }
    }
    help
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &str = "\
Lets them
through

To
all

Usage: tunnel-server [OPTIONS]
       tunnel-server <COMMAND>

Commands:
  status  Show it
  help    Print this message

Options:
      --inventory <FILE>
          Nodes.
          
          A list | of them.

      --port <PORT>
          The port
          
          [default: 1]
          [possible values: 1, 2]

  -h, --help
          Print help

Redirect:
      --on [<on|off>]
          On [default: anywhere; see below]. Else off
";
    const SHORT: &str = "\
Show it

Usage: tunnel-server status [OPTIONS] <NODE>

Arguments:
  <NODE>  The node

Options:
  -o, --output <FORMAT>  Form [default: text]
  -h, --help             Print help
";

    #[test]
    fn both_layouts_are_read() {
        let flag = |name: &str, text: &str, default: &str| Flag {
            name: name.into(),
            text: text.into(),
            default: default.into(),
        };
        let long = parse(LONG);
        assert_eq!(
            (&*long.about, &*long.usage),
            ("Lets them through\nTo all", "tunnel-server [OPTIONS]\ntunnel-server <COMMAND>")
        );
        assert_eq!(long.commands, ["status"]);
        let options = vec![
            flag("--inventory <FILE>", "Nodes. A list | of them.", ""),
            flag("--port <PORT>", "The port [possible values: 1, 2]", "1"),
            flag("-h, --help", "Print help", ""),
        ];
        let redirect = vec![flag("--on [<on|off>]", "On. Else off", "anywhere; see below")];
        assert_eq!(long.groups, [("Options".to_owned(), options), ("Redirect".to_owned(), redirect)]);
        let short = parse(SHORT);
        assert_eq!(short.groups[0].1, [flag("<NODE>", "The node", "")]);
        assert_eq!(short.groups[1].1[0], flag("-o, --output <FORMAT>", "Form", "text"));
        let listed = long.listed(&BTreeSet::new());
        assert_eq!((listed[0].0, listed[0].1.len()), ("Options", 2), "without --help");
    }
}
