//! Checks that connections pass this host's firewall: tries them, and names the rules that may have taken failed ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use tunnel_doctor::{Checkup, Code, Finding, Outcome, Running, codes};
use tunnel_redirect::SelfTestAddresses;

use super::rules::{Line, Rules, Suspect};
use super::trial::{self, Failure};
use crate::config::Config;
use crate::status::{PodsWay, StatusReport};

/// A range of virtual addresses or of edge nodes' addresses, and an address of it.
type To = (IpNet, trial::To);

/// Name of the listeners whose addresses show which address families are redirected.
const REDIRECT: &str = "redirect";
/// Maximum number of ports, and of suspects, that a finding shows.
const SHOWN: usize = 10;
const SUSPECTS: usize = 3;
const CONNTRACK: &str = "/proc/sys/net/netfilter/nf_conntrack_";

pub(super) async fn check(
    checkup: &mut Checkup,
    config: &Config,
    running: Option<&Running<StatusReport>>,
    files: &[PathBuf],
) {
    checkup.add("conntrack", conntrack());
    if !config.redirects {
        return checkup.add("rules", Outcome::Skipped("--redirect=off".to_owned()));
    }
    let rules = match Rules::read(files, &config.process.state_dir).await {
        Ok(rules) => rules,
        Err(reason) => return checkup.add("rules", Outcome::Skipped(reason)),
    };
    let mut firewall = FirewallCheck {
        rules: &rules,
        virtual_addresses: virtual_addresses(config, running),
        nodes: running
            .filter(|running| running.status.redirect.pods == PodsWay::Route)
            .map(|running| nodes_by_route(config, &running.status)),
        ports: tunnelled(&config.redirect.redirect_ports, running),
    };
    checkup.run("rules", &["running", "conntrack"], async || firewall.try_from_host().await).await;
    let clients = running.map_or(&[][..], |running| &running.status.redirect.clients);
    checkup.run("pods", &["running", "conntrack"], async || firewall.try_from_pods(clients).await).await;
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

/// The ranges of virtual addresses that the running server redirects to.
fn virtual_addresses(config: &Config, running: Option<&Running<StatusReport>>) -> Vec<To> {
    let (v4, v6) = (config.redirect.ranges.redirect_range, config.redirect.ranges.redirect_range_v6);
    let (address, address_v6) = SelfTestAddresses::never_an_origin(v4, v6);
    let listeners = running.into_iter().flat_map(|running| &running.status.listeners);
    let redirected = |range: &IpNet| {
        let of_range = |listener: IpAddr| listener.is_ipv4() == range.addr().is_ipv4();
        listeners.clone().any(|listener| listener.name == REDIRECT && of_range(listener.address.ip()))
    };
    let to = trial::To::Virtual;
    let ranges: [To; 2] = [(v4.into(), to(address.into())), (v6.into(), to(address_v6.into()))];
    ranges.into_iter().filter(|(range, _)| redirected(range)).collect()
}

/// Of each family an edge node that has a tunnel, and whose address is led here by route.
fn nodes_by_route(config: &Config, status: &StatusReport) -> Vec<To> {
    let reached = status.nodes.iter().filter(|node| node.connected || !node.via.is_empty());
    let addresses = reached.flat_map(|node| &node.addresses);
    let port = status.redirect.ports.first().copied().unwrap_or_default();
    let of_family = |ipv4: bool| {
        let led_here = |address: &&IpAddr| {
            address.is_ipv4() == ipv4
                && tunnel_redirect::is_led_here((**address, port).into()).unwrap_or(false)
        };
        let address = *addresses.clone().find(led_here)?;
        let named = config.redirect.edge_addresses.iter().find(|range| range.contains(&address));
        Some((named.copied().unwrap_or_else(|| address.into()), trial::To::Node(address)))
    };
    [of_family(true), of_family(false)].into_iter().flatten().collect()
}

/// Inputs of the checks of redirected connections.
struct FirewallCheck<'a> {
    rules: &'a Rules,
    virtual_addresses: Vec<To>,
    /// Edge nodes, if pods' connections are taken by route.
    nodes: Option<Vec<To>>,
    /// The tunnelled ports; later those that are reached from the host.
    ports: Vec<u16>,
}

