//! The access log: one JSON line per relayed connection.
use anyhow::{Context as _, Result};
use serde_json::{Map, Value};

/// One line of the log: one connection.
#[derive(Clone, Debug)]
pub struct AccessLine(Map<String, Value>);

impl AccessLine {
    /// Returns a field as text; empty if it is missing.
    pub fn text(&self, field: &str) -> String {
        match self.0.get(field) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        }
    }

    pub fn number(&self, field: &str) -> Result<u64> {
        let text = self.text(field);
        text.parse().with_context(|| format!("field {field} of the access line {:?}", self.0))
    }

    pub fn bytes_to_node(&self) -> Result<u64> {
        self.number("to_node")
    }

    pub fn bytes_from_node(&self) -> Result<u64> {
        self.number("from_node")
    }
}

/// Returns the access lines of a JSON log: those with a listener and an outcome.
pub fn parse(log: &str) -> Vec<AccessLine> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let maps = lines.filter_map(|mut line| match line.get_mut("fields") {
        Some(Value::Object(fields)) => Some(std::mem::take(fields)),
        _ => match line {
            Value::Object(map) => Some(map),
            _ => None,
        },
    });
    maps.filter(|map| map.contains_key("listener") && map.contains_key("outcome")).map(AccessLine).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_access_lines_are_taken() {
        let log = concat!(
            "not json\n",
            r#"{"level":"INFO","fields":{"message":"listening","listener":"https"}}"#,
            "\n",
            r#"{"level":"INFO","fields":{"listener":"redirect","node":"edge-1","bytes_to_node":5,"outcome":"ok"}}"#,
            "\n",
            r#"{"level":"INFO","listener":"https","outcome":"reset"}"#,
            "\n",
        );
        let lines = parse(log);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].text("node"), "edge-1");
        assert_eq!(lines[0].number("bytes_to_node").unwrap(), 5);
        assert!(lines[1].number("missing").is_err());
    }
}
