//! Command line, `--config` file, and the flags that both yield.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Parser};
use secrecy::SecretString;
use serde::Deserialize;

use crate::yaml;

/// `--config`, which [`parse`] reads. To be flattened into the flags of a command.
#[derive(Args, Clone, Debug, Default)]
pub struct ConfigFile {
    /// YAML file with flags, by their names without dashes.
    ///
    /// A value may be a list. A flag of the command line wins over the file, and so does a variable of the environment.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Parses a command line, and the file that `--config` names in it. Also returns the command and the flags in effect,
/// as words that would yield them, with defaults included and secrets masked. `-h` shows only the flags and commands
/// named in `short_help`, which is blank-separated.
///
/// # Errors
/// Returns clap's error, which may be the output of `--help` or `--version`.
pub fn parse<T: Parser>(
    words: impl IntoIterator<Item = impl Into<OsString>>,
    short_help: &str,
) -> Result<(T, Vec<String>), clap::Error> {
    let mut words: Vec<OsString> = words.into_iter().map(Into::into).collect();
    let mut command = T::command();
    if words.iter().any(|word| word == "-h") {
        command = shortened(command, short_help);
    }
    let mut matches = command.try_get_matches_from_mut(&words)?;
    let (names, innermost, given) = innermost(&command, &matches);
    if let Ok(Some(file)) = given.try_get_one::<PathBuf>("config") {
        let (file, at) = (file.clone(), 1 + names.len());
        let refuse = |reason: String| {
            clap::Error::raw(ErrorKind::InvalidValue, format!("--config={}: {reason}\n", file.display()))
        };
        let flags = read_file(&file, innermost, given).map_err(refuse)?;
        words.splice(at..at, flags.into_iter().map(OsString::from));
        // The command line alone was valid.
        matches = command.try_get_matches_from_mut(&words).map_err(|error| refuse(reason_of(&error)))?;
    }
    let flags = flags_in_effect(&command, &matches);
    let parsed = T::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    Ok((parsed, flags))
}

/// Shortens the help of `-h`. clap can hide a flag from the short help alone, but not a command.
fn shortened(command: Command, shown: &str) -> Command {
    let shown: Vec<&str> = shown.split_whitespace().collect();
    let flags: Vec<_> = command.get_arguments().map(|flag| flag.get_id().clone()).collect();
    // Some commands repeat the program's flags.
    let shorten = |flag: Arg| {
        let is_shown = !flags.contains(flag.get_id()) || shown.contains(&flag.get_long().unwrap_or_default());
        let hide = flag.is_hide_set() || !is_shown;
        // A heading would take two lines.
        flag.hide(hide).help_heading(Resettable::Reset)
    };
    let command = command.disable_help_subcommand(true);
    command.mut_args(shorten).mut_subcommands(|command| {
        let hide = !shown.contains(&command.get_name());
        command.mut_args(shorten).hide(hide)
    })
}

/// Returns the innermost command: the names that lead to it, the command, and its matches.
fn innermost<'a>(
    mut command: &'a Command,
    mut matches: &'a ArgMatches,
) -> (Vec<String>, &'a Command, &'a ArgMatches) {
    let mut names = Vec::new();
    while let Some((name, inner)) = matches.subcommand() {
        let Some(found) = command.find_subcommand(name) else { break };
        (command, matches) = (found, inner);
        names.push(name.to_owned());
    }
    (names, command, matches)
}

/// A value in the file.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "neither text, a whole number, true or false, nor a list of these; put it into quotes"
)]
enum Value {
    Switch(bool),
    Number(i64),
    Text(String),
    List(Vec<Value>),
}

impl Value {
    fn texts(self) -> Vec<String> {
        match self {
            Self::Switch(on) => vec![on.to_string()],
            Self::Number(number) => vec![number.to_string()],
            Self::Text(text) => vec![text],
            Self::List(values) => values.into_iter().flat_map(Self::texts).collect(),
        }
    }
}

/// Reads the flags of the file that neither the command line nor the environment gives.
fn read_file(path: &Path, command: &Command, given: &ArgMatches) -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    // A file without entries is not a map.
    let values: Option<BTreeMap<String, Value>> = yaml::read(&text)?;
    let mut flags = Vec::new();
    for (key, value) in values.unwrap_or_default() {
        let mut known =
            command.get_arguments().filter(|arg| is_setting(arg) && arg.get_long() != Some("config"));
        let Some(arg) = known.find(|arg| arg.get_long() == Some(&key)) else {
            let line = text.lines().position(|line| line.starts_with(&key));
            let line = line.map(|line| format!("line {}: ", line + 1)).unwrap_or_default();
            return Err(format!("{line}{key:?} is no flag of {}", command.get_name()));
        };
        let source = given.value_source(arg.get_id().as_str());
        if matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
            continue;
        }
        let values = value.texts();
        match arg.get_action() {
            ArgAction::Append => flags.extend(values.iter().map(|value| format!("--{key}={value}"))),
            _ => flags.push(format!("--{key}={}", values.join(","))),
        }
    }
    Ok(flags)
}

/// Returns the first line of clap's error, without the prefix `error: `.
pub(crate) fn reason_of(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

/// True for a flag with a value.
fn is_setting(arg: &Arg) -> bool {
    arg.get_long().is_some() && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

fn flags_in_effect(command: &Command, matches: &ArgMatches) -> Vec<String> {
    let (mut flags, command, matches) = innermost(command, matches);
    for arg in command.get_arguments().filter(|arg| is_setting(arg)) {
        let (id, name) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
        // Secrets are recognized by their type, so that none can be forgotten.
        if matches!(matches.try_get_one::<SecretString>(id), Ok(Some(_))) {
            flags.push(format!("--{name}=***"));
            continue;
        }
        let values = matches.get_raw(id).into_iter().flatten();
        flags.extend(values.map(|value| format!("--{name}={}", value.to_string_lossy())));
    }
    flags
}
