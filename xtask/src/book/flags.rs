//! Flags and commands of a program, from what it prints with `--help`.
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, ensure};

use super::cells::{cell, code};
use crate::command::{output, program};

/// The help of one command.
#[derive(Debug, Default, PartialEq, Eq)]
struct Help {
    about: String,
    usage: String,
    commands: Vec<String>,
    /// Flags and arguments by the headings above them.
    groups: Vec<(String, Vec<Flag>)>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Flag {
    name: String,
    text: String,
    default: String,
}

/// Lists the flags of the program and all its commands.
pub(super) fn page(path: &Path, name: &str) -> Result<String> {
    let help = ask(path, &[])?;
    let of_program: BTreeSet<&str> =
        help.groups.iter().flat_map(|(_, flags)| flags).map(|flag| &*flag.name).collect();
    let mut text = section(&[name], &help, &BTreeSet::new())?;
    for command in &help.commands {
        commands(path, &[name, command], &of_program, &mut text)?;
    }
    Ok(text)
}

fn commands(path: &Path, words: &[&str], known: &BTreeSet<&str>, text: &mut String) -> Result<()> {
    let help = ask(path, &words[1..])?;
    *text += &section(words, &help, known)?;
    for command in &help.commands {
        commands(path, &[words, &[command]].concat(), known, text)?;
    }
    Ok(())
}

fn ask(path: &Path, words: &[&str]) -> Result<Help> {
    // In a flag's help is the value of its variable.
    let text = output(program(path).args(words).arg("--help").env_clear())?;
    let help = parse(&text);
    ensure!(
        !help.usage.is_empty() && !help.groups.is_empty(),
        "{words:?} --help has no usage or no flags:\n{text}"
    );
    Ok(help)
}

/// A command that takes the program's own flags names those together.
fn section(words: &[&str], help: &Help, known: &BTreeSet<&str>) -> Result<String> {
    let mut text = format!("\n## {}\n\n{}\n\n```\n{}\n```\n", words.join(" "), cell(&help.about), help.usage);
    let again: usize =
        help.groups.iter().flat_map(|(_, flags)| flags).filter(|flag| known.contains(&*flag.name)).count();
    // `--help` and `--state-dir` alone are no reason.
    let takes_all = again > 10;
    if takes_all {
        write!(text, "\nAlso takes the flags of `{}`, as the running program has them.\n", words[0])?;
    }
    for (heading, flags) in &help.groups {
        let flags: Vec<&Flag> = flags
            .iter()
            .filter(|flag| !takes_all || !known.contains(&*flag.name))
            .filter(|flag| !flag.name.ends_with("--help") && !flag.name.ends_with("--version"))
            .collect();
        if flags.is_empty() {
            continue;
        }
        if heading != "Options" && heading != "Arguments" {
            write!(text, "\n### {heading}\n")?;
        }
        text += "\n| flag | default | |\n|---|---|---|\n";
        for flag in flags {
            // A default may be a sentence.
            let is_value = !flag.default.contains(' ') || flag.default.starts_with('"');
            let default = if is_value { code(&flag.default) } else { cell(&flag.default) };
            writeln!(text, "| {} | {default} | {} |", code(&flag.name), cell(&flag.text))?;
        }
    }
    Ok(text)
}

/// Reads both of clap's layouts: descriptions beside the flags, and below them.
fn parse(text: &str) -> Help {
    let mut help = Help::default();
    let mut heading = String::new();
    for line in text.lines() {
        let content = line.trim();
        let indent = line.len() - line.trim_start().len();
        if let Some(usage) = content.strip_prefix("Usage: ") {
            usage.clone_into(&mut help.usage);
            "Usage".clone_into(&mut heading);
        } else if indent == 0 && content.ends_with(':') {
            content.trim_end_matches(':').clone_into(&mut heading);
        } else if content.is_empty() {
        } else if heading.is_empty() {
            help.about = format!("{} {content}", help.about).trim().to_owned();
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
Lets them through

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
            ("Lets them through", "tunnel-server [OPTIONS]\ntunnel-server <COMMAND>")
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
        let text = section(&["tunnel-server"], &long, &BTreeSet::new()).unwrap();
        assert!(text.contains("\n### Redirect\n\n| flag | default | |\n|---|---|---|\n| `--on [<on\\|off>]` | anywhere; see below | On. Else off |\n"), "{text}");
        assert!(!text.contains("--help"), "{text}");
    }
}
