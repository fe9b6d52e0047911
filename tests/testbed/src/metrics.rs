//! Parser of metrics in the text format of Prometheus and OpenMetrics.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Context as _, Result, ensure};

/// One line of /metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// A parsed /metrics page.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub samples: Vec<Sample>,
    /// Names in the `# TYPE` lines: a family without a series has no other line.
    families: BTreeSet<String>,
}

impl Metrics {
    /// Parses a page; the error shows the invalid line.
    pub fn parse(page: &str) -> Result<Self> {
        let lines = page.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let samples = lines.map(|line| sample(line).with_context(|| format!("metrics line {line:?}")));
        let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        Ok(Self {
            samples: samples.collect::<Result<_>>()?,
            families: types.map(ToOwned::to_owned).collect(),
        })
    }

    /// Returns the sum of a metric over all series with these labels.
    ///
    /// # Errors
    /// If there is no such series: a test that asks for a misspelt name or label would pass with 0.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        let sum = self.sum_or_zero(name, labels)?;
        let series = self.samples.iter().filter(|sample| sample.name == name);
        ensure!(
            self.matching(name, labels).next().is_some(),
            "{name} has no series with {labels:?}, only {:?}",
            series.map(ToString::to_string).collect::<Vec<_>>()
        );
        Ok(sum)
    }

    /// As [`Self::sum`], but 0 if no series has these values of the labels: for series that appear with their first
    /// event.
    ///
    /// # Errors
    /// If there is no such metric, or it has other labels.
    pub fn sum_or_zero(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        ensure!(self.has(name), "there is no metric {name}, only {:?}", self.families);
        let mut series = self.samples.iter().filter(|sample| sample.name == name).peekable();
        let labelled = |sample: &Sample| labels.iter().all(|(key, _)| sample.labels.contains_key(*key));
        ensure!(
            series.peek().is_none() || series.any(labelled),
            "{name} does not have all labels of {labels:?}"
        );
        Ok(self.matching(name, labels).map(|sample| sample.value).sum())
    }

    /// Reports whether the page has the metric, with or without a series. A histogram is present as `_bucket`, `_sum`
    /// and `_count`.
    pub fn has(&self, name: &str) -> bool {
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
        [Some(name), family].into_iter().flatten().any(|name| self.families.contains(name))
            || self.samples.iter().any(|sample| sample.name == name)
    }

    fn matching<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            sample.name == name
                && labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|have| have == value))
        })
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} {}", self.name, self.labels, self.value)
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (series, rest) = match line.find('{') {
        Some(open) => {
            let close = line.rfind('}')?;
            ((&line[..open], labels(&line[open + 1..close])?), &line[close + 1..])
        }
        None => {
            let (name, rest) = line.split_once(' ')?;
            ((name, BTreeMap::new()), rest)
        }
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: series.0.to_owned(), labels: series.1, value })
}

fn labels(text: &str) -> Option<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (key, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        found.insert(key.to_owned(), value);
        rest = after[end + 1..].trim_start_matches(',');
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read() {
        let page = "# HELP a_total text\n# TYPE a_total counter\n# TYPE none_total counter\na_total{x=\"1\",y=\"q\\\"}u\"} 3\na_total{x=\"2\"} 4.5\nplain 7 1700000000\n# EOF\n";
        let metrics = Metrics::parse(page).unwrap();
        let sum = |name, labels: &[(&str, &str)]| metrics.sum(name, labels).unwrap();
        assert_eq!(sum("a_total", &[]), 7.5);
        assert_eq!(sum("a_total", &[("x", "1")]), 3.0);
        assert_eq!(sum("a_total", &[("y", "q\"}u")]), 3.0);
        assert_eq!(sum("plain", &[]), 7.0);
        assert!(metrics.has("plain") && !metrics.has("a"));
    }

    #[test]
    fn what_nobody_exposes_is_not_zero() {
        let page = "# TYPE a_total counter\na_total{x=\"1\"} 3\n# TYPE none_total counter\n";
        let metrics = Metrics::parse(page).unwrap();
        let error = |name, labels: &[(&str, &str)]| metrics.sum(name, labels).unwrap_err().to_string();
        assert!(error("b_total", &[]).contains("no metric b_total"));
        assert!(error("a_total", &[("x", "2")]).contains("no series"));
        assert!(error("none_total", &[]).contains("no series"));
        let or_zero = |name, labels: &[(&str, &str)]| metrics.sum_or_zero(name, labels);
        assert_eq!(or_zero("a_total", &[("x", "2")]).unwrap(), 0.0, "not counted yet");
        assert_eq!(or_zero("none_total", &[("x", "2")]).unwrap(), 0.0, "not counted yet");
        assert!(or_zero("b_total", &[]).is_err() && or_zero("a_total", &[("y", "1")]).is_err());
    }

    #[test]
    fn an_unreadable_line_is_an_error() {
        for line in ["name", "name{x=\"1\" 3", "name{x=1} 3", "name x"] {
            assert!(Metrics::parse(line).is_err(), "{line}");
        }
    }
}
