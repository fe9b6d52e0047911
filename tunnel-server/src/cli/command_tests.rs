//! Tests of `tunnel-server token`, `agent` and `ca` on a state directory.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::Value;
use tunnel_pki::{Holder, PrivateKey, create_csr, public_key_of_csr};

use super::agent::AgentCommand;
use super::ca::CaCommand;
use super::token::TokenCommand;
use crate::pki::{Ca, IssuedLedger, Lifetimes, ServerFile, Token, TokenState, TokenStore};

fn new_ca() -> (tempfile::TempDir, PathBuf, Ca) {
    let directory = tempfile::tempdir().unwrap();
    let state_dir = directory.path().join("server");
    let ca = Ca::load_or_create(&state_dir, Lifetimes::default()).unwrap();
    (directory, state_dir, ca)
}

#[derive(Parser)]
enum Program {
    Agent(AgentCommand),
    Token(TokenCommand),
    Ca(CaCommand),
}

fn run(state_dir: &Path, line: &str) -> Result<String, String> {
    let words = ["tunnel-server"].into_iter().chain(line.split_whitespace());
    let words = words.chain(["--state-dir", state_dir.to_str().unwrap()]);
    let program = Program::try_parse_from(words).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let done = match program {
        Program::Agent(command) => runtime.block_on(command.run_to(&mut out)),
        Program::Token(command) => command.run_to(&mut out).map_err(Into::into),
        Program::Ca(command) => runtime.block_on(command.run_to(&mut out)),
    };
    done.map_err(|error| error.to_string())?;
    Ok(String::from_utf8(out).unwrap())
}

fn run_json(state_dir: &Path, line: &str) -> Value {
    serde_json::from_str(&run(state_dir, &format!("{line} -o json")).unwrap()).unwrap()
}

#[test]
fn token_commands_work_before_the_first_start() {
    let directory = tempfile::tempdir().unwrap();
    let state_dir = directory.path().join("server");
    let made = run_json(&state_dir, "token create --node edge-1 --ttl 2h");
    let text = made["token"].as_str().unwrap();
    let token: Token = text.parse().unwrap();
    let hash = Ca::open(&state_dir, Lifetimes::default()).unwrap().state().unwrap().hash().to_owned();
    assert_eq!(made["ca_hash"], hash);
    assert_eq!(made["server_addresses_known"], false);
    let command = made["command"].as_str().unwrap();
    assert_eq!(
        command,
        format!("tunnel-agent --server SERVER:10262 --node-name edge-1 --token {text} --ca-hash {hash}")
    );
    let (records, _) = TokenStore::new(&state_dir).list().unwrap();
    assert_eq!(records[0].expires.duration_since(records[0].created).as_secs(), 7200);

    ServerFile { agent_addresses: vec!["a.example:1".into(), "b.example:2".into()] }
        .write(&state_dir)
        .unwrap();
    let shown = run(&state_dir, "token create --node edge-2").unwrap();
    assert!(shown.contains("--server a.example:1,b.example:2 ") && shown.contains(&hash), "{shown}");
    assert!(
        shown.contains("\n  tunnel-agent service install --server a.example:1,b.example:2 --node"),
        "{shown}"
    );
    let given = run_json(&state_dir, "token create --node edge-2 --server-address [fd00::1]:10262");
    assert!(given["command"].as_str().unwrap().contains("--server [fd00::1]:10262 "));

    let listed = run(&state_dir, "token list").unwrap();
    assert!(
        listed.contains("edge-1") && listed.contains("valid") && !listed.contains(&text[7..]),
        "{listed}"
    );
    let rows = run_json(&state_dir, "token list");
    assert_eq!(rows.as_array().unwrap().len(), 3);
    assert_eq!(rows[0]["state"], serde_json::to_value(TokenState::Valid).unwrap());
    assert!(!rows.to_string().contains("secret"));

    run(&state_dir, &format!("token revoke {}", token.id())).unwrap();
    assert!(run(&state_dir, &format!("token revoke {}", token.id())).unwrap_err().contains("token list"));
    assert_eq!(run_json(&state_dir, "token list").as_array().unwrap().len(), 2);
}

