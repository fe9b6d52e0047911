//! The report in Markdown.
use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::content::{COMPARED, Report, Table};
use super::targets;
use crate::line::Peer;
use crate::options::HOST;
use crate::record::{Cell, Record};

/// Meaning of the ratios.
pub(super) const RATIOS: &str = "\
Ratios are Postern's median over the other's: of konnectivity's two modes and HAProxy's two configurations the one that
is better on that line.";

pub(super) fn render(report: &Report<'_>, plots: &[String]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    head(&mut text, report).ok();
    writeln!(
        text,
        "\nMedians of the rounds, and the least and greatest in brackets. ↑: more is better, ↓: less.\n{RATIOS}"
    )
    .ok();
    for table in &report.tables {
        render_table(&mut text, report.record, table).ok();
    }
    render_targets(&mut text, report).ok();
    text.push_str("\n## Plots\n\n");
    for plot in plots {
        writeln!(text, "![{plot}]({}/{plot})", report.name).ok();
    }
    text
}

pub(super) fn head(text: &mut String, report: &Report<'_>) -> std::fmt::Result {
    let machine = report.machine;
    writeln!(text, "# {}\n", report.title)?;
    writeln!(
        text,
        "`{}`, seed {}, {} rounds",
        report.options.command, report.options.seed, report.options.rounds
    )?;
    if report.options.smoke {
        writeln!(text, "\n**A smoke run: each line for a moment, no figure means anything.**")?;
    }
    writeln!(
        text,
        "\n{} ({} CPUs), {:.0} GB, Linux {}, TCP {}; load average {} at the start, {} at the end.\n",
        machine.cpu,
        machine.cpus,
        machine.memory,
        machine.kernel,
        machine.congestion,
        machine.load_at_start,
        machine.load_at_end
    )?;
    if let Some(name) = machine.loss_based.filter(|_| report.name != HOST) {
        writeln!(text, "\"Loss-based\" is TCP {name}.\n")?;
    }
    for (name, version) in &machine.versions {
        writeln!(text, "* {name}: {version}")?;
    }
    Ok(())
}

fn render_table(text: &mut String, record: &Record, table: &Table) -> std::fmt::Result {
    writeln!(text, "\n## {}", table.group.title())?;
    // A table has no ratio to peers that its group does not measure.
    let measured = |peers: &[Peer]| peers.iter().any(|peer| table.group.peers().contains(peer));
    let compared: Vec<_> = COMPARED.into_iter().filter(|(to, _)| measured(to)).collect();
    let mut reasons = Reasons::default();
    for (section, lines) in table.sections() {
        if let Some(section) = section {
            writeln!(text, "\n### {section}")?;
        }
        write!(text, "\n| |")?;
        for peer in &table.peers {
            write!(text, " {} |", peer.title())?;
        }
        for (_, name) in &compared {
            write!(text, " ÷ {name} |")?;
        }
        writeln!(text, "\n|---|{}", "---|".repeat(table.peers.len() + compared.len()))?;
        for line in lines {
            write!(text, "| {} [{}{}] |", line.title, line.unit, line.better.arrow())?;
            for peer in &table.peers {
                let cell = record.cell(&line.id, *peer).cloned().unwrap_or_default();
                write!(text, " {} |", reasons.cell(*peer, &cell))?;
            }
            for (to, _) in &compared {
                let ratio = record.ratio(&line.id, Peer::Postern, to, line.better);
                write!(text, " {} |", ratio.map_or_else(|| "–".to_owned(), |ratio| number(ratio) + "×"))?;
            }
            writeln!(text)?;
        }
    }
    if !reasons.0.is_empty() {
        writeln!(text)?;
    }
    for (at, reason) in reasons.0.iter().enumerate() {
        writeln!(text, "{}. {reason}", at + 1)?;
    }
    Ok(())
}

/// Notes under a table.
#[derive(Default)]
struct Reasons(Vec<String>);

impl Reasons {
    fn mark(&mut self, reason: &str) -> String {
        let at = self.0.iter().position(|known| known == reason).unwrap_or_else(|| {
            self.0.push(reason.to_owned());
            self.0.len() - 1
        });
        format!("– ({})", at + 1)
    }

