//! The command line.
use crate::scenario::Scenario;

/// Runs scenarios, each in a process of its own (root).
#[derive(clap::Parser, Debug, Default)]
#[command(name = "scenarios")]
pub(crate) struct Args {
    /// Only scenarios whose name contains one of these.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Names are whole names.
    #[arg(long)]
    exact: bool,
    /// None whose name contains this. May be given more than once.
    #[arg(long, value_name = "NAME")]
    skip: Vec<String>,
    /// Only those marked `quick`.
    #[arg(long)]
    quick: bool,
    /// Names them and runs none.
    #[arg(long)]
    pub(crate) list: bool,
    /// Runs each so many times.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) repeat: usize,
    /// Keeps the logs of those that pass as well.
    #[arg(long)]
    pub(crate) keep: bool,
    /// The programs are not those that are built beside this one: the times are not comparable, and not kept.
    #[arg(long)]
    pub(crate) other_programs: bool,
    /// Number that runs at a time, instead of what the machine carries.
    #[arg(long, value_name = "N")]
    pub(crate) test_threads: Option<usize>,
}

impl Args {
    pub(crate) fn selects(&self, scenario: &Scenario) -> bool {
        let name = scenario.name();
        let named = |part: &String| if self.exact { name == part } else { name.contains(part.as_str()) };
        (self.names.is_empty() || self.names.iter().any(named))
            && !self.skip.iter().any(|part| name.contains(part.as_str()))
            && (scenario.quick || !self.quick)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn names_select_and_skips_leave_out() {
        let selected = |line: &str| -> Vec<&'static str> {
            let args = Args::parse_from(["scenarios"].into_iter().chain(line.split_whitespace()));
            let all = crate::plain::SCENARIOS.iter().chain(crate::testbed::SCENARIOS);
            all.filter(|scenario| args.selects(scenario)).map(Scenario::name).collect()
        };
        assert!(selected("").len() > 3);
        assert_eq!(selected("edges_only_dial plain::listed").len(), 2);
        assert_eq!(selected("plain:: --skip listed --skip nothing").len(), selected("plain::").len() - 1);
        assert_eq!(selected("--exact plain::"), [""; 0]);
        assert!(selected("--quick").len() < selected("").len());
    }
}
