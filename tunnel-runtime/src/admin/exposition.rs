//! Encodes the metrics as text, in the format that the client asks for.

use std::collections::HashMap;
use std::fmt::{self, Write as _};

use axum::http::{HeaderMap, header};
use prometheus_client::registry::Registry;

/// <https://prometheus.io/docs/specs/om/open_metrics_spec/#protocol-negotiation>; Prometheus selects its parser by
/// this.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// <https://prometheus.io/docs/instrumenting/exposition_formats/>, for clients that do not ask for OpenMetrics.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns the content type and all metrics of a registry, in the format that the request headers ask for.
///
/// # Errors
/// Fails if a collector fails.
pub fn exposition(registry: &Registry, headers: &HeaderMap) -> Result<(&'static str, String), fmt::Error> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry)?;
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if accepted.any(|accept| accept.contains("application/openmetrics-text")) {
        return Ok((OPENMETRICS, text));
    }
    Ok((TEXT, older(&text)))
}

/// Converts to the older format: help and type have the samples' own names, an info becomes a gauge, and there are no
/// units and no end mark.
fn older(openmetrics: &str) -> String {
    let types = openmetrics.lines().filter_map(comment).filter(|(word, ..)| *word == "TYPE");
    let types: HashMap<_, _> = types.map(|(_, name, kind)| (name, kind)).collect();
    let mut text = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines() {
        // Writing to a String never fails.
        let _ = match comment(line) {
            Some((word @ ("HELP" | "TYPE"), name, rest)) => {
                let (suffix, kind) = match types.get(name).copied().unwrap_or("unknown") {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                writeln!(text, "# {word} {name}{suffix} {}", if word == "TYPE" { kind } else { rest })
            }
            None if !line.starts_with('#') => writeln!(text, "{line}"),
            _ => Ok(()),
        };
    }
    text
}

/// Parses a line `# WORD NAME REST`.
fn comment(line: &str) -> Option<(&str, &str, &str)> {
    let (word, rest) = line.strip_prefix("# ")?.split_once(' ')?;
    let (name, rest) = rest.split_once(' ')?;
    Some((word, name, rest))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use prometheus_client::metrics::counter::Counter;

    use super::*;

    #[test]
    fn the_format_is_that_which_is_asked_for() {
        let mut registry = Registry::default();
        registry.register("things", "Things seen", Counter::<u64>::default());
        let older = "# HELP things_total Things seen.\n# TYPE things_total counter\nthings_total 0\n";
        let open = "# HELP things Things seen.\n# TYPE things counter\nthings_total 0\n# EOF\n";
        for (accept, content_type, page) in [
            (None, TEXT, older),
            (Some("*/*"), TEXT, older),
            (Some("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3"), OPENMETRICS, open),
        ] {
            let accept = accept.map(|accept| (header::ACCEPT, HeaderValue::from_static(accept)));
            let answer = exposition(&registry, &accept.into_iter().collect()).unwrap();
            assert_eq!(answer, (content_type, page.to_owned()));
        }
    }

    #[test]
    fn the_older_format_names_samples() {
        let page = "# HELP a_bytes Bytes: # of them.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{x=\"# HELP b\"} 3\n# HELP b B.\n# TYPE b info\nb_info{version=\"1\"} 1\n# HELP c C.\n# TYPE c histogram\nc_sum 1.5\n# HELP d D.\n# TYPE d unknown\nd 1\n# EOF\n";
        let expected = "# HELP a_bytes_total Bytes: # of them.\n# TYPE a_bytes_total counter\na_bytes_total{x=\"# HELP b\"} 3\n# HELP b_info B.\n# TYPE b_info gauge\nb_info{version=\"1\"} 1\n# HELP c C.\n# TYPE c histogram\nc_sum 1.5\n# HELP d D.\n# TYPE d untyped\nd 1\n";
        assert_eq!(older(page), expected);
    }
}