impl FirewallCheck<'_> {
    async fn try_from_host(&mut self) -> Outcome {
        let (mut faults, count) = (Vec::new(), self.ports.len());
        let mut lost = BTreeSet::new();
        for to in &self.virtual_addresses {
            let failed = trial::from_here(to.1, &self.ports).await;
            faults.extend(self.explain(*to, &failed, None));
            lost.extend(failed.into_iter().map(|(port, _)| port));
        }
        self.ports.retain(|port| !lost.contains(port));
        Outcome::of(faults, format!("each of {count} tunnelled ports leads from this host to the server"))
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
        let (targets, ports) = match &self.nodes {
            // A real connection to a node: one is enough.
            Some(nodes) => (nodes, &self.ports[..1]),
            None => (&self.virtual_addresses, &self.ports[..]),
        };
        for to in targets {
            let of_family = clients.iter().filter(|pods| pods.addr().is_ipv4() == to.1.address().is_ipv4());
            for pods in of_family {
                match trial::from_pod(*pods, to.1, ports.to_vec()).await {
                    Ok((address, failed)) => {
                        faults.extend(self.explain(*to, &failed, Some(*pods)));
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
            ([], []) if targets.is_empty() => {
                Outcome::Skipped("no edge node with a tunnel is led here by route".to_owned())
            }
            ([], []) => Outcome::Skipped("no range of this host's pods is known".to_owned()),
            ([], _) => Outcome::Skipped(format!(
                "not tried: {}; run `tunnel-server doctor` as root on the host itself",
                reasons.join("; ")
            )),
            _ => Outcome::fine(format!("a pod with the address {} reaches the server", tried.join(", "))),
        }
    }

    /// Returns findings for failed connections, one for each list of suspects. `pods` is None if they were this host's.
    fn explain(&self, to: To, failed: &[Failure], pods: Option<IpNet>) -> Vec<Finding> {
        let hooks: &[&str] = if pods.is_some() { &["prerouting", "input"] } else { &["output"] };
        let mut by_suspects: BTreeMap<BTreeSet<Suspect<'_>>, Vec<&Failure>> = BTreeMap::new();
        for failure in failed {
            let suspects = self.rules.suspects(hooks, to.1.address(), failure.0);
            by_suspects.entry(suspects).or_default().push(failure);
        }
        let finding = |(suspects, failed): (BTreeSet<Suspect<'_>>, Vec<&Failure>)| {
            let ports = shown(failed.iter().map(|(port, _)| port), SHOWN, ",");
            let how = failed.first().map_or("", |(_, how)| how);
            let from = pods.map_or("this host".to_owned(), |pods| format!("a pod of {pods}"));
            let lines = match suspects.first() {
                Some(_) => shown(suspects.iter().map(|suspect| suspect.line), SUSPECTS, "; "),
                None => format!("none known; rules: {}", self.rules.with.join(", ")),
            };
            let at = match to.1 {
                trial::To::Virtual(_) => "the virtual addresses".to_owned(),
                trial::To::Node(address) => format!("the edge node's address {address}, by route"),
            };
            let found = format!("port {ports} of {at}, from {from}: {how}; suspects: {lines}");
            let (code, fix) = self.remedy(suspects.first(), &ports, to, pods);
            Finding::new(code, found, fix)
        };
        by_suspects.into_iter().map(finding).collect()
    }

    /// Returns the code of the likeliest line's owner, and what frees the ports.
    fn remedy(
        &self,
        suspect: Option<&Suspect<'_>>,
        ports: &str,
        (range, to): To,
        pods: Option<IpNet>,
    ) -> (&'static Code, String) {
        let address = to.address();
        // A rule that takes a pod's connection would take the host's too.
        let pods = pods.filter(|_| suspect.is_none_or(|suspect| suspect.drops));
        let of_port = suspect.filter(|suspect| !suspect.drops || !suspect.unnamed);
        if pods.is_none()
            && let Some(known) = of_port.and_then(|suspect| owner(suspect.line, ports))
        {
            return known;
        }
        let family = if address.is_ipv4() { "ip" } else { "ip6" };
        let (name, hooks, chains): (_, _, &[&str]) = match pods {
            Some(_) => ("filter", ["prerouting", "input"], &["INPUT"]),
            None => ("nat", ["output", "prerouting"], &["OUTPUT", "PREROUTING"]),
        };
        let unknown = format!("{family} {name}");
        let table = suspect.map_or(&unknown, |suspect| &suspect.line.table);
        let entered = self.rules.entries(&hooks, address).filter(|(of, _)| of == table);
        let chains = suspect.map_or(chains.to_vec(), |_| entered.map(|(_, chain)| chain).collect());
        let admit = shown(chains.iter().map(|chain| admit(table, chain, pods, range)), SHOWN, " && ");
        let Some(pods) = pods else {
            let fix = format!(
                "limit the rule to its own addresses, or exclude the redirect range from it: `{admit}`"
            );
            return (&codes::FOREIGN_RULES, fix);
        };
        let fix = if table.ends_with(" firewalld") {
            format!("firewall-cmd --permanent --zone=trusted --add-source={pods} && firewall-cmd --reload")
        } else {
            admit
        };
        (&codes::PODS_FILTERED, fix)
    }
}

/// Returns the command that lets connections to a range pass, of all clients or of these pods.
fn admit(table: &str, chain: &str, pods: Option<IpNet>, to: IpNet) -> String {
    let (family, tool) = if to.addr().is_ipv4() { ("ip", "iptables") } else { ("ip6", "ip6tables") };
    let from = |word: &str| pods.map_or(String::new(), |pods| format!("{word} {pods} "));
    match table.split_once(' ') {
        Some((_, name @ ("filter" | "nat" | "mangle" | "raw" | "security")))
            if chain == chain.to_uppercase() =>
        {
            format!("{tool} -t {name} -I {chain} {}-d {to} -p tcp -j ACCEPT", from("-s"))
        }
        _ => {
            let from = from(&format!("{family} saddr"));
            format!("nft insert rule {table} {chain} {from}{family} daddr {to} meta l4proto tcp accept")
        }
    }
}

/// Returns the code of a line's owner, if it is known, and the fix that frees the ports.
fn owner(line: &Line, ports: &str) -> Option<(&'static Code, String)> {
    let (place, text) = (&line.place, line.to_string());
    if text.contains("TUNNEL-PORT-") {
        let fix = "kubectl -n kube-system delete deployment yurt-tunnel-server, and on this host `iptables-save -t nat | grep -v \
                   TUNNEL-PORT | iptables-restore -T nat`";
        return Some((&codes::YURTTUNNEL_RULES, fix.to_owned()));
    }
    if place == "TUNNEL-PORT" || place.starts_with("EDGE-MESH") {
        let fix = "switch CloudCore's iptablesManager off (`modules.iptablesManager.enable: false`), or leave its port out of \
                   --redirect-ports; stop it for good, then remove its rules: `iptables -t nat -D OUTPUT -p tcp -j TUNNEL-PORT`, \
                   `iptables -t nat -F TUNNEL-PORT`";
        return Some((&codes::KUBEEDGE_RULES, fix.to_owned()));
    }
    (place.starts_with("KUBE-") || line.table.ends_with(" kube-proxy")).then(|| {
        let fix = format!(
            "a NodePort is {ports}: give that Service another one (`kubectl get services -A | grep {ports}`), or leave the port \
                   out of --redirect-ports"
        );
        (&codes::KUBE_PROXY_RULES, fix)
    })
}

/// Joins the first items, and tells how many more there are.
pub(super) fn shown(items: impl Iterator<Item = impl ToString>, most: usize, between: &str) -> String {
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    let left = items.len().saturating_sub(most);
    let more = if left > 0 { format!(" and {left} more") } else { String::new() };
    format!("{}{more}", items[..items.len() - left].join(between))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that reports these ports; a server of an earlier version reports none.
    fn running(ports: Option<&[u16]>) -> Running<StatusReport> {
        let mut status = serde_json::json!({
            "version": "1", "server_id": "s", "uptime_s": 1, "ready": true, "pending": [], "nodes": [], "listeners": [],
            "redirect": {"state": "on", "reason": null, "mended": 0, "counters": {}, "routes": 1, "routes_down": 0,
                         "excluded": 0},
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
