//! A Kubernetes label selector, which determines the edge nodes.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use kube_core::{Expression, SelectorExt as _};

/// The labels with which OpenYurt, SuperEdge and KubeEdge mark edge nodes.
pub const DEFAULT_EDGE_SELECTOR: &str =
    "openyurt.io/is-edge-worker=true || superedge.io/edge-node=enable || node-role.kubernetes.io/edge";

/// A label selector in the syntax of `kubectl get -l` (`a=b`, `a!=b`, `a in (b,c)`, `a notin (b,c)`, `a`, `!a`; a comma
/// means and), or several of these separated by `||`, of which one must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    any: Vec<Vec<Expression>>,
    /// True if the labels of edge nodes are kept: with many nodes they need much memory.
    keep: bool,
}

impl Selector {
    /// Sets if the labels of edge nodes are kept: other parts than the selector may need them.
    #[must_use]
    pub fn keep_labels(self, keep: bool) -> Self {
        Self { keep, ..self }
    }

    /// The labels for a node's inventory entry.
    pub fn kept(&self, edge: bool, labels: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        if self.keep && edge { labels.clone() } else { BTreeMap::new() }
    }

    /// A key of which a kubelet may set the label on its own Node, although the cluster has the admission plugin
    /// NodeRestriction. Other keys below kubernetes.io, which it forbids too, it may permit in later versions.
    pub fn set_by_kubelets(&self) -> Option<&str> {
        const ROLE: &str = "node-role.kubernetes.io";
        const RESTRICTED: &str = "node-restriction.kubernetes.io";
        let may_set = |key: &&str| {
            let domain = key.split_once('/').map_or("", |(domain, _)| domain);
            let within = domain.strip_suffix(RESTRICTED);
            domain != ROLE && !within.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        self.any.iter().flatten().map(key).find(may_set)
    }

    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.any.iter().any(|all| all.iter().all(|requirement| requirement.matches(labels)))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    #[error("a selector is empty, which would make every node an edge node")]
    Empty,
    #[error(
        "{0:?} is not a requirement; use key=value, key!=value, key in (a,b), key notin (a,b), key or !key"
    )]
    Requirement(String),
    #[error(
        "{0:?} is not a label key (RFC 1123 name of at most 63 characters, with an optional DNS prefix and a slash)"
    )]
    Key(String),
    #[error("{0:?} is not a label value (at most 63 letters, digits, '-', '_', '.')")]
    Value(String),
    #[error("{0:?} has unbalanced parentheses")]
    Parentheses(String),
}

impl Default for Selector {
    fn default() -> Self {
        // A constant, checked by a test.
        DEFAULT_EDGE_SELECTOR.parse().expect("DEFAULT_EDGE_SELECTOR is a selector")
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let any = s.split("||").map(conjunction).collect::<Result<_, _>>()?;
        Ok(Self { any, keep: false })
    }
}

fn key(requirement: &Expression) -> &str {
    match requirement {
        Expression::In(key, _)
        | Expression::NotIn(key, _)
        | Expression::Equal(key, _)
        | Expression::NotEqual(key, _)
        | Expression::Exists(key)
        | Expression::DoesNotExist(key) => key,
    }
}

fn conjunction(text: &str) -> Result<Vec<Expression>, SelectorError> {
    if text.trim().is_empty() {
        return Err(SelectorError::Empty);
    }
    split_outside_parentheses(text)?.into_iter().map(|part| requirement(part.trim())).collect()
}

/// Splits at commas outside of value lists.
fn split_outside_parentheses(text: &str) -> Result<Vec<&str>, SelectorError> {
    let unmatched = || SelectorError::Parentheses(text.trim().to_owned());
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' if inside => return Err(unmatched()),
            b'(' => inside = true,
            b')' if !inside => return Err(unmatched()),
            b')' => inside = false,
            b',' if !inside => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err(unmatched());
    }
    parts.push(&text[start..]);
    Ok(parts)
}

fn requirement(text: &str) -> Result<Expression, SelectorError> {
    if let Some(head) = text.strip_suffix(')') {
        let (head, values) =
            head.split_once('(').ok_or_else(|| SelectorError::Requirement(text.to_owned()))?;
        let mut words = head.split_whitespace();
        let (Some(key), Some(operator), None) = (words.next(), words.next(), words.next()) else {
            return Err(SelectorError::Requirement(text.to_owned()));
        };
        let test = match operator {
            "in" => Expression::In,
            "notin" => Expression::NotIn,
            _ => return Err(SelectorError::Requirement(text.to_owned())),
        };
        let values = values.split(',').map(label_value).collect::<Result<_, _>>()?;
        return Ok(test(label_key(key)?, values));
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Ok(Expression::NotEqual(label_key(key)?, label_value(value)?));
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Ok(Expression::Equal(label_key(key)?, label_value(value)?));
    }
    match text.strip_prefix('!') {
        Some(key) => Ok(Expression::DoesNotExist(label_key(key)?)),
        None if text.contains(char::is_whitespace) => Err(SelectorError::Requirement(text.to_owned())),
        None => Ok(Expression::Exists(label_key(text)?)),
    }
}

