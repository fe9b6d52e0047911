//! The report as SVG plots.
use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{self as text_style, HPos, VPos};

use super::content::Report;
use super::markdown;
use crate::catalogue::NODES;
use crate::line::{Better, Group, Line, Peer};
use crate::load::as_f64;
use crate::record::Record;

const WIDTH: u32 = 1000;
const LABELS: u32 = 330;
const BAR: u32 = 13;
const GAP: u32 = 14;
const TEXT: u32 = 13;

fn color(peer: Peer) -> RGBColor {
    match peer {
        Peer::Direct => RGBColor(150, 150, 150),
        Peer::Haproxy => RGBColor(31, 119, 180),
        Peer::HaproxyTuned => RGBColor(23, 190, 207),
        Peer::Rathole => RGBColor(148, 103, 189),
        Peer::KonnectivityGrpc => RGBColor(188, 189, 34),
        Peer::KonnectivityHttp => RGBColor(255, 127, 14),
        Peer::Tonic => RGBColor(44, 160, 44),
        Peer::Iptables => RGBColor(140, 86, 75),
        Peer::Postern => RGBColor(214, 39, 40),
        Peer::PosternForwarded => RGBColor(255, 152, 150),
    }
}

/// Draws all into the folder; returns the files' names.
pub(super) fn draw(report: &Report<'_>, folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for table in &report.tables {
        if table.group == Group::Connect {
            files.push(save(folder, "connect.svg", |path| curves(path, report.record, &table.peers))?);
            continue;
        }
        let rows = table.lines.iter().filter(|line| line.better != Better::Neither);
        let rows: Vec<Row<'_>> = rows.map(|line| Row::of(table.group, line)).collect();
        let names: BTreeSet<&str> = rows.iter().map(|row| row.plot.as_str()).collect();
        for name in names {
            let rows: Vec<&Row<'_>> = rows.iter().filter(|row| row.plot == name).collect();
            let title = format!("{} [{}]", rows[0].title, rows[0].line.unit);
            let logarithmic = table.group.logarithmic();
            let plot = |path: &Path| bars(path, &title, report.record, &rows, &table.peers, logarithmic);
            files.push(save(folder, name, plot)?);
        }
    }
    Ok(files)
}

/// A line, and the plot that it is a row of.
struct Row<'a> {
    line: &'a Line,
    label: &'a str,
    plot: String,
    title: &'a str,
}

impl<'a> Row<'a> {
    /// One plot for each unit; where a table has sections, one for each measure, with the sections as rows. Times of
    /// recovery, the only ones in seconds there, have a section of their own whose lines are the rows.
    fn of(group: Group, line: &'a Line) -> Self {
        match line.section {
            Some(section) if line.unit != "s" => {
                let plot = format!("{}-{}.svg", group.name(), slug(&line.title));
                Self { line, label: section, plot, title: &line.title }
            }
            _ => {
                let plot = format!("{}-{}.svg", group.name(), slug(line.unit));
                Self { line, label: &line.title, plot, title: line.section.unwrap_or(group.title()) }
            }
        }
    }
}

/// A unit or a title as part of a file's name.
fn slug(text: &str) -> String {
    text.replace('/', "-per-").replace('µ', "u").replace('×', "ratio").replace(", ", "-").replace(' ', "-")
}

fn save(folder: &Path, name: &str, plot: impl Fn(&Path) -> Result<()>) -> Result<String> {
    plot(&folder.join(name)).map_err(|error| anyhow!("drawing {name}: {error:#}"))?;
    Ok(name.to_owned())
}

