//! Checks the CA's files, and the server's certificate as an agent sees it.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::net::TcpStream;
use tunnel_doctor::{
    Checkup, Finding, Outcome, Page, Trusted, codes, judge_chain, judge_handshake_error, private_file,
    state_directory, validity_of,
};
use tunnel_pki::{ALPN_GRPC, TrustBundle, presented_chain, validity};

use super::service::reachable;
use crate::config::Config;
use crate::pki::{Ca, KEY_SUFFIX, Lifetimes};
use crate::runtime::role::Role;

const DEADLINE: Duration = Duration::from_secs(10);
/// A rotation takes as long as the slowest agent is away.
const SOON: Duration = Duration::from_secs(90 * 86_400);

pub(super) async fn check(checkup: &mut Checkup, config: &Config, now: SystemTime) {
    let dir = &config.process.state_dir;
    checkup
        .run("state directory", &[], async || {
            let keys = keys(dir);
            let faults =
                state_directory(dir).into_iter().chain(keys.iter().filter_map(|key| private_file(key)));
            Outcome::of(faults.collect(), dir.display().to_string())
        })
        .await;
    if config.role() != Role::Server {
        checkup.add("CA", Outcome::Skipped("a redirector has none".to_owned()));
        return;
    }
    checkup.run("CA", &["state directory"], async || ca(dir, now)).await;
    let own = async || match config.listeners.agents.port {
        Some(port) => {
            let address = SocketAddr::new(config.listeners.common.bind_address, port);
            certificate(reachable(address), dir, now).await
        }
        None => Outcome::Skipped("there is no agent port".to_owned()),
    };
    checkup.run("server certificate", &["running", "CA", "listeners"], own).await;
}

/// The private keys in the state directory.
fn keys(dir: &Path) -> Vec<PathBuf> {
    let below = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_key = |path: &PathBuf| path.to_string_lossy().ends_with(KEY_SUFFIX);
    below(&dir.join("ca")).chain(below(dir)).filter(is_key).collect()
}

fn ca(dir: &Path, now: SystemTime) -> Outcome {
    if !dir.join("ca").exists() {
        return Outcome::Skipped(
            "there is none yet: the first start makes it, or copies the cluster's".to_owned(),
        );
    }
    let state = Ca::open(dir, Lifetimes::default()).and_then(|ca| ca.state());
    let state = match state {
        Ok(state) => state,
        Err(error) => {
            let fix =
                "restore the directory `ca` from its backup (in a cluster: from the Secret tunnel-server-ca)";
            return Finding::new(&codes::CA_UNUSABLE, error.to_string(), fix).into();
        }
    };
    Outcome::of(
        roots(state.bundle(), now),
        format!("{} trusted roots, the one that signs is {}", state.bundle().roots().len(), state.hash()),
    )
}

fn roots(bundle: &TrustBundle, now: SystemTime) -> Vec<Finding> {
    let fault = |(root, hash): (_, String)| {
        let validity = validity(root).ok()?;
        let of_now = || Some(format!("the root {hash} is {}", validity_of(&validity, now)?));
        let soon = || Some(format!("the root {hash}, in 90 days: {}", validity_of(&validity, now + SOON)?));
        let fix =
            format!("tunnel-server ca introduce, then activate and retire ({})", Page::Certificates.url());
        Some(Finding::new(&codes::CA_EXPIRES, of_now().or_else(soon)?, fix))
    };
    bundle.roots().iter().zip(bundle.hashes()).filter_map(fault).collect()
}

/// Checks the certificate that an agent sees.
async fn certificate(address: SocketAddr, dir: &Path, now: SystemTime) -> Outcome {
    let server = address.to_string();
    let handshake = async { presented_chain(TcpStream::connect(address).await?, ALPN_GRPC).await };
    let timeout = || io::Error::new(io::ErrorKind::TimedOut, "no answer in the handshake");
    let chain = tokio::time::timeout(DEADLINE, handshake).await.unwrap_or_else(|_| Err(timeout()));
    let chain = match chain {
        Ok(chain) => chain,
        Err(error) => return judge_handshake_error(&server, &error).into(),
    };
    let bundle = match TrustBundle::from_file(&dir.join("ca/ca.crt")) {
        Ok(bundle) => bundle,
        Err(error) => return Outcome::Skipped(error.to_string()),
    };
    Outcome::of(
        judge_chain(&server, &chain, &Trusted::Roots(bundle), now).into_iter().collect(),
        "agents trust it",
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn codes_of(outcome: Outcome) -> Vec<&'static str> {
        match outcome {
            Outcome::Faults(findings) => findings.iter().map(|finding| finding.code).collect(),
            Outcome::Fine(_) => Vec::new(),
            Outcome::Skipped(_) => vec!["skipped"],
        }
    }

    #[test]
    fn a_ca_that_is_damaged_or_near_its_end_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (path, now) = (dir.path(), SystemTime::now());
        assert_eq!(codes_of(ca(path, now)), ["skipped"]);
        Ca::load_or_create(path, Lifetimes::default()).unwrap();
        assert_eq!(codes_of(ca(path, now)), [""; 0]);
        let years = |years: u64| now + Duration::from_secs(years * 365 * 86_400);
        assert_eq!(codes_of(ca(path, years(10) - Duration::from_secs(10 * 86_400))), ["ca-expires"]);
        assert_eq!(codes_of(ca(path, years(11))), ["ca-expires"]);
        let key = keys(path).pop().unwrap();
        assert_eq!(private_file(&key), None);
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(private_file(&key).unwrap().code, "key-readable-by-others");
        fs::write(path.join("ca/ca.crt"), "-----BEGIN CERTIFICATE-----\n").unwrap();
        assert_eq!(codes_of(ca(path, now)), ["ca-unusable"]);
    }
}