#[test]
fn token_commands_name_the_flag_of_a_bad_value() {
    let directory = tempfile::tempdir().unwrap();
    let state_dir = directory.path().join("server");
    for (line, parts) in [
        ("token create", ["--node", "--redirector"]),
        ("token create --node edge-1 --redirector cloud-1", ["--node", "--redirector"]),
        ("token create --node Edge_1", ["--node", "Edge_1"]),
        ("token create --node edge-1 --ttl 5", ["--ttl", "not a length of time"]),
        ("token create --node edge-1 --ttl 0s", ["--ttl", "zero"]),
        ("token create --node edge-1 --server-address cloud", ["--server-address", "HOST:PORT"]),
        ("token create --node edge-1 --server-address cloud:0", ["--server-address", "1 to 65535"]),
        ("token create --node edge-1 --server-address fd00::1:80", ["--server-address", "[fd00::1]:10262"]),
    ] {
        let error = run(&state_dir, line).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
    assert!(!state_dir.exists(), "a refused command creates no files");
}

#[test]
fn a_broken_token_file_does_not_hide_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let state_dir = directory.path().join("server");
    let made = run_json(&state_dir, "token create --node edge-1");
    run(&state_dir, "token create --node edge-2").unwrap();
    let path = state_dir.join(format!("tokens/{}.json", made["id"].as_str().unwrap()));
    fs::write(&path, "{}").unwrap();
    let error = run(&state_dir, "token list").unwrap_err();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    run(&state_dir, "token create --node edge-3").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "{}");
}

#[test]
fn ca_commands_rotate() {
    let (_directory, state_dir, ca) = new_ca();
    let node = "edge-1".parse().unwrap();
    let key = public_key_of_csr(&create_csr(&PrivateKey::generate().unwrap()).unwrap()).unwrap();
    let issued = ca.state().unwrap().issue_agent(&node, &key).unwrap();
    IssuedLedger::new(ca.state_dir()).record((Holder::Agent, &node), &issued).unwrap();
    let status = run_json(&state_dir, "ca status");
    assert_eq!(
        (status["roots"][0]["role"].as_str(), status["roots"][0]["nodes"][0].as_str()),
        (Some("issuing"), Some("edge-1"))
    );
    let introduced = run_json(&state_dir, "ca introduce");
    let activated = run_json(&state_dir, "ca activate");
    assert_eq!(introduced["introduced"], activated["activated"]);
    let text = run(&state_dir, "ca status").unwrap();
    assert!(
        text.contains("signs") && text.contains("ca retire") && text.contains("1 node(s): edge-1"),
        "{text}"
    );
    assert!(run(&state_dir, "ca retire").unwrap_err().contains("edge-1"));
    assert!(run(&state_dir, "ca retire --force").unwrap().contains("retired"));
    assert_eq!(run_json(&state_dir, "ca status")["roots"].as_array().unwrap().len(), 1);
}

#[test]
fn cluster_flags_need_a_cluster() {
    let (_directory, state_dir, _) = new_ca();
    for (flags, reason) in [
        ("--ca-secret x", "--ca-secret: only with --kubeconfig or --in-cluster"),
        ("--namespace x", "--namespace: only with"),
        ("--in-cluster", "--in-cluster: this is not a pod"),
        ("--kubeconfig /no/such/file", "--kubeconfig=/no/such/file"),
        ("--in-cluster --kubeconfig /k", "cannot be used with"),
    ] {
        for line in [format!("ca status {flags}"), format!("ca {flags} status")] {
            let error = run(&state_dir, &line).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}

#[test]
fn a_revoked_node_without_a_certificate_may_be_a_mistake() {
    let (_directory, state_dir, ca) = new_ca();
    let node = "edge-1".parse().unwrap();
    let key = public_key_of_csr(&create_csr(&PrivateKey::generate().unwrap()).unwrap()).unwrap();
    let issued = ca.state().unwrap().issue_agent(&node, &key).unwrap();
    IssuedLedger::new(&state_dir).record((Holder::Agent, &node), &issued).unwrap();
    let doubt = "is the name right?";
    assert!(!run(&state_dir, "agent revoke edge-1").unwrap().contains(doubt));
    assert!(run(&state_dir, "agent revoke egde-1").unwrap().contains(doubt));
}

#[test]
fn a_directory_without_a_ca_is_no_state_directory() {
    let directory = tempfile::tempdir().unwrap();
    for line in ["ca status", "agent revoke edge-1", "agent list", "token list", "token revoke abc123"] {
        let error = run(directory.path(), line).unwrap_err();
        assert!(error.contains("there is no CA") && error.contains("--state-dir"), "{line}: {error}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
