//! Parses a file of maps.

use serde::Deserialize;
use tunnel_runtime::NodeName;
use tunnel_runtime::yaml;

use super::parse::parse_listen;
use super::{Map, check};
use crate::policy::Ranges;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    maps: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    listen: String,
    node: NodeName,
    target: Port,
    clients: Option<Ranges>,
}

/// A port, or an address with a port.
#[derive(Deserialize)]
#[serde(untagged)]
enum Port {
    Number(u16),
    Text(String),
}

/// # Errors
/// Names the line or the entry, and the reason.
pub(crate) fn parse_file(text: &str) -> Result<Vec<Map>, String> {
    let file: File = yaml::read(text)?;
    let maps = file.maps.into_iter().enumerate().map(|(index, entry)| {
        let target = match entry.target {
            Port::Number(port) => port.to_string(),
            Port::Text(text) => text,
        };
        let at = |key: &str, reason: String| format!("maps[{index}].{key}: {reason}");
        let listen = parse_listen(&entry.listen).map_err(|reason| at("listen", reason))?;
        let target = target.parse().map_err(|reason| at("target", reason))?;
        let clients = entry.clients.map(|ranges| ranges.0);
        Map::new(listen, entry.node, target, clients).map_err(|reason| at("clients", reason))
    });
    let maps = maps.collect::<Result<Vec<_>, String>>()?;
    check(&maps)?;
    Ok(maps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_of_a_file() {
        let text = "maps:\n- listen: 0.0.0.0:2222\n  node: edge-7\n  target: 22\n  clients: [10.0.0.0/8]\n\
                    - {listen: '[::1]:80', node: edge-8, target: '127.0.0.1:8080'}\n";
        let maps: Vec<_> = parse_file(text).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(
            maps,
            ["0.0.0.0:2222=edge-7/22,10.0.0.0/8", "[::1]:80=edge-8/127.0.0.1:8080,127.0.0.0/8,::1/128"]
        );
        assert!(parse_file("maps: []\n").unwrap().is_empty());
    }

    #[test]
    fn errors_name_the_entry() {
        for (entry, parts) in [
            (
                "{listen: '2222', node: e, target: 22}",
                &["maps[0].listen", "\"2222\" is not ADDRESS:PORT"][..],
            ),
            ("{listen: '1.1.1.1:1', node: e, target: 22}", &["maps[0].clients", "reached from elsewhere"]),
            ("{listen: '127.0.0.1:1', node: e, target: x}", &["maps[0].target", "\"x\" is not a port"]),
            ("{listen: '127.0.0.1:1', node: E/, target: 1}", &["line 2", "maps[0].node"]),
            ("{listen: '127.0.0.1:1', node: e, target: 1, client: x}", &["line 2", "client"]),
            ("{listen: '127.0.0.1:1', node: e, target: 1, clients: [x]}", &["line 2", "maps[0].clients"]),
        ] {
            let error = parse_file(&format!("maps:\n- {entry}\n")).unwrap_err();
            for part in parts {
                assert!(error.contains(part), "{entry}: {error:?} lacks {part:?}");
            }
        }
    }
}
