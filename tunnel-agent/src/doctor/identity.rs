//! Checks the key, the certificate and the roots on disk.

use std::path::Path;
use std::time::SystemTime;

use tunnel_doctor::{Checkup, Finding, Outcome, codes, private_file, validity_of};
use tunnel_pki::enrol::stored_identity;
use tunnel_pki::{AgentIdentity, Holder, IdentityError};
use tunnel_runtime::NodeName;

use crate::config::Config;

/// Percentage of the certificate's lifetime after which a renewal is overdue. The agent renews after 80 %.
const OVERDUE_PERCENT: u32 = 90;
const AGAIN: &str =
    "tunnel-server token create --node NAME, and start the agent once with the command that it prints";
/// The same for an agent that enrols with the API server, which takes no token.
const AGAIN_IN_A_CLUSTER: &str =
    "the agent enrols again by itself; if it does not, look at `kubectl get csr` and at the log of its pod";

/// Returns the identity if there is a usable one.
pub(super) async fn check(checkup: &mut Checkup, config: &Config, now: SystemTime) -> Option<AgentIdentity> {
    let mut held = None;
    let dir = &config.given.state_dir;
    checkup
        .run("certificate", &["state directory"], async || match stored_identity(dir, Holder::Agent) {
            Ok(None) => not_enrolled(config),
            Ok(Some(identity)) => {
                let outcome = judge(&identity, &config.node_name, again(config), now);
                held = Some(identity);
                outcome
            }
            Err(error) => unusable(dir, &error, again(config)).into(),
        })
        .await;
    held
}

const fn again(config: &Config) -> &'static str {
    if config.kube.is_some() { AGAIN_IN_A_CLUSTER } else { AGAIN }
}

fn unusable(dir: &Path, error: &IdentityError, again: &str) -> Finding {
    // A key that others may read is not used.
    if let Some(readable) = private_file(&dir.join("agent.key")) {
        return readable;
    }
    let fix = format!(
        "restore the file from a backup; else move agent.key, agent.crt and ca.crt out of {} and enrol again: {again}",
        dir.display()
    );
    Finding::new(&codes::IDENTITY_UNUSABLE, error.to_string(), fix)
}

fn not_enrolled(config: &Config) -> Outcome {
    if config.kube.is_some() {
        return Outcome::fine("none yet: the API server's CertificateSigningRequests give one");
    }
    if config.token.is_some() {
        return Outcome::fine("none yet: the token gives one");
    }
    let found = format!("no certificate in {}, and no --token", config.given.state_dir.display());
    Finding::new(&codes::NOT_ENROLLED, found, AGAIN.replace("NAME", config.node_name.as_str())).into()
}

fn judge(identity: &AgentIdentity, node: &NodeName, again: &str, now: SystemTime) -> Outcome {
    let mut faults = Vec::new();
    if identity.node != *node {
        let found = format!("the certificate is for {}, and this node is {node}", identity.node);
        let fix = format!(
            "if this state directory was copied, remove it, then: {again}; if the node was renamed, start with --node-name={}",
            identity.node
        );
        faults.push(Finding::new(&codes::IDENTITY_OF_ANOTHER_NODE, found, fix));
    }
    let validity = identity.validity;
    if let Some(reason) = validity_of(&validity, now) {
        let (code, fix) = if validity.is_over(now) {
            (
                &codes::CERTIFICATE_EXPIRED,
                format!("if `date -u` is right: {}", again.replace("NAME", node.as_str())),
            )
        } else {
            (&codes::CLOCK_SKEW, "timedatectl set-ntp true: this host's clock is behind".to_owned())
        };
        faults.push(Finding::new(code, format!("the certificate is {reason}"), fix));
    } else if now > validity.issued() + validity.life() * OVERDUE_PERCENT / 100 {
        let found = format!(
            "more than {OVERDUE_PERCENT} % of the certificate's life are over; it is renewed after 80 %"
        );
        let fix = "the agent's log says why no server renews it: `journalctl -u postern-agent@a | grep -i renew`, or its pod's";
        faults.push(Finding::new(&codes::RENEWAL_OVERDUE, found, fix));
    }
    let left = validity.not_after.duration_since(now).unwrap_or_default().as_secs();
    Outcome::of(faults, format!("of {}, expires in {}", identity.node, tunnel_runtime::text::age(left)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::super::tests::{Ca, agent};
    use super::*;

    fn codes_of(outcome: Outcome) -> Vec<&'static str> {
        match outcome {
            Outcome::Faults(findings) => findings.iter().map(|finding| finding.code).collect(),
            Outcome::Fine(_) => Vec::new(),
            Outcome::Skipped(_) => vec!["skipped"],
        }
    }

    #[test]
    fn an_identity_is_judged_by_its_node_and_its_time() {
        let (ca, now) = (Ca::new(), SystemTime::now());
        let day = Duration::from_secs(86_400);
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        let identity = agent(&ca, "edge-1", now, now + 30 * day);
        let judged = |name: &str, at: SystemTime| codes_of(judge(&identity, &node(name), AGAIN, at));
        assert_eq!(judged("edge-1", now + day), [""; 0]);
        assert_eq!(judged("edge-2", now + day), ["identity-of-another-node"]);
        assert_eq!(judged("edge-1", now + 28 * day), ["renewal-overdue"]);
        assert_eq!(judged("edge-1", now + 31 * day), ["certificate-expired"]);
        assert_eq!(judged("edge-1", now - day), ["clock-skew"]);
    }

    #[test]
    fn files_that_do_not_fit_are_named() {
        let (ca, now) = (Ca::new(), SystemTime::now());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let load = |path| stored_identity(path, Holder::Agent);
        assert!(load(path).unwrap().is_none());
        let write = |identity: &AgentIdentity| {
            fs::write(path.join("agent.crt"), tunnel_pki::pem_of_certificates(&identity.chain)).unwrap();
            fs::write(path.join("ca.crt"), identity.bundle.to_pem()).unwrap();
            let key = tunnel_pki::PrivateKey::from_der(&identity.key).unwrap();
            let file = path.join("agent.key");
            fs::write(&file, key.to_pem().as_bytes()).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        };
        let life = Duration::from_secs(9 * 86_400);
        write(&agent(&ca, "edge-1", now, now + life));
        assert_eq!(load(path).unwrap().unwrap().node.as_str(), "edge-1");
        fs::set_permissions(path.join("agent.key"), fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(unusable(path, &load(path).unwrap_err(), AGAIN).code, "key-readable-by-others");
        fs::set_permissions(path.join("agent.key"), fs::Permissions::from_mode(0o600)).unwrap();
        let other = agent(&ca, "edge-1", now, now + life);
        fs::write(path.join("agent.crt"), tunnel_pki::pem_of_certificates(&other.chain)).unwrap();
        let error = load(path).unwrap_err();
        assert_eq!(unusable(path, &error, AGAIN).code, "identity-unusable");
        let error = error.to_string();
        assert!(error.contains("agent.key") && error.contains("it is not the certificate's key"), "{error}");
        fs::remove_file(path.join("agent.key")).unwrap();
        assert!(load(path).unwrap_err().to_string().contains("no such file"));
        fs::write(path.join("ca.crt"), "nothing").unwrap();
        assert!(load(path).unwrap_err().to_string().contains("ca.crt"));
    }
}