/// One row of bars for each line, one bar for each peer, whiskers from the least to the greatest.
fn bars(
    path: &Path,
    title: &str,
    record: &Record,
    rows: &[&Row<'_>],
    peers: &[Peer],
    logarithmic: bool,
) -> Result<()> {
    let row = u32::try_from(peers.len())? * BAR + GAP;
    let height = u32::try_from(rows.len())? * row;
    let root = SVGBackend::new(path, (WIDTH, height + 120)).into_drawing_area();
    root.fill(&WHITE)?;
    let values = || {
        let cells = rows.iter().flat_map(|row| peers.iter().map(|peer| record.cell(&row.line.id, *peer)));
        cells.flatten().filter_map(|cell| cell.summary())
    };
    let greatest = values().map(|summary| summary.max).fold(0.0, f64::max);
    let greatest = if greatest > 0.0 { greatest * 1.12 } else { 1.0 };
    let least = values().map(|summary| summary.min).filter(|min| *min > 0.0).fold(greatest, f64::min);
    let span = 0.0..f64::from(height);
    let mut chart = ChartBuilder::on(&root);
    chart
        .caption(title, ("sans-serif", 18))
        .margin(8)
        .margin_right(60)
        .margin_bottom(30)
        .x_label_area_size(30);
    chart.y_label_area_size(LABELS);
    if logarithmic {
        let from = least / 2.0;
        let chart = chart.build_cartesian_2d((from..greatest * 2.0).log_scale(), span)?;
        rows_of(&root, chart, from, record, rows, peers, f64::from(height))?;
    } else {
        rows_of(
            &root,
            chart.build_cartesian_2d(0.0..greatest, span)?,
            0.0,
            record,
            rows,
            peers,
            f64::from(height),
        )?;
    }
    legend(&root, peers, i32::try_from(height + 100)?)?;
    root.present()?;
    Ok(())
}

type Chart<'a, X> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, plotters::coord::types::RangedCoordf64>>;

fn rows_of<X: Ranged<ValueType = f64> + ValueFormatter<f64>>(
    root: &DrawingArea<SVGBackend<'_>, Shift>,
    mut chart: Chart<'_, X>,
    from: f64,
    record: &Record,
    rows: &[&Row<'_>],
    peers: &[Peer],
    height: f64,
) -> Result<()> {
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_labels(8)
        .x_label_formatter(&|value| markdown::number(*value))
        .light_line_style(TRANSPARENT)
        .draw()
        .map_err(|error| anyhow!("{error}"))?;
    let mut top = height;
    let mut labels = Vec::new();
    for row in rows {
        let row_top = top;
        for peer in peers {
            let Some(cell) = record.cell(&row.line.id, *peer) else { continue };
            if let Some(summary) = cell.summary() {
                let bottom = top - f64::from(BAR);
                let bar =
                    Rectangle::new([(from, top - 1.0), (summary.median, bottom)], color(*peer).filled());
                chart.draw_series([bar])?;
                let middle = f64::midpoint(top - 1.0, bottom);
                let whisker = [(summary.min.max(from), middle), (summary.max, middle)];
                chart.draw_series([PathElement::new(whisker, BLACK.stroke_width(1))])?;
                let end = chart.backend_coord(&(summary.max, middle));
                let least = if cell.bounded { "≥ " } else { "" };
                labels.push((format!("{least}{}", markdown::number(summary.median)), end, false));
            }
            top -= f64::from(BAR);
        }
        let middle = chart.backend_coord(&(from.max(f64::MIN_POSITIVE), f64::midpoint(row_top, top)));
        labels.push((row.label.to_owned(), middle, true));
        top -= f64::from(GAP);
    }
    drop(chart);
    for (text, (x, y), is_title) in labels {
        let style = if is_title {
            ("sans-serif", TEXT).into_text_style(root).pos(text_style::Pos::new(HPos::Right, VPos::Center))
        } else {
            ("sans-serif", 11).into_text_style(root).pos(text_style::Pos::new(HPos::Left, VPos::Center))
        };
        let x = if is_title { i32::try_from(LABELS)? } else { x + 4 };
        root.draw(&Text::new(text, (x, y), style))?;
    }
    Ok(())
}

fn legend(root: &DrawingArea<SVGBackend<'_>, Shift>, peers: &[Peer], y: i32) -> Result<()> {
    let mut x = 20;
    for peer in peers {
        root.draw(&Rectangle::new([(x, y), (x + 12, y + 10)], color(*peer).filled()))?;
        root.draw(&Text::new(peer.title(), (x + 17, y), ("sans-serif", 12)))?;
        x += 40 + 7 * i32::try_from(peer.title().len())?;
    }
    Ok(())
}

/// connect() p50 by the number of nodes: solid lines for redirected connections, dashed ones for unrelated connections.
fn curves(path: &Path, record: &Record, peers: &[Peer]) -> Result<()> {
    let root = SVGBackend::new(path, (WIDTH, 460)).into_drawing_area();
    root.fill(&WHITE)?;
    let points = |peer: Peer, kind: &str| -> Vec<(f64, f64)> {
        let point = |nodes: usize| {
            let median = record.median(&format!("{kind}-{nodes}"), peer)?;
            Some((as_f64(nodes as u64), median))
        };
        NODES.into_iter().filter_map(point).collect()
    };
    let all = peers.iter().flat_map(|peer| [points(*peer, "connect"), points(*peer, "connect-other")]);
    let greatest = all.flatten().map(|(_, micros)| micros).fold(1.0, f64::max);
    let last = as_f64(NODES[NODES.len() - 1] as u64);
    let mut chart = ChartBuilder::on(&root)
        .caption("connect() p50 by nodes or rules [µs]", ("sans-serif", 18))
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..last * 1.05, 0.0..greatest * 1.1)?;
    let number = |value: &f64| markdown::number(*value);
    chart
        .configure_mesh()
        .x_desc("edge nodes in the inventory, or DNAT rules")
        .x_label_formatter(&number)
        .y_label_formatter(&number)
        .light_line_style(TRANSPARENT)
        .draw()?;
    for peer in peers {
        let style = color(*peer);
        let (own, other) = (points(*peer, "connect"), points(*peer, "connect-other"));
        chart.draw_series(own.iter().map(|point| Circle::new(*point, 4, style.filled())))?;
        chart
            .draw_series(LineSeries::new(own, style.stroke_width(2)))?
            .label(format!("{}: to a node", peer.title()))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style.stroke_width(2)));
        chart
            .draw_series(DashedLineSeries::new(other, 5, 4, style.stroke_width(1)))?
            .label(format!("{}: elsewhere", peer.title()))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style.mix(0.5).stroke_width(1)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}
