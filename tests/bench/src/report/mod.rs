//! Writes the report of a run as JSON, CSV, Markdown and SVG plots, and checks that it is complete.
mod content;
mod csv;
mod markdown;
mod page;
mod plot;
mod targets;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::catalogue;
use crate::line::{Group, Peer};
use crate::machine::Machine;
use crate::options::{HOST, Options};
use crate::record::Record;
use crate::wan::Place;
use content::{COMPARED, Report, Table};

/// Folder of the page and the CSV that `cargo xtask bench --record` puts into docs/benchmarks.
const RECORDED: &str = "recorded";

/// Writes and prints the report, which has a part for wide-area paths and one for all else. Fails when a line has neither
/// a value nor a reason, but never because of a value.
pub(crate) fn write(options: &Options, mut machine: Machine, record: &Record) -> Result<()> {
    machine.finish()?;
    // Remove an earlier report.
    if options.out.exists() {
        fs::remove_dir_all(&options.out).with_context(|| format!("emptying {}", options.out.display()))?;
    }
    let mut reports = Vec::new();
    let parts = [(HOST, "Measured on one machine"), (Group::Wan.name(), "Measured over wide-area paths")];
    for (name, title) in parts {
        let groups = Group::ALL.into_iter().filter(|group| group.is_on_host() == (name == HOST));
        let tables: Vec<Table> = groups
            .filter(|group| options.wants_group(*group))
            .map(|group| Table {
                group,
                lines: match group {
                    Group::Wan => options.places().flat_map(Place::lines).collect(),
                    _ => catalogue::lines(group),
                },
                peers: group.peers().iter().copied().filter(|peer| options.wants_peer(*peer)).collect(),
            })
            .filter(|table| !table.peers.is_empty())
            .collect();
        if !tables.is_empty() {
            let report = Report { name, title, options, machine: &machine, record, tables };
            save_all(&report)?;
            reports.push(report);
        }
    }
    for report in &reports {
        ensure_complete(report)?;
    }
    Ok(())
}

fn save_all(report: &Report<'_>) -> Result<()> {
    let (out, name) = (&report.options.out, report.name);
    let folder = out.join(name);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let plots = plot::draw(report, &folder)?;
    let markdown = markdown::render(report, &plots);
    println!("\n{markdown}");
    save(&out.join(format!("{name}.md")), &markdown)?;
    save(&out.join(format!("{name}.json")), &serde_json::to_string_pretty(&as_json(report))?)?;
    let recorded = out.join(RECORDED);
    fs::create_dir_all(&recorded).with_context(|| format!("creating {}", recorded.display()))?;
    save(&recorded.join(format!("{name}.md")), &page::render(report, &plots))?;
    save(&recorded.join(format!("{name}.csv")), &csv::render(report))?;
    println!(
        "written to {0}: {name}.md, {name}.json, {1} plots in {name}, and in {RECORDED} the short page and the CSV for the documents",
        out.display(),
        plots.len()
    );
    Ok(())
}

fn ensure_complete(report: &Report<'_>) -> Result<()> {
    let gaps: Vec<String> =
        report.tables.iter().flat_map(|table| report.record.gaps(&table.lines, &table.peers)).collect();
    ensure!(gaps.is_empty(), "neither a value nor a reason: {}", gaps.join(", "));
    if report.options.all_peers {
        ensure_all_peers(report)?;
    }
    ensure_measured(report)
}

/// Fails unless every peer has some value in each table.
fn ensure_all_peers(report: &Report<'_>) -> Result<()> {
    let mut without = Vec::new();
    for table in &report.tables {
        for peer in &table.peers {
            let mut cells = table.lines.iter().filter_map(|line| report.record.cell(&line.id, *peer));
            // These groups measure programs, of which a plain connection has none.
            let has_none = *peer == Peer::Direct && matches!(table.group, Group::Held | Group::Counts);
            if !has_none && cells.all(|cell| cell.values.is_empty()) {
                without.push(format!("{peer} in {}", table.group.name()));
            }
        }
    }
    ensure!(without.is_empty(), "no value of {}: see the reasons in the tables", without.join(", "));
    Ok(())
}

/// Fails if a measurement of Postern failed in any round. A reason excuses a missing peer, but not that.
fn ensure_measured(report: &Report<'_>) -> Result<()> {
    let lines = report.tables.iter().filter(|table| table.peers.contains(&Peer::Postern));
    let cells = lines.flat_map(|table| &table.lines).filter_map(|line| {
        let cell = report.record.cell(&line.id, Peer::Postern)?;
        Some(format!("{}: {}", line.id, cell.failures.first()?))
    });
    let failed: Vec<String> = cells.collect();
    ensure!(failed.is_empty(), "Postern could not be measured:\n{}", failed.join("\n"));
    Ok(())
}

fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

fn as_json(report: &Report<'_>) -> Value {
    let lines = report.tables.iter().flat_map(|table| {
        table.lines.iter().map(|line| {
            let cells = table.peers.iter().filter_map(|peer| {
                let cell = report.record.cell(&line.id, *peer)?;
                let entry = json!({ "summary": cell.summary(), "cell": cell });
                Some((peer.name().to_owned(), entry))
            });
            let cells: serde_json::Map<String, Value> = cells.collect();
            let ratios = COMPARED.map(|(to, name)| {
                let ratio = report.record.ratio(&line.id, Peer::Postern, to, line.better);
                (name.to_owned(), json!(ratio))
            });
            let ratios: serde_json::Map<String, Value> = ratios.into_iter().collect();
            json!({ "line": line, "peers": cells, "postern_over": ratios })
        })
    });
    json!({
        "command": report.options.command,
        "commit": report.options.commit,
        "seed": report.options.seed,
        "rounds": report.options.rounds,
        "smoke": report.options.smoke,
        "machine": report.machine,
        "lines": lines.collect::<Vec<_>>(),
        "targets": targets::check(report.record, report.name, report.options),
    })
}
