//! Checks that connections pass this host's firewall: tries them, and names the rules that may have taken failed ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use tunnel_doctor::{Checkup, Code, Finding, Outcome, Running, codes};
use tunnel_redirect::SelfTestAddresses;

use super::rules::{Hook, Rules, Suspect};
use super::trial::{self, Failure};
use crate::config::{Config, RedirectRanges};
use crate::status::StatusReport;

/// Name of the listeners whose addresses show which address families are redirected.
const REDIRECT: &str = "redirect";
/// Maximum number of ports tried besides the tunnelled ones, and of ports shown.
const MOST_PORTS: usize = 512;
const SHOWN: usize = 10;
const CONNTRACK: &str = "/proc/sys/net/netfilter/nf_conntrack_";

pub(super) async fn check(
    checkup: &mut Checkup,
    config: &Config,
    running: Option<&Running<StatusReport>>,
    files: &[PathBuf],
) {
    checkup.add("conntrack", conntrack());
    let rules = match Rules::read(files, &config.process.state_dir).await {
        Ok(rules) => rules,
        Err(reason) => return checkup.add("rules", Outcome::Skipped(reason)),
    };
    if config.redirects {
        let listeners = running.into_iter().flat_map(|running| &running.status.listeners);
        let redirected = |v6: bool| {
            listeners.clone().any(|listener| listener.name == REDIRECT && listener.address.is_ipv6() == v6)
        };
        let mut way = Way {
            config,
            rules: &rules,
            virtual_addresses: virtual_addresses(config, redirected(false), redirected(true)),
            ports: tunnelled(&config.redirect.redirect_ports, running),
        };
        let (outcome, failed) = match checkup.blocked(&["conntrack"]) {
            Some(reason) => (Outcome::Skipped(reason), BTreeSet::new()),
            None if running.is_some() => way.try_from_host().await,
            None => (way.untried(), BTreeSet::new()),
        };
        checkup.add("rules", outcome);
        // The check of the rules has explained these already.
        way.ports.retain(|port| !failed.contains(port));
        let clients = running.map_or(&[][..], |running| &running.status.redirect.clients);
        checkup.run("pods", &["running", "conntrack"], async || way.try_from_pods(clients).await).await;
    } else {
        checkup.add("rules", Outcome::Skipped("--redirect=off".to_owned()));
    }
    checkup.add("firewall", agent_port(config, &rules));
}

/// The ports of the flags and those that the running server has from its cluster's ConfigMap.
pub(super) fn tunnelled(flags: &BTreeSet<u16>, running: Option<&Running<StatusReport>>) -> Vec<u16> {
    let running = running.into_iter().flat_map(|running| &running.status.redirect.ports);
    flags.iter().chain(running).copied().collect::<BTreeSet<u16>>().into_iter().collect()
}

/// Compares the number of tracked connections with its limit; the kernel has both per network namespace.
fn conntrack() -> Outcome {
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(format!("{CONNTRACK}{name}")).ok()?.trim().parse().ok()
    };
    let (Some(count), Some(max)) = (number("count"), number("max")) else {
        return Outcome::fine("connections are not tracked");
    };
    // Connections that end just now may have made room for a moment.
    if max > 0 && count >= max - max / 50 {
        let found = format!("nf_conntrack_count is {count}, nf_conntrack_max {max}");
        let fix = format!(
            "sysctl -w net.netfilter.nf_conntrack_max={} (of the host, not of a container), and see what fills it: `conntrack -L | \
             awk '{{print $1, $4}}' | sort | uniq -c`",
            max.saturating_mul(2)
        );
        return Finding::new(&codes::CONNTRACK_FULL, found, fix).into();
    }
    Outcome::fine(format!("{count} of {max} connections"))
}

/// Inputs of the checks of redirected connections.
struct Way<'a> {
    config: &'a Config,
    rules: &'a Rules,
    /// The ranges of virtual addresses that the running server redirects to, each with an address at which it closes
    /// every connection.
    virtual_addresses: Vec<(IpNet, IpAddr)>,
    /// The tunnelled ports.
    ports: Vec<u16>,
}

