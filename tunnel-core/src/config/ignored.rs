//! Flags of other programs that mean nothing here, so that their manifests start ours: each is named in a warning.

use std::marker::PhantomData;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// A flag that is accepted and has no effect.
#[derive(Clone, Copy, Debug)]
pub struct ForeignFlag {
    name: &'static str,
    is_switch: bool,
    why: &'static str,
}

impl ForeignFlag {
    /// One with a value. `name` as it is written, with its dashes: a single letter has one or two. `why` it has no effect.
    pub const fn value(name: &'static str, why: &'static str) -> Self {
        Self { name, is_switch: false, why }
    }

    /// One whose value may be left out, as Go's boolean flags.
    pub const fn switch(name: &'static str, why: &'static str) -> Self {
        Self { name, is_switch: true, why }
    }

    fn id(&self) -> &'static str {
        self.name.trim_start_matches('-')
    }

    fn argument(&self) -> Arg {
        // Given twice, it still means nothing.
        let argument =
            Arg::new(self.id()).long(self.id()).hide(true).action(ArgAction::Append).help(self.why);
        let mut letters = self.id().chars();
        let argument = match (letters.next(), letters.next()) {
            (Some(letter), None) => argument.short(letter),
            _ => argument,
        };
        if self.is_switch {
            argument.num_args(0..=1).require_equals(true).default_missing_value("true")
        } else {
            argument
        }
    }
}

/// Such flags of one program.
pub trait ForeignFlags {
    const FLAGS: &'static [ForeignFlag];
}

/// Those of them that are on the command line. To be flattened into the program's arguments.
#[derive(Clone, Debug, Default)]
pub struct Ignored<F> {
    given: Vec<(&'static str, &'static str)>,
    of: PhantomData<F>,
}

impl<F> Ignored<F> {
    /// Each as it is written, and why it means nothing.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.given.iter().copied()
    }
}

impl<F: ForeignFlags> FromArgMatches for Ignored<F> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given =
            |flag: &&ForeignFlag| matches.value_source(flag.id()) == Some(ValueSource::CommandLine);
        let given = F::FLAGS.iter().filter(is_given).map(|flag| (flag.name, flag.why)).collect();
        Ok(Self { given, of: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<F: ForeignFlags> Args for Ignored<F> {
    fn augment_args(command: Command) -> Command {
        command.args(F::FLAGS.iter().map(ForeignFlag::argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Those of klog, which all programs of Kubernetes have; `--v` is understood.
#[derive(Clone, Copy, Debug, Default)]
pub struct Klog;

impl ForeignFlags for Klog {
    const FLAGS: &'static [ForeignFlag] = &[
        ForeignFlag::value("--log-dir", STDERR),
        ForeignFlag::value("--log-file", STDERR),
        ForeignFlag::value("--log-file-max-size", STDERR),
        ForeignFlag::switch("--logtostderr", STDERR),
        ForeignFlag::switch("--alsologtostderr", STDERR),
        ForeignFlag::value("--stderrthreshold", STDERR),
        ForeignFlag::value("--log-flush-frequency", STDERR),
        ForeignFlag::switch("--one-output", STDERR),
        ForeignFlag::value("--vmodule", "levels of single modules are set by PUT /debug/flags/v"),
        ForeignFlag::value("--log-backtrace-at", LINES),
        ForeignFlag::switch("--add-dir-header", LINES),
        ForeignFlag::switch("--skip-headers", LINES),
        ForeignFlag::switch("--skip-log-headers", LINES),
    ];
}

const STDERR: &str = "the log goes to standard error";
const LINES: &str = "the lines of the log have a form of their own (--log-format)";

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Theirs;

    impl ForeignFlags for Theirs {
        const FLAGS: &'static [ForeignFlag] = &[
            ForeignFlag::value("-m", "it has one mode"),
            ForeignFlag::value("--file", "it has no file"),
            ForeignFlag::switch("--fast", "it is always fast"),
        ];
    }

    #[derive(Debug, Parser)]
    struct Program {
        #[arg(long)]
        own: Option<String>,
        #[command(flatten)]
        ignored: Ignored<Theirs>,
        #[command(flatten)]
        klog: Ignored<Klog>,
    }

    fn given(arguments: &[&str]) -> Vec<&'static str> {
        let program = Program::try_parse_from(std::iter::once(&"program").chain(arguments)).unwrap();
        program.ignored.given().chain(program.klog.given()).map(|(flag, _)| flag).collect()
    }

    #[test]
    fn those_that_are_given_are_named() {
        assert!(given(&["--own=1"]).is_empty());
        let own = Program::try_parse_from(["program", "-m=edge", "--own=1"]).unwrap().own;
        assert_eq!(own.as_deref(), Some("1"));
        for mode in [&["-m=edge"][..], &["--m=edge"], &["-m", "edge"], &["--m", "edge"]] {
            assert_eq!(given(mode), ["-m"], "{mode:?}");
        }
        let all = ["--logtostderr=false", "--fast", "--file", "a", "--file=b", "--log-file=c", "--own=1"];
        assert_eq!(given(&all), ["--file", "--fast", "--log-file", "--logtostderr"]);
        for wrong in [&["--file"][..], &["--fast", "a"], &["--slow"]] {
            assert!(Program::try_parse_from(std::iter::once(&"program").chain(wrong)).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn help_does_not_show_them() {
        let help = <Program as clap::CommandFactory>::command().render_help().to_string();
        assert!(
            help.contains("--own") && !help.contains("--file") && !help.contains("--logtostderr"),
            "{help}"
        );
    }
}
