//! The output of `-h` and `--help`.

use clap::CommandFactory;
use tunnel_runtime::config::parse;

use crate::cli::{Cli, SHORT_HELP};

fn help(words: &[&str]) -> String {
    parse::<Cli>(std::iter::once(&"tunnel-server").chain(words), SHORT_HELP).unwrap_err().to_string()
}

#[test]
fn the_short_help_is_short() {
    let text = help(&["-h"]);
    assert!(text.lines().count() <= 25, "{} lines:\n{text}", text.lines().count());
    for shown in SHORT_HELP.split_whitespace() {
        assert!(text.contains(shown), "{shown} is not in\n{text}");
    }
    for command in ["redirector", "doctor", "bundle"] {
        let text = help(&[command, "-h"]);
        assert!(text.lines().count() <= 25, "{} lines:\n{text}", text.lines().count());
    }
    let long = help(&["--help"]);
    for heading in ["Redirect:", "Agents:", "Kubernetes:", "Listeners that speak HTTP:"] {
        assert!(long.contains(heading), "{heading} is not in\n{long}");
    }
}

#[test]
fn help_describes_every_flag() {
    let command = Cli::command();
    // Each flag has a help text, which names the units of a duration.
    for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.len() > 10, "{}: {help:?}", argument.get_id());
        if argument
            .get_value_names()
            .is_some_and(|names| names.iter().any(|name| name.as_str() == "DURATION"))
        {
            assert!(help.contains("unit"), "{help}");
        }
    }
}