fn virtual_addresses(config: &Config, v4: bool, v6: bool) -> Vec<(IpNet, IpAddr)> {
    let (range, range_v6) = (config.redirect.ranges.redirect_range, config.redirect.ranges.redirect_range_v6);
    let (virtual_address, virtual_address_v6) = SelfTestAddresses::never_an_origin(range, range_v6);
    let v4 = v4.then(|| (range.into(), virtual_address.into()));
    let v6 = v6.then(|| (range_v6.into(), virtual_address_v6.into()));
    [v4, v6].into_iter().flatten().collect()
}

impl Way<'_> {
    fn read(&self) -> String {
        match (&self.rules.with[..], &self.rules.unread[..]) {
            ([], unread) => format!("rules were not read: {}", unread.join("; ")),
            (with, []) => format!("rules read with {}", with.join(", ")),
            (with, unread) => format!("rules read with {}; {}", with.join(", "), unread.join("; ")),
        }
    }

    /// Also returns the failed ports.
    async fn try_from_host(&self) -> (Outcome, BTreeSet<u16>) {
        let (mut faults, mut ports) = (Vec::new(), BTreeSet::new());
        for (range, virtual_address) in &self.virtual_addresses {
            let failed = trial::from_here(*virtual_address, &self.ports).await;
            faults.extend(self.taken(*range, &failed, "this host", None));
            ports.extend(failed.iter().map(|(port, _)| *port));
        }
        faults.extend(self.pod_ports().await);
        let count = self.ports.len();
        let fine =
            format!("each of {count} tunnelled ports leads from this host to the server; {}", self.read());
        (Outcome::of(faults, fine), ports)
    }

    /// Looks at the rules only: a server that is not running cannot be reached.
    fn untried(&self) -> Outcome {
        if self.rules.with.is_empty() {
            return Outcome::Skipped(self.read());
        }
        let unknown = |port: &u16| (*port, "not tried: the server does not run".to_owned());
        let failed: Vec<Failure> = self.ports.iter().map(unknown).collect();
        let RedirectRanges { redirect_range, redirect_range_v6, .. } = self.config.redirect.ranges;
        let ranges: [IpNet; 2] = [redirect_range.into(), redirect_range_v6.into()];
        let suspects = |range: IpNet| {
            let named = failed.iter().filter(move |(port, _)| !self.rules.takers(range, *port).is_empty());
            self.taken(range, &named.cloned().collect::<Vec<_>>(), "this host", None)
        };
        let faults: Vec<Finding> = ranges.into_iter().flat_map(suspects).collect();
        Outcome::of(faults, format!("none takes the tunnelled ports; {}", self.read()))
    }

    /// Returns findings for failed connections, by the rule that may have taken or dropped them. Without a code, the
    /// rule's owner determines code and fix.
    fn taken(
        &self,
        range: IpNet,
        failed: &[Failure],
        from: &str,
        code: Option<&'static Code>,
    ) -> Vec<Finding> {
        let mut by_rule: BTreeMap<Option<Suspect>, Vec<&Failure>> = BTreeMap::new();
        for failure in failed {
            let suspect = self.rules.takers(range, failure.0).into_iter().min();
            let suspect = suspect.or_else(|| self.rules.dropper(Hook::Output, Some(range), failure.0));
            by_rule.entry(suspect).or_default().push(failure);
        }
        let finding = |(suspect, failed): (Option<Suspect>, Vec<&Failure>)| {
            let leave_out = leave_out(self.rules, suspect.as_ref(), range);
            let ports = list(failed.iter().map(|(port, _)| *port));
            let how = failed.first().map_or("", |(_, reason)| reason);
            let Some(suspect) = suspect else {
                let found =
                    format!("port {ports} of the virtual addresses, from {from}: {how}; {}", self.read());
                return Finding::new(code.unwrap_or(&codes::FOREIGN_RULES), found, leave_out);
            };
            let owner = if code.is_none() { owner(&suspect, &ports) } else { None };
            let (code, fix) = owner.unwrap_or((code.unwrap_or(&codes::FOREIGN_RULES), leave_out));
            let found = format!("{} (from {from}: {how})", suspect.shown(&format!("takes port {ports}")));
            Finding::new(code, found, fix)
        };
        by_rule.into_iter().map(finding).collect()
    }

    /// Edge pods are reached at any port, so this tries the ports that some rule sends elsewhere.
    async fn pod_ports(&self) -> Vec<Finding> {
        let mut faults = Vec::new();
        for (range, virtual_address) in
            self.virtual_addresses.iter().filter(|_| !self.config.redirect.edge_pod_routes.is_empty())
        {
            let named = self.rules.ports_taken(*range);
            let ports: Vec<u16> =
                named.into_iter().filter(|port| !self.ports.contains(port)).take(MOST_PORTS).collect();
            let failed = trial::from_here(*virtual_address, &ports).await;
            faults.extend(self.taken(*range, &failed, "this host", Some(&codes::POD_PORT_TAKEN)));
        }
        faults
    }

    async fn try_from_pods(&self, clients: &[IpNet]) -> Outcome {
        if self.ports.is_empty() {
            return Outcome::Skipped(
                "no tunnelled port leads from this host itself to the server".to_owned(),
            );
        }
        let (mut faults, mut tried, mut reasons) = (Vec::new(), Vec::new(), Vec::new());
        if let Some(rule) = self.rules.calicos_drop() {
            let found = format!("Calico drops what pods send to this host: {rule}");
            let fix = "kubectl patch felixconfigurations.crd.projectcalico.org default --type=merge --patch \
                       '{\"spec\":{\"defaultEndpointToHostAction\":\"Accept\"}}'";
            faults.push(Finding::new(&codes::PODS_FILTERED, found, fix));
        }
        for (range, virtual_address) in &self.virtual_addresses {
            let of_family = clients.iter().filter(|pods| pods.addr().is_ipv4() == range.addr().is_ipv4());
            for pods in of_family {
                match trial::from_pod(*pods, *virtual_address, self.ports.clone()).await {
                    Ok((address, failed)) => {
                        faults.extend(self.of_pods(*range, *pods, &failed));
                        tried.push(address.to_string());
                        // One pod per family is enough.
                        break;
                    }
                    Err(reason) => reasons.push(reason),
                }
            }
        }
        if !faults.is_empty() {
            return Outcome::Faults(faults);
        }
        match (&tried[..], &reasons[..]) {
            ([], []) => Outcome::Skipped("no range of this host's pods is known".to_owned()),
            ([], _) => Outcome::Skipped(format!(
                "not tried: {}; run `tunnel-server doctor` as root on the host itself",
                reasons.join("; ")
            )),
            _ => Outcome::fine(format!("a pod with the address {} reaches the server", tried.join(", "))),
        }
    }

    /// Returns findings for failed connections from pods.
    fn of_pods(&self, range: IpNet, pods: IpNet, failed: &[Failure]) -> Vec<Finding> {
        let (taken, lost): (Vec<Failure>, Vec<Failure>) =
            failed.iter().cloned().partition(|(port, _)| !self.rules.takers(range, *port).is_empty());
        let mut faults = self.taken(range, &taken, "a pod", None);
        if let Some((port, how)) = lost.first() {
            let ports = list(lost.iter().map(|(port, _)| *port));
            let from = format!("from a pod of {pods} to port {ports} of the virtual addresses: {how}");
            let (found, fix) = match self.rules.dropper(Hook::Input, Some(range), *port) {
                Some(suspect) => {
                    (suspect.shown(&format!("drops it ({from})")), self.admit(&suspect, pods, range))
                }
                None => (format!("{from}; {}", self.read()), iptables("", "INPUT", pods, range)),
            };
            faults.push(Finding::new(&codes::PODS_FILTERED, found, fix));
        }
        faults
    }

    /// Returns the command that admits pods, for the tool that made the rule.
    fn admit(&self, suspect: &Suspect, pods: IpNet, virtual_addresses: IpNet) -> String {
        let Suspect { table, base, .. } = suspect;
        let is_ufws = |chain: &str| chain.starts_with("ufw");
        if self.rules.has_chain(table, is_ufws) {
            return format!("ufw allow proto tcp from {pods} to {virtual_addresses}");
        }
        if table.ends_with(" firewalld") {
            return format!(
                "firewall-cmd --permanent --zone=trusted --add-source={pods} && firewall-cmd --reload"
            );
        }
        match table.split_once(' ') {
            Some((_, "filter")) if base == "INPUT" => iptables("", base, pods, virtual_addresses),
            Some((_, name @ ("raw" | "mangle" | "security"))) if *base == base.to_uppercase() => {
                iptables(&format!("-t {name} "), base, pods, virtual_addresses)
            }
            _ => {
                let family = if virtual_addresses.addr().is_ipv4() { "ip" } else { "ip6" };
                format!(
                    "nft insert rule {table} {base} {family} saddr {pods} {family} daddr {virtual_addresses} meta l4proto tcp accept"
                )
            }
        }
    }
}

