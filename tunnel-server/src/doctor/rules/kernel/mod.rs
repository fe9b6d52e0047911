//! The rules of nf_tables, as the kernel tells them: for where neither iptables-save nor nft is, as in the image. iptables has its rules
//! there too, unless it is the legacy one. They are turned into lines of nft, which `nft.rs` understands.

mod expressions;
mod fields;
mod netlink;
mod sets;
mod xtables;

use std::io;

use nix::libc;

use self::expressions::Table;
use self::netlink::{Connection, NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, attribute, number, text};
use self::sets::Sets;
use super::model::{Hook, Ruleset};
use super::nft::{Maps, rules_of};

/// Rules that change all the time are read as often.
const ATTEMPTS: usize = 10;

/// Reads those of this network namespace. A kernel without nf_tables has none.
///
/// # Errors
/// CAP_NET_ADMIN is missing, or they change all the time.
pub(super) fn read() -> io::Result<Ruleset> {
    for _ in 1..ATTEMPTS {
        match once() {
            // What was to be read is gone.
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::NotFound) => {}
            result => return result,
        }
    }
    once()
}

fn once() -> io::Result<Ruleset> {
    let connection = Connection::open()?;
    let mut rules = Ruleset::default();
    let chains = match connection.dump(NFT_MSG_GETCHAIN, 0, &[]) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(rules),
        chains => chains?,
    };
    for chain in chains {
        // NFTA_CHAIN_TABLE, _NAME.
        let Some(table) = table(chain.family, text(&chain.attributes, 1)) else { continue };
        let Some(name) = text(&chain.attributes, 3) else { continue };
        let known = rules.chain(&table.shown, &name);
        known.hooks.extend(hook(&chain.attributes));
        // NFTA_CHAIN_POLICY: NF_DROP.
        known.drops = number(&chain.attributes, 5) == Some(0);
    }
    let (sets, mut maps) = (Sets::of(&connection)?, Maps::new());
    for rule in connection.dump(NFT_MSG_GETRULE, 0, &[])? {
        // NFTA_RULE_TABLE, _CHAIN, _EXPRESSIONS.
        let Some(table) = table(rule.family, text(&rule.attributes, 1)) else { continue };
        let Some(chain) = text(&rule.attributes, 2) else { continue };
        let expressions = attribute(&rule.attributes, 4).unwrap_or_default();
        let line = expressions::line(expressions, &table, &sets, &mut maps)?;
        rules.chain(&table.shown, &chain).rules.extend(rules_of(&line, &maps, &table.shown));
    }
    Ok(rules)
}

/// None: of a family whose rules do not concern IP, or concern it at a device only.
fn table(family: u8, name: Option<String>) -> Option<Table> {
    let name = name?;
    // NFPROTO_INET, _IPV4, _IPV6.
    let shown = match family {
        1 => "inet",
        2 => "ip",
        10 => "ip6",
        _ => return None,
    };
    let shown = format!("{shown} {name}");
    Some(Table { family, name, shown })
}

/// NFTA_CHAIN_TYPE, NFTA_CHAIN_HOOK with NFTA_HOOK_HOOKNUM.
fn hook(chain: &[u8]) -> Option<Hook> {
    match (text(chain, 7)?.as_str(), number(attribute(chain, 4)?, 1)?) {
        ("nat", 0) => Some(Hook::NatPrerouting),
        ("nat", 3) => Some(Hook::NatOutput),
        ("filter", 1) => Some(Hook::FilterInput),
        _ => None,
    }
}
