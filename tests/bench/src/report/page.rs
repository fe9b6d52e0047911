//! The page of a recorded run: its main ratios. The figures of every line are in the CSV file beside it.
use std::fmt::Write as _;

use super::content::{COMPARED, Report, Table};
use super::markdown::{self, number};
use super::targets::{self, TUNNELS};
use crate::line::{Group, Line, Peer};
use crate::record::Record;

/// Lines by which peers are compared on one machine, with their titles here.
const COMPARISON: [(&str, &str); 13] = [
    ("connections-1", "connect, echo, close, one at once"),
    ("connections-16", "the same, 16 at once"),
    ("connections-cpu", "CPU time for 1,000 of them"),
    ("round-trip-64-1-p50", "round trip, one connection, p50"),
    ("bulk-down-1", "download, one stream"),
    ("bulk-up-1", "upload, one stream"),
    ("bulk-down-cpu", "CPU time for 1 GB down"),
    ("held-idle", "memory of both ends, idle"),
    ("held", "the same, 2,000 connections"),
    ("beside-stalled-trip", "round trip p99 beside a client that does not read"),
    ("beside-hole-trip", "round trip p99 beside a dial without an answer"),
    ("beside-bulk-4-trip", "round trip p99 beside four downloads"),
    ("beside-bulk-4-visit", "connect, echo, close, p99 beside four downloads"),
];
/// Lines with a value of each peer, or of Postern alone.
const VALUES: [&str; 15] = [
    "connect-1",
    "connect-10000",
    "scale-agents-memory-10000",
    "scale-agents-cpu-10000",
    "scale-agents-restart-10000",
    "scale-start",
    "scale-routes-update",
    "scale-lost-back",
    "scale-routes-memory",
    "scale-routes-maps",
    "scale-held-memory",
    "pods-route",
    "pods-connect",
    "pods-forward-none",
    "pods-forward-100000",
];
/// Measures over every wide-area path, with their titles here.
const FAR: [(&str, &str); 5] = [
    ("down-1", "download"),
    ("up-1", "upload"),
    ("down-8", "8 downloads"),
    ("key-down-1-p50", "keystroke beside a download, p50"),
    ("key-down-4-p99", "beside four, p99"),
];

pub(super) fn render(report: &Report<'_>, plots: &[String]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    write_page(&mut text, report).ok();
    text.push_str("\n## Plots\n\n");
    for plot in plots {
        writeln!(text, "![{plot}]({}/{plot})", report.name).ok();
    }
    text
}

fn write_page(text: &mut String, report: &Report<'_>) -> std::fmt::Result {
    markdown::head(text, report)?;
    writeln!(
        text,
        "\nFigures are medians of the rounds. ↑: more is better, ↓: less; ≥: the wait was given up."
    )?;
    writeln!(
        text,
        "Every line, with its least and greatest value and the reason where there is none: [{0}.csv]({0}.csv).",
        report.name
    )?;
    writeln!(text, "\n{}", markdown::RATIOS)?;
    comparison(text, report)?;
    for table in &report.tables {
        match table.group {
            Group::Connect | Group::Scale | Group::Pods => {
                let lines = table.lines.iter().filter(|line| VALUES.contains(&line.id.as_str()));
                values(text, table.group.title(), report.record, table, &lines.collect::<Vec<_>>())?;
            }
            Group::Wan => far(text, report.record, table)?,
            _ => {}
        }
    }
    goals(text, report)
}