fn iptables(table: &str, chain: &str, pods: IpNet, virtual_addresses: IpNet) -> String {
    let tool = if virtual_addresses.addr().is_ipv6() { "ip6tables" } else { "iptables" };
    format!("{tool} {table}-I {chain} -s {pods} -d {virtual_addresses} -p tcp -j ACCEPT")
}

/// Returns the code of the rule's owner, if it is known, and the fix that frees the port.
fn owner(suspect: &Suspect, ports: &str) -> Option<(&'static Code, String)> {
    let of_port = |name: &str| {
        name.strip_prefix("TUNNEL-PORT-").is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let (table, chain) = (&suspect.table, suspect.chain.as_str());
    if of_port(chain) {
        let fix = "kubectl -n kube-system delete deployment yurt-tunnel-server, and on this host `iptables-save -t nat | grep -v \
                   TUNNEL-PORT | iptables-restore -T nat`";
        return Some((&codes::YURTTUNNEL_RULES, fix.to_owned()));
    }
    if chain == "TUNNEL-PORT" || chain.starts_with("EDGE-MESH") {
        let fix = "switch CloudCore's iptablesManager off (`modules.iptablesManager.enable: false`), or leave its port out of \
                   --redirect-ports; stop it for good, then remove its rules: `iptables -t nat -D OUTPUT -p tcp -j TUNNEL-PORT`, \
                   `iptables -t nat -F TUNNEL-PORT`";
        return Some((&codes::KUBEEDGE_RULES, fix.to_owned()));
    }
    if chain.starts_with("KUBE-") || table.ends_with(" kube-proxy") {
        let fix = format!(
            "a NodePort is {ports}: give that Service another one (`kubectl get services -A | grep {ports}`), or leave the port \
             out of --redirect-ports"
        );
        return Some((&codes::KUBE_PROXY_RULES, fix));
    }
    None
}

/// Returns the fix that exempts the virtual addresses from rules for local addresses: from all of iptables', or from
/// the nft table.
fn leave_out(rules: &Rules, suspect: Option<&Suspect>, virtual_addresses: IpNet) -> String {
    let commands: Vec<String> =
        match suspect.map(|suspect| &*suspect.table).filter(|table| !is_iptables(table)) {
            None => {
                let tool = if virtual_addresses.addr().is_ipv6() { "ip6tables" } else { "iptables" };
                let command =
                    |chain: &str| format!("`{tool} -t nat -I {chain} -d {virtual_addresses} -j RETURN`");
                ["OUTPUT", "PREROUTING"].map(command).to_vec()
            }
            Some(table) => {
                let family = if virtual_addresses.addr().is_ipv6() { "ip6" } else { "ip" };
                let command = |chain: &str| {
                    format!("`nft insert rule {table} {chain} {family} daddr {virtual_addresses} return`")
                };
                rules.nat_bases(table).map(command).collect()
            }
        };
    format!(
        "remove the rule, limit it to its own addresses, or exclude the redirect range from it, such as by {}",
        commands.join(" and ")
    )
}

/// True for one of iptables' tables, which iptables-nft keeps in nft.
fn is_iptables(table: &str) -> bool {
    let name = table.strip_prefix("ip ").or_else(|| table.strip_prefix("ip6 "));
    matches!(name, Some("filter" | "nat" | "mangle" | "raw" | "security"))
}

fn list(ports: impl Iterator<Item = u16>) -> String {
    let ports: Vec<String> = ports.map(|port| port.to_string()).collect();
    let left = ports.len().saturating_sub(SHOWN);
    let more = if left > 0 { format!(" and {left} more") } else { String::new() };
    format!("{}{more}", ports[..ports.len() - left].join(","))
}

/// Checks the rules for the agent port. Agents connect from anywhere, so their path cannot be tried from here.
fn agent_port(config: &Config, rules: &Rules) -> Outcome {
    let Some(port) = config.listeners.agents.port else {
        return Outcome::Skipped("there is no agent port".to_owned());
    };
    if rules.with.is_empty() {
        return Outcome::Skipped(rules.unread.join("; "));
    }
    let bind = config.listeners.common.bind_address;
    // A listener on `::` is reached over IPv4 as well.
    let families: &[bool] = if !bind.is_ipv6() {
        &[false]
    } else if bind.is_unspecified() {
        &[false, true]
    } else {
        &[true]
    };
    let closed = families.iter().find_map(|v6| {
        let to: IpNet = match (bind.is_unspecified(), v6) {
            (false, _) => bind.into(),
            (true, false) => "0.0.0.0/0".parse().ok()?,
            (true, true) => "::/0".parse().ok()?,
        };
        rules.closes(Some(to), port)
    });
    match closed {
        Some(suspect) => {
            let tool = if suspect.table.starts_with("ip6 ") { "ip6tables" } else { "iptables" };
            let fix =
                format!("{tool} -I INPUT -p tcp --dport {port} -j ACCEPT (or the firewall's own command)");
            let found = suspect.shown("and no rule accepts the agent port");
            Finding::new(&codes::AGENT_PORT_FILTERED, found, fix).into()
        }
        None => Outcome::fine(format!(
            "nothing is known to close the agent port (read with {})",
            rules.with.join(", ")
        )),
    }
}

/// Logs which rules of this host take connections to edge pods. `ipv6` is true if IPv6 connections are redirected too.
pub(crate) async fn warn_of_taken_pod_ports(config: &Config, ipv6: bool) {
    let Ok(rules) = Rules::read(&[], &config.process.state_dir).await else { return };
    if rules.with.is_empty() {
        tracing::warn!(
            reason = rules.unread.join("; "),
            "failed to check for rules (hostPorts, NodePorts, published ports) that take connections to edge pods"
        );
        return;
    }
    let way = Way {
        config,
        rules: &rules,
        virtual_addresses: virtual_addresses(config, true, ipv6),
        ports: config.redirect.redirect_ports.iter().copied().collect(),
    };
    for finding in way.pod_ports().await {
        tracing::warn!(
            reason = finding.found,
            fix = finding.fix,
            "rule of another program takes connections to edge pods"
        );
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A server that reports these ports; a server of an earlier version reports none.
    pub(in crate::doctor) fn running(ports: Option<&[u16]>) -> Running<StatusReport> {
        let mut status = serde_json::json!({
            "version": "1", "server_id": "s", "uptime_s": 1, "ready": true, "pending": [], "nodes": [], "listeners": [],
            "redirect": {"state": "on", "reason": null, "mended": 0, "counters": {}, "routes": 1, "routes_down": 0,
                         "excluded": 0, "programs": []},
            "inventory": {"source": "f", "edge": 0, "cloud": 0, "last_error": null, "conflicts": []},
        });
        if let Some(ports) = ports {
            status["redirect"]["ports"] = ports.into();
        }
        let status = serde_json::from_value(status).unwrap();
        Running { status, pending: None, metrics: String::new(), flags: None }
    }

    #[test]
    fn ports_of_the_configmap_are_examined_too() {
        let ports = |reported| tunnelled(&BTreeSet::from([10250, 10255]), Some(&running(reported)));
        assert_eq!(ports(None), [10250, 10255]);
        assert_eq!(ports(Some(&[9200, 10250])), [9200, 10250, 10255]);
        assert_eq!(tunnelled(&BTreeSet::from([10250]), None), [10250]);
    }
}
