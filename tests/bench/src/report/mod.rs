//! The report of a run as JSON, Markdown and SVG plots, and whether it is complete.
mod content;
mod markdown;
mod plot;
mod targets;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::catalogue;
use crate::line::{Group, Peer};
use crate::machine::Machine;
use crate::options::Options;
use crate::record::Record;
use content::{COMPARED, Report, Table};

/// Writes and prints the report. Fails when a line has neither a value nor a reason, but never because of a value.
pub(crate) fn write(options: &Options, mut machine: Machine, record: &Record) -> Result<()> {
    machine.finish()?;
    let groups = Group::ALL.into_iter().filter(|group| options.wants_group(*group));
    let tables: Vec<Table> = groups
        .map(|group| Table {
            group,
            lines: catalogue::lines(group),
            peers: group.peers().iter().copied().filter(|peer| options.wants_peer(*peer)).collect(),
        })
        .filter(|table| !table.peers.is_empty())
        .collect();
    let report = Report { options, machine, record, tables };
    // Remove an earlier report.
    if options.out.exists() {
        fs::remove_dir_all(&options.out).with_context(|| format!("emptying {}", options.out.display()))?;
    }
    fs::create_dir_all(&options.out).with_context(|| format!("creating {}", options.out.display()))?;
    let markdown = markdown::render(&report);
    println!("\n{markdown}");
    save(&options.out.join("bench.md"), &markdown)?;
    save(&options.out.join("bench.json"), &serde_json::to_string_pretty(&as_json(&report))?)?;
    let plots = plot::draw(&report)?;
    println!("\nwritten to {}: bench.md, bench.json, {}", options.out.display(), plots.join(", "));
    let gaps: Vec<String> =
        report.tables.iter().flat_map(|table| record.gaps(&table.lines, &table.peers)).collect();
    ensure!(gaps.is_empty(), "neither a value nor a reason: {}", gaps.join(", "));
    ensure_measured(&report)
}

/// A reason excuses a missing peer, but not a failed measurement of Postern.
fn ensure_measured(report: &Report<'_>) -> Result<()> {
    let lines = report.tables.iter().filter(|table| table.peers.contains(&Peer::Postern));
    let cells = lines.flat_map(|table| &table.lines).filter_map(|line| {
        let cell = report.record.cell(&line.id, Peer::Postern)?;
        let failed = cell.reasons.iter().find(|reason| reason.starts_with("failed"))?;
        Some(format!("{}: {failed}", line.id))
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
            let ratios = COMPARED
                .map(|(to, name)| (name.to_owned(), json!(report.record.ratio(&line.id, Peer::Postern, to))));
            let ratios: serde_json::Map<String, Value> = ratios.into_iter().collect();
            json!({ "line": line, "peers": cells, "postern_over": ratios })
        })
    });
    json!({
        "command": report.options.command,
        "seed": report.options.seed,
        "rounds": report.options.rounds,
        "smoke": report.options.smoke,
        "machine": report.machine,
        "lines": lines.collect::<Vec<_>>(),
        "targets": targets::check(report.record),
    })
}