/// One table of the groups in which all peers that relay are measured.
fn comparison(text: &mut String, report: &Report<'_>) -> std::fmt::Result {
    let tables: Vec<&Table> =
        report.tables.iter().filter(|table| Group::RELAYED.contains(&table.group)).collect();
    let measured = |peer: &Peer| tables.iter().any(|table| table.peers.contains(peer));
    let compared: Vec<_> = COMPARED.into_iter().filter(|(to, _)| to.iter().any(measured)).collect();
    let lines = || tables.iter().flat_map(|table| &table.lines);
    let rows: Vec<(&Line, &str)> = COMPARISON
        .iter()
        .filter_map(|(id, title)| Some((lines().find(|line| line.id == *id)?, *title)))
        .collect();
    if rows.is_empty() {
        return Ok(());
    }
    write!(text, "\n## Beside the others\n\n| | Postern |")?;
    for (_, name) in &compared {
        write!(text, " ÷ {name} |")?;
    }
    writeln!(text, "\n|---|{}", "---|".repeat(compared.len() + 1))?;
    for (line, title) in rows {
        write!(text, "| {title} [{}{}] |", line.unit, line.better.arrow())?;
        write!(text, " {} |", value(report.record, line, Peer::Postern))?;
        for (to, _) in &compared {
            write!(text, " {} |", ratio(report.record, line, to))?;
        }
        writeln!(text)?;
    }
    Ok(())
}

/// Medians of each peer, and limits of the meaning of Postern's.
fn values(
    text: &mut String,
    title: &str,
    record: &Record,
    table: &Table,
    lines: &[&Line],
) -> std::fmt::Result {
    if lines.is_empty() {
        return Ok(());
    }
    write!(text, "\n## {title}\n\n| |")?;
    for peer in &table.peers {
        write!(text, " {} |", peer.title())?;
    }
    writeln!(text, "\n|---|{}", "---|".repeat(table.peers.len()))?;
    for line in lines {
        write!(text, "| {} [{}{}] |", line.title, line.unit, line.better.arrow())?;
        for peer in &table.peers {
            write!(text, " {} |", value(record, line, *peer))?;
        }
        writeln!(text)?;
    }
    for line in lines {
        let reasons = record.cell(&line.id, Peer::Postern).map(markdown::reasons).unwrap_or_default();
        if !reasons.is_empty() {
            writeln!(text, "\n{}: {}.", line.title, reasons.join("; "))?;
        }
    }
    Ok(())
}

/// Wide-area paths: a table of ratios to the best tunnel, and the times of recovery.
fn far(text: &mut String, record: &Record, table: &Table) -> std::fmt::Result {
    let sections = table.sections();
    let measured = |lines: &[&Line]| FAR.iter().all(|(measure, _)| line_of(lines, measure).is_some());
    let rows: Vec<_> = sections.iter().filter(|(_, lines)| measured(lines)).collect();
    if let Some((_, first)) = rows.first() {
        write!(text, "\n## Over the best other tunnel\n\n| |")?;
        for (measure, title) in FAR {
            let arrow = line_of(first, measure).map_or("", |line| line.better.arrow());
            write!(text, " {title}{arrow} |")?;
        }
        writeln!(text, "\n|---|{}", "---|".repeat(FAR.len()))?;
    }
    for (section, lines) in rows {
        write!(text, "| {} |", section.unwrap_or_default())?;
        for (measure, _) in FAR {
            let ratio =
                line_of(lines, measure).map_or_else(String::new, |line| ratio(record, line, &TUNNELS));
            write!(text, " {ratio} |")?;
        }
        writeln!(text)?;
    }
    for (section, lines) in sections.iter().filter(|(_, lines)| lines.iter().all(|line| line.unit == "s")) {
        values(text, section.unwrap_or_default(), record, table, lines)?;
    }
    Ok(())
}

fn line_of<'a>(lines: &[&'a Line], measure: &str) -> Option<&'a Line> {
    lines.iter().copied().find(|line| line.id.ends_with(&format!("-{measure}")))
}

fn value(record: &Record, line: &Line, peer: Peer) -> String {
    let Some((cell, summary)) = record.cell(&line.id, peer).and_then(|cell| Some((cell, cell.summary()?)))
    else {
        return "–".to_owned();
    };
    format!("{}{}", if cell.bounded { "≥ " } else { "" }, number(summary.median))
}