fn label_key(text: &str) -> Result<String, SelectorError> {
    let key = text.trim();
    let (prefix, name) = key.rsplit_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let prefix_is_dns = prefix.is_none_or(|prefix| {
        prefix.len() <= 253
            && prefix.split('.').all(|label| {
                is_word(label, 253)
                    && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            })
    });
    if prefix_is_dns && is_word(name, 63) {
        Ok(key.to_owned())
    } else {
        Err(SelectorError::Key(key.to_owned()))
    }
}

fn label_value(text: &str) -> Result<String, SelectorError> {
    let value = text.trim();
    if value.is_empty() || is_word(value, 63) {
        Ok(value.to_owned())
    } else {
        Err(SelectorError::Value(value.to_owned()))
    }
}

/// True for letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
fn is_word(text: &str, longest: usize) -> bool {
    let ends = |end: Option<u8>| end.is_some_and(|byte| byte.is_ascii_alphanumeric());
    text.len() <= longest
        && ends(text.bytes().next())
        && ends(text.bytes().last())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, all) in self.any.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { " || " })?;
            for (j, requirement) in all.iter().enumerate() {
                write!(f, "{}{requirement}", if j == 0 { "" } else { "," })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn matches(selector: &str, pairs: &[(&str, &str)]) -> bool {
        selector.parse::<Selector>().unwrap_or_else(|e| panic!("{selector}: {e}")).matches(&labels(pairs))
    }

    #[test]
    fn the_default_is_any_of_three_labels() {
        assert_eq!(Selector::default().to_string(), DEFAULT_EDGE_SELECTOR);
        assert!(matches(DEFAULT_EDGE_SELECTOR, &[("openyurt.io/is-edge-worker", "true")]));
        assert!(!matches(DEFAULT_EDGE_SELECTOR, &[("openyurt.io/is-edge-worker", "false")]));
        assert!(matches(DEFAULT_EDGE_SELECTOR, &[("superedge.io/edge-node", "enable")]));
        assert!(matches(DEFAULT_EDGE_SELECTOR, &[("node-role.kubernetes.io/edge", "")]));
        assert!(!matches(DEFAULT_EDGE_SELECTOR, &[("node-role.kubernetes.io/control-plane", "")]));
    }

    #[test]
    fn operators_match_as_in_kubernetes() {
        for (selector, pairs, expected) in [
            ("a=b", &[("a", "b")][..], true),
            ("a == b", &[("a", "b")], true),
            ("a=b", &[("a", "c")], false),
            ("a=b", &[], false),
            ("a=", &[("a", "")], true),
            ("a!=b", &[("a", "c")], true),
            ("a!=b", &[], true),
            ("a!=b", &[("a", "b")], false),
            ("a in (b, c)", &[("a", "c")], true),
            ("a in (b,c)", &[], false),
            ("a in(b)", &[("a", "b")], true),
            ("a notin (b,c)", &[("a", "d")], true),
            ("a notin (b,c)", &[], true),
            ("a notin (b,c)", &[("a", "b")], false),
            ("a in (,b)", &[("a", "")], true),
            ("a", &[("a", "x")], true),
            ("a", &[("b", "x")], false),
            ("!a", &[], true),
            ("!a", &[("a", "")], false),
            ("a=b,!c,d in (e,f)", &[("a", "b"), ("d", "f")], true),
            ("a=b,!c,d in (e,f)", &[("a", "b"), ("d", "f"), ("c", "")], false),
            ("a=b || c=d", &[("c", "d")], true),
            ("a=b,x || c=d", &[("a", "b")], false),
        ] {
            assert_eq!(matches(selector, pairs), expected, "{selector} {pairs:?}");
        }
    }

    #[test]
    fn errors_name_the_text_and_the_reason() {
        for (selector, error) in [
            ("", "a selector is empty, which would make every node an edge node"),
            ("a=b ||", "a selector is empty, which would make every node an edge node"),
            ("a in (b", "\"a in (b\" has unbalanced parentheses"),
            ("a)", "\"a)\" has unbalanced parentheses"),
            ("a in ((b))", "\"a in ((b))\" has unbalanced parentheses"),
            (
                "a within (b)",
                "\"a within (b)\" is not a requirement; use key=value, key!=value, key in (a,b), key notin (a,b), key or !key",
            ),
            (
                "a b",
                "\"a b\" is not a requirement; use key=value, key!=value, key in (a,b), key notin (a,b), key or !key",
            ),
            (
                "a=b,",
                "\"\" is not a label key (RFC 1123 name of at most 63 characters, with an optional DNS prefix and a slash)",
            ),
            (
                "-a=b",
                "\"-a\" is not a label key (RFC 1123 name of at most 63 characters, with an optional DNS prefix and a slash)",
            ),
            ("a=b c", "\"b c\" is not a label value (at most 63 letters, digits, '-', '_', '.')"),
        ] {
            assert_eq!(selector.parse::<Selector>().unwrap_err().to_string(), error, "{selector}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_printed_selectors_parse(text in "[ab=!,() |in.é/]{0,24}|\\PC{0,24}") {
            if let Ok(selector) = text.parse::<Selector>() {
                prop_assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector);
            }
        }
    }
}
