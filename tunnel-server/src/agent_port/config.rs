//! The flags of the agents' port.

use std::net::IpAddr;

use clap::Args;
use tunnel_runtime::config::value::{self, List, OnOff, Port};

/// The agents' port and what they need to attach. The default is that it is off.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Agents")]
pub struct AgentsConfig {
    /// Port that the agents dial; 0: off.
    #[arg(id = "agent-port", long, value_name = "PORT", alias = "tunnel-agent-connect-port", default_value = "10262",
          value_parser = value::port)]
    pub port: Port,
    /// refuse or allow agents of nodes that are not in the inventory, at each attach and renewal.
    #[arg(id = "unknown-agents", long, value_name = "refuse|allow", default_value = "refuse",
          value_parser = refuse_or_allow)]
    pub refuse_unknown: OnOff,
    /// on or off: agents enrol with tokens of `tunnel-server token create` [default: on with --inventory, off in a cluster].
    #[arg(long, value_name = "on|off", value_parser = value::on_off)]
    pub(crate) token_enrollment: Option<OnOff>,
    /// Additional DNS names in the server's certificate, comma-separated [default: none].
    #[arg(long, value_name = "NAMES", default_value = "", hide_default_value = true, value_parser = dns_names)]
    pub(crate) cert_dns_names: List<String>,
    /// Additional IP addresses in the server's certificate, comma-separated [default: none; it has this host's].
    #[arg(long, value_name = "IPS", default_value = "", hide_default_value = true,
          value_parser = value::list::<IpAddr, List<_>>)]
    pub(crate) cert_ips: List<IpAddr>,
}

fn refuse_or_allow(value: &str) -> Result<bool, String> {
    match value {
        "refuse" => Ok(true),
        "allow" => Ok(false),
        _ => Err("use refuse or allow".to_owned()),
    }
}

fn dns_names(value: &str) -> Result<List<String>, String> {
    let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| {
            // A name valid in a certificate (RFC 5280 §4.2.1.6), or a wildcard in the first label.
            let plain = name.strip_prefix("*.").unwrap_or(name);
            match rustls_pki_types::DnsName::try_from(plain) {
                Ok(_) => Ok(name.to_ascii_lowercase()),
                Err(_) => Err(format!("{name:?} is not a DNS name")),
            }
        })
        .collect()
}