    fn cell(&mut self, peer: Peer, cell: &Cell) -> String {
        let marks: Vec<String> = reasons(cell)
            .iter()
            .map(|reason| self.mark(&format!("{}: {reason}", peer.title())).replace("– ", ""))
            .collect();
        let marks = marks.join(" ");
        let Some(summary) = cell.summary() else {
            return format!("– {marks}");
        };
        let least = if cell.bounded { "≥ " } else { "" };
        let mut text = format!("{least}{}", number(summary.median));
        if cell.values.len() > 1 {
            text = format!("{text} ({}–{})", number(summary.min), number(summary.max));
        }
        if marks.is_empty() { text } else { format!("{text} {marks}") }
    }
}

/// Reasons for missing values, or limits of their meaning.
pub(super) fn reasons(cell: &Cell) -> Vec<String> {
    let failed = (!cell.failures.is_empty()).then(|| {
        let errors: BTreeSet<&str> = cell.failures.iter().map(String::as_str).collect();
        let errors: Vec<&str> = errors.into_iter().collect();
        let (failed, rounds) = (cell.failures.len(), cell.rounds());
        format!("failed in {failed} of {rounds} rounds: {}", errors.join("; "))
    });
    cell.reasons.iter().cloned().chain(failed).collect()
}

fn render_targets(text: &mut String, report: &Report<'_>) -> std::fmt::Result {
    writeln!(text, "\n## Goals\n\n| | measured | |\n|---|---|---|")?;
    for target in targets::check(report.record, report.name, report.options) {
        let measured = target.measured.map_or_else(|| "–".to_owned(), number);
        let verdict = match target.met {
            Some(true) => "met",
            Some(false) => "**not met**",
            None => "not measured in this run",
        };
        let line = target.line.map_or_else(String::new, |line| format!(" ({line})"));
        writeln!(text, "| {} | {measured}{line} | {verdict} |", target.asks)?;
    }
    Ok(())
}

/// Five significant digits, as the CSV has.
pub(super) fn five_digits(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

/// Three significant digits, and commas between thousands.
pub(super) fn number(value: f64) -> String {
    // Readers may round the figures of the CSV.
    let value = if value.abs() < 1e5 { five_digits(value) } else { value };
    let size = value.abs();
    let decimals = match size {
        _ if size >= 99.5 || size == 0.0 => 0,
        _ if size >= 9.95 => 1,
        _ if size >= 0.995 => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    let (whole, rest) =
        text.split_once('.').map_or((text.as_str(), None), |(whole, rest)| (whole, Some(rest)));
    let digits: Vec<char> = whole.chars().collect();
    let mut grouped = String::new();
    for (at, digit) in digits.iter().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) && digits[at - 1] != '-' {
            grouped.push(',');
        }
        grouped.push(*digit);
    }
    rest.map_or_else(|| grouped.clone(), |rest| format!("{grouped}.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::Group;

    #[test]
    fn numbers_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.0123, "0.012"),
            (0.5, "0.500"),
            (1.234, "1.23"),
            (2.034_97, "2.04"),
            (12.34, "12.3"),
            (123.4, "123"),
            (1234.5, "1,234"),
            (1_234_567.0, "1,234,567"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn missing_cells_show_their_reason() {
        let mut record = Record::default();
        record.value("held", Peer::Postern, 30.0);
        record.value("held", Peer::Postern, 40.0);
        record.value("held", Peer::Haproxy, 70.0);
        record.missing("held", Peer::Rathole, "not installed");
        let line = crate::catalogue::lines(Group::Held).into_iter().find(|line| line.id == "held");
        let table = Table {
            group: Group::Held,
            lines: line.into_iter().collect(),
            peers: vec![Peer::Haproxy, Peer::Rathole, Peer::Postern],
        };
        let mut text = String::new();
        render_table(&mut text, &record, &table).unwrap();
        assert!(text.contains("| 70.0 | – (1) | 35.0 (30.0–40.0) | – | – | – | 0.500× | – | – |"), "{text}");
        assert!(text.contains("\n1. rathole: not installed\n"), "{text}");
    }

    #[test]
    fn failed_rounds_show() {
        let mut record = Record::default();
        record.value("held", Peer::Postern, 30.0);
        record.failed("held", Peer::Postern, "gone");
        let cell = record.cell("held", Peer::Postern).unwrap();
        let mut reasons = Reasons::default();
        assert_eq!(reasons.cell(Peer::Postern, cell), "30.0 (1)");
        assert_eq!(reasons.0, ["Postern: failed in 1 of 2 rounds: gone"]);
    }
}
