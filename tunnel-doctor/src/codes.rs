//! All codes. docs/operate/troubleshooting.md has a section for each; a test compares the two.

use super::code::{Code, Severity};

macro_rules! codes {
    ($($name:ident = $id:literal $severity:ident $meaning:literal;)*) => {
        $(pub static $name: Code = Code { id: $id, severity: Severity::$severity, meaning: $meaning };)*

        /// All codes, in the order of the checks.
        pub static ALL: &[&Code] = &[$(&$name),*];
    };
}

codes! {
    // Both programs.
    BAD_FLAGS = "bad-flags" Broken "the program does not start with these flags";
    NOT_RUNNING = "not-running" Broken "no program answers on the admin address, so what follows is checked from outside only";
    NOT_READY = "not-ready" Broken "the program runs, but waits for something before it can serve";
    STATE_DIRECTORY_UNUSABLE = "state-directory-unusable" Broken "keys, certificates and tokens cannot be kept";
    KEY_READABLE_BY_OTHERS = "key-readable-by-others" Warning "another user of this host can act in this program's name";
    NAME_DOES_NOT_RESOLVE = "name-does-not-resolve" Broken "whoever is behind this name is not reached";
    API_SERVER_UNREACHABLE = "api-server-unreachable" Broken "nodes, certificates and settings stay as they were last known";
    API_RIGHT_MISSING = "api-right-missing" Broken "the API server refuses what this program has to read or write";
    CLOCK_SKEW = "clock-skew" Broken "certificates of the other end count as not yet valid, or as expired";
    MEMORY_LIMIT_UNSEEN = "memory-limit-unseen" Warning "what is bounded by memory is bounded by the machine's, so the kernel may kill the program at its pod's limit";

    // The server's host.
    NO_PROGRAMS = "no-programs" Broken "this binary was built without its eBPF programs and cannot redirect";
    KERNEL_LACKS_FEATURE = "kernel-lacks-feature" Broken "the redirect does not start on this kernel";
    KERNEL_OLD = "kernel-old" Warning "connects to a node without a tunnel are accepted and then reset, instead of failing";
    CAPABILITY_MISSING = "capability-missing" Broken "programs, maps and routes can neither be loaded nor examined";
    CGROUP_UNUSABLE = "cgroup-unusable" Broken "the redirect has no cgroup to attach to";
    FOREIGN_EXCLUSIVE_PROGRAM = "foreign-exclusive-program" Broken "another program forbids every further one at this hook";
    FOREIGN_SK_LOOKUP = "foreign-sk-lookup" Warning "another program may take or drop redirected connections";
    CONNTRACK_FULL = "conntrack-full" Broken "new connections of this host fail, redirected ones too";
    YURTTUNNEL_RULES = "yurttunnel-rules" Broken "YurtTunnel's rules still take the tunnelled ports";
    KUBEEDGE_RULES = "kubeedge-rules" Broken "KubeEdge's rules take the tunnelled ports";
    KUBE_PROXY_RULES = "kube-proxy-rules" Broken "kube-proxy takes a tunnelled port for a Service's";
    FOREIGN_RULES = "foreign-rules" Broken "rules of another program take the tunnelled ports";
    PODS_FILTERED = "pods-filtered" Broken "this host reaches edge nodes, and its pods do not";
    REDIRECT_ROUTE_MISSING = "redirect-route-missing" Broken "redirected connects leave this host instead of reaching the server";
    REDIRECT_RANGE_USED = "redirect-range-used" Broken "the addresses of somebody else's network become this host's own";
    REDIRECT_DEGRADED = "redirect-degraded" Broken "the server's connection to itself through the hooks failed";
    CONNECTS_LOST = "connects-lost" Warning "connections were redirected, and never arrived at the server";
    MAPS_NOT_CURRENT = "maps-not-current" Broken "the kernel redirects by an older state of the nodes";
    NOT_PINNED = "not-pinned" Warning "when the server is killed, connects to edge nodes bypass the tunnel instead of being refused";
    PROGRAMS_LEFT_BEHIND = "programs-left-behind" Warning "programs of a server that was killed are still in the kernel";
    KUBELET_BY_NAME = "kubelet-by-name" Broken "kube-apiserver looks the node's name up and does not find its address: kubectl logs and exec fail";
    PORT_TAKEN = "port-taken" Broken "the server cannot listen where its flags say";
    LISTENER_SILENT = "listener-silent" Broken "a listener that the server has opened is not reached from this host";
    CA_UNUSABLE = "ca-unusable" Broken "no certificate can be issued or verified";
    CA_EXPIRES = "ca-expires" Warning "once the root has expired, only Postern's programs accept its certificates";
    SERVER_CERTIFICATE_UNTRUSTED = "server-certificate-untrusted" Broken "agents refuse this server";
    INVENTORY_UNUSABLE = "inventory-unusable" Broken "the server has no nodes, or only earlier ones";
    NO_EDGE_NODES = "no-edge-nodes" Warning "nothing is redirected: no node is taken for an edge node";
    INVENTORY_CONFLICT = "inventory-conflict" Warning "some addresses do not lead to the node that names them";
    KUBELET_NOT_TUNNELLED = "kubelet-not-tunnelled" Warning "connections to a kubelet are not redirected: kubectl logs and exec of its node fail";

    // The agent's node.
    NOT_ENROLLED = "not-enrolled" Broken "the agent has no certificate and nothing to get one with";
    IDENTITY_UNUSABLE = "identity-unusable" Broken "the agent cannot use the certificate that it has";
    IDENTITY_OF_ANOTHER_NODE = "identity-of-another-node" Broken "the certificate names another node than this one";
    CERTIFICATE_EXPIRED = "certificate-expired" Broken "servers refuse this agent";
    RENEWAL_OVERDUE = "renewal-overdue" Warning "the certificate should have been renewed and was not";
    PROXY_UNREACHABLE = "proxy-unreachable" Broken "the HTTP proxy on the way to the servers does not answer";
    PROXY_REFUSES = "proxy-refuses" Broken "the HTTP proxy does not pass the connection on";
    PROXY_CUTS_IDLE = "proxy-cuts-idle" Warning "links end, with all connections on them, whenever nothing is sent for some seconds";
    SERVER_UNREACHABLE = "server-unreachable" Broken "no connection with this server";
    HANDSHAKE_SILENT = "handshake-silent" Broken "the connection is accepted and then nobody answers";
    MTU_BLACK_HOLE = "mtu-black-hole" Broken "large packets are lost on the way, and small ones pass";
    NOT_A_TUNNEL_SERVER = "not-a-tunnel-server" Broken "something else answers at the server's address";
    TLS_INTERCEPTED = "tls-intercepted" Broken "something on the way opens TLS and shows a certificate of its own";
    CA_MISMATCH = "ca-mismatch" Broken "a tunnel-server answers, but of another CA than the one that this agent trusts";
    NOT_ATTACHED = "not-attached" Broken "the agent runs, and no server has it attached";
    SESSION_REFUSED = "session-refused" Broken "a server refuses this agent";
    KUBELET_SILENT = "kubelet-silent" Warning "the tunnel leads to a node whose kubelet does not answer";
    KUBELET_NOT_ALLOWED = "kubelet-not-allowed" Warning "this agent's policy does not let the servers reach the kubelet";

    // Path to a node, checked by `tunnel-server test NODE`.
    NODE_UNKNOWN = "node-unknown" Broken "connects to this node are not redirected, and its agent is refused";
    NODE_WITHOUT_TUNNEL = "node-without-tunnel" Broken "connects to this node fail at once";
    KUBELET_UNEXPECTED = "kubelet-unexpected" Broken "kubectl logs and exec fail, or whoever answers is not this node's kubelet";
    PORT_NOT_REACHED = "port-not-reached" Warning "a tunnelled port of this node is not reached";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::book::Page;
    use super::super::book::tests::text;
    use super::ALL;

    #[test]
    fn each_code_has_its_section_in_the_docs_and_each_section_its_code() {
        let text = text(Page::Troubleshooting);
        let sections: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("### ")).collect();
        let codes: Vec<&str> = ALL.iter().map(|code| code.id).collect();
        assert_eq!(sections, codes, "the same codes in the same order");
        assert_eq!(codes.iter().collect::<BTreeSet<_>>().len(), codes.len(), "a code is there twice");
        for section in text.split("\n### ").skip(1) {
            let body = section.lines().skip(1).take_while(|line| !line.starts_with('#'));
            assert!(body.map(str::len).sum::<usize>() > 80, "too little is said about {section}");
        }
        for code in &codes {
            assert!(code.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{code} is no anchor");
        }
    }
}