fn ratio(record: &Record, line: &Line, to: &[Peer]) -> String {
    let ratio = record.ratio(&line.id, Peer::Postern, to, line.better);
    ratio.map_or_else(|| "–".to_owned(), |ratio| number(ratio) + "×")
}

/// The number of goals that were met, and the goals that were missed.
fn goals(text: &mut String, report: &Report<'_>) -> std::fmt::Result {
    let targets = targets::check(report.record, report.name, report.options);
    let met = targets.iter().filter(|target| target.met == Some(true)).count();
    writeln!(
        text,
        "\n## Goals\n\n{met} of {} are met. These were missed:\n\n| goal | measured |\n|---|---|",
        targets.len()
    )?;
    for target in targets.iter().filter(|target| target.met == Some(false)) {
        let measured = target.measured.map_or_else(String::new, number);
        let line = target.line.as_ref().map_or_else(String::new, |line| format!(" ({line})"));
        writeln!(text, "| {} | {measured}{line} |", target.asks)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::catalogue;
    use crate::wan::MEASURES;

    #[test]
    fn lines_of_the_page_exist() {
        let known: Vec<String> =
            Group::ALL.into_iter().flat_map(catalogue::lines).map(|line| line.id).collect();
        for id in COMPARISON.iter().map(|(id, _)| *id).chain(VALUES) {
            assert!(known.iter().any(|line| line == id), "{id}");
        }
        assert!(FAR.iter().all(|(measure, _)| MEASURES.iter().any(|(id, ..)| id == measure)));
    }

    #[test]
    fn recorded_pages_have_the_figures_of_their_csv() {
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/benchmarks");
        for part in ["host", "wan"] {
            let read = |kind| std::fs::read_to_string(docs.join(format!("{part}.{kind}"))).unwrap();
            let recorded: BTreeSet<String> =
                read("csv").split(',').filter_map(|field| field.parse().ok().map(number)).collect();
            let page = read("md");
            let (tables, _) = page.split_once("\n## Goals\n").unwrap();
            let cells = tables
                .lines()
                .filter_map(|line| line.strip_prefix("| "))
                .flat_map(|row| row.split(" | ").skip(1));
            let figures = cells.map(|cell| cell.trim_matches(['≥', '×', '|', ' ']));
            let numeric = |cell: &&str| cell.ends_with(|last: char| last.is_ascii_digit());
            let figures: Vec<&str> = figures.filter(numeric).collect();
            assert!(figures.len() > 80, "{part}.md has {} figures", figures.len());
            for figure in figures {
                assert!(recorded.contains(figure), "{part}.csv has no {figure}");
            }
        }
    }

    #[test]
    fn paths_have_their_ratios() {
        let mut record = Record::default();
        for (peer, value) in
            [(Peer::Postern, 6.0), (Peer::Direct, 8.0), (Peer::Rathole, 3.0), (Peer::Haproxy, 4.0)]
        {
            record.value("wan-lte-up-1", peer, value);
            record.value("wan-lte-key-down-4-p99", peer, value);
        }
        record.at_least("wan-outage-5-usable", Peer::Postern, 60.0, "slow".to_owned());
        let table = Table {
            group: Group::Wan,
            lines: catalogue::lines(Group::Wan),
            peers: vec![Peer::Direct, Peer::Postern],
        };
        let mut text = String::new();
        far(&mut text, &record, &table).unwrap();
        let row = "| LTE: 50 ms, 50 Mbit/s to the edge, 20 from it |";
        assert!(text.contains(&format!("{row} – | 1.50× | – | – | 2.00× |\n")), "{text}");
        assert!(text.contains("| the line was out for 5 s [s ↓] | – | ≥ 60.0 |\n"), "{text}");
        assert!(text.ends_with("\nthe line was out for 5 s: slow.\n"), "{text}");
    }
}
