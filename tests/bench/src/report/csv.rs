//! The figures of every line as CSV.
use std::fmt::Write as _;

use super::content::{COMPARED, Report};
use super::markdown;
use crate::line::{Better, Line, Peer};
use crate::record::{Cell, Record};

const HEAD: &str = "line,path,what,unit,better,peer,median,min,max,bound,postern_over,note\n";

pub(super) fn render(report: &Report<'_>) -> String {
    let mut text = HEAD.to_owned();
    for table in &report.tables {
        for line in &table.lines {
            for peer in &table.peers {
                let Some(cell) = report.record.cell(&line.id, *peer) else { continue };
                // Writing to a String cannot fail.
                row(&mut text, report.record, line, *peer, cell).ok();
            }
        }
    }
    text
}

fn row(text: &mut String, record: &Record, line: &Line, peer: Peer, cell: &Cell) -> std::fmt::Result {
    let better = match line.better {
        Better::Higher => "higher",
        Better::Lower => "lower",
        Better::Neither => "",
    };
    let (path, what) = (quoted(line.section.unwrap_or_default()), quoted(&line.title));
    write!(text, "{},{path},{what},{},{better},{peer},", line.id, line.unit)?;
    match cell.summary() {
        Some(summary) => {
            let figures = [summary.median, summary.min, summary.max].map(figure);
            write!(text, "{},{},", figures.join(","), if cell.bounded { "at least" } else { "" })?;
        }
        None => text.push_str(",,,,"),
    }
    let ratio = ratio_to(record, line, peer).map_or_else(String::new, figure);
    writeln!(text, "{ratio},{}", quoted(&markdown::reasons(cell).join("; ")))
}

/// Postern's median over that of this peer, where it is the better of konnectivity's modes, or of HAProxy's
/// configurations.
fn ratio_to(record: &Record, line: &Line, peer: Peer) -> Option<f64> {
    let (to, _) = COMPARED.into_iter().find(|(to, _)| to.contains(&peer))?;
    let (best, _) = record.best(&line.id, to, line.better)?;
    (best == peer).then(|| record.ratio(&line.id, Peer::Postern, to, line.better))?
}

fn figure(value: f64) -> String {
    markdown::five_digits(value).to_string()
}

fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::Group;

    #[test]
    fn a_row_has_the_figures_the_ratio_to_the_better_and_the_reasons() {
        let mut record = Record::default();
        record.value("held", Peer::Postern, 30.0);
        record.value("held", Peer::Postern, 40.0);
        record.value("held", Peer::KonnectivityGrpc, 70.0);
        record.at_least("held", Peer::KonnectivityHttp, 123_456.7, "slow, \"and\" more".to_owned());
        record.failed("held", Peer::Rathole, "gone");
        let line = Line::new(Group::Held, "held", "memory, all", "MB").in_section("LTE");
        let row_of = |peer| {
            let mut text = String::new();
            row(&mut text, &record, &line, peer, record.cell("held", peer).unwrap()).unwrap();
            text
        };
        assert_eq!(row_of(Peer::Postern), "held,LTE,\"memory, all\",MB,lower,postern,35,30,40,,,\n");
        let grpc = row_of(Peer::KonnectivityGrpc);
        assert!(grpc.ends_with(",konnectivity-grpc,70,70,70,,0.5,\n"), "{grpc}");
        let http = row_of(Peer::KonnectivityHttp);
        assert!(http.ends_with(",123460,123460,123460,at least,,\"slow, \"\"and\"\" more\"\n"), "{http}");
        let rathole = row_of(Peer::Rathole);
        assert!(rathole.ends_with(",rathole,,,,,,failed in 1 of 1 rounds: gone\n"), "{rathole}");
    }
}
