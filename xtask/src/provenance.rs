//! Provenance of a release: how, from which commit and by whom its files were built, as an in-toto statement with a predicate of
//! SLSA 1.0, and its signature as a DSSE envelope.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::command::{output, program, run};
use crate::image::VERSION;
use crate::image::oci::digest;

/// The statement: the same for everyone who builds the same commit.
const STATEMENT: &str = "provenance.json";
/// The envelope, with a signature of its own each time.
const ENVELOPE: &str = "provenance.intoto.jsonl";
/// Files that are no subject: signatures, the statements that they sign, and those that a person edits before signing.
const NOT_BUILT: &[&str] = &[
    STATEMENT,
    ENVELOPE,
    "provenance.sigstore.json",
    "SHA256SUMS",
    "SHA256SUMS.sigstore.json",
    "NOTES.md",
    "postern.yaml",
];
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

/// Facts of the statement beside the files.
pub(crate) struct Build {
    /// URI of who built, and is trusted with that.
    pub(crate) builder: String,
    pub(crate) commit: String,
    /// Contents of Cargo.lock.
    pub(crate) lock: Vec<u8>,
    pub(crate) profile: String,
    /// Output of `rustc --version`.
    pub(crate) compiler: String,
}

impl Build {
    /// Writes the statement about the files in `folder`, and verifies it.
    pub(crate) fn state(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.statement(folder)?).context("the provenance")?;
        let path = folder.join(STATEMENT);
        fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
        self.verify(folder)
    }

    fn statement(&self, folder: &Path) -> Result<Value> {
        let hex = |bytes: &[u8]| digest(bytes).trim_start_matches("sha256:").to_owned();
        let mut subjects = Vec::new();
        for (name, sum) in sums(folder)? {
            subjects.push(json!({ "name": name, "digest": { "sha256": sum } }));
        }
        Ok(json!({
            "_type": "https://in-toto.io/Statement/v1",
            "subject": subjects,
            "predicateType": "https://slsa.dev/provenance/v1",
            "predicate": {
                "buildDefinition": {
                    "buildType": "urn:postern:cargo-xtask-release:1",
                    "externalParameters": { "version": VERSION, "profile": self.profile },
                    "internalParameters": { "compiler": self.compiler },
                    "resolvedDependencies": [
                        { "name": "source", "digest": { "gitCommit": self.commit } },
                        { "name": "Cargo.lock", "digest": { "sha256": hex(&self.lock) } },
                    ],
                },
                "runDetails": { "builder": { "id": self.builder } },
            },
        }))
    }

    /// Fails unless the statement in `folder` is the one about this build and exactly the files there.
    pub(crate) fn verify(&self, folder: &Path) -> Result<()> {
        let bytes = read(folder, STATEMENT)?;
        let stated: Value =
            serde_json::from_slice(&bytes).with_context(|| format!("{STATEMENT} is no JSON"))?;
        let (named, present) = (subjects(&stated), sums(folder)?);
        for (name, sum) in &present {
            match named.get(name) {
                None => bail!("{STATEMENT} does not name {name}: it is no part of that build"),
                Some(other) if other != sum => {
                    bail!(
                        "{name} has the sha256 {sum}, and {STATEMENT} says {other}: one of them was changed"
                    )
                }
                Some(_) => {}
            }
        }
        if let Some(name) = named.keys().find(|name| !present.contains_key(*name)) {
            bail!("{name} is missing, and {STATEMENT} names it");
        }
        let expected = self.statement(folder)?;
        for part in ["/predicate/runDetails/builder/id", "/predicate/buildDefinition/resolvedDependencies"] {
            let [is, should] = [&stated, &expected].map(|one| one.pointer(part).unwrap_or(&Value::Null));
            ensure!(is == should, "{STATEMENT}{part} is {is}, and of this build it is {should}");
        }
        ensure!(
            stated == expected,
            "{STATEMENT} was changed, or made by another version: make the release again"
        );
        Ok(())
    }
}

/// The sha256 of each subject of a statement.
fn subjects(statement: &Value) -> BTreeMap<String, String> {
    let subjects = statement["subject"].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    subjects.iter().map(|one| (text(&one["name"]), text(&one["digest"]["sha256"]))).collect()
}

/// Signs the statement with the private key in this PEM file, and verifies that.
pub(crate) fn sign(folder: &Path, key: &Path) -> Result<()> {
    let statement = read(folder, STATEMENT)?;
    let scratch = tempfile::tempdir().context("a folder for the signature")?;
    let (message, public) = (scratch.path().join("message"), scratch.path().join("public.pem"));
    fs::write(&message, pre_authentication(&statement)).context("writing what is signed")?;
    let signature = scratch.path().join("signature");
    // openssl asks for the key's passphrase.
    run(openssl(&["dgst", "-sha256", "-sign"]).arg(key).arg("-out").arg(&signature).arg(&message))?;
    run(openssl(&["pkey", "-pubout", "-in"]).arg(key).arg("-out").arg(&public))?;
    let signature = STANDARD.encode(fs::read(&signature).context("reading the signature")?);
    let envelope = json!({
        "payloadType": PAYLOAD_TYPE,
        "payload": STANDARD.encode(&statement),
        "signatures": [{ "sig": signature }],
    });
    let path = folder.join(ENVELOPE);
    fs::write(&path, format!("{envelope}\n")).with_context(|| format!("writing {}", path.display()))?;
    verify_signature(folder, &public)
}

/// Fails unless the envelope has this statement, signed with the private key of this public one.
fn verify_signature(folder: &Path, public: &Path) -> Result<()> {
    let envelope: Value =
        serde_json::from_slice(&read(folder, ENVELOPE)?).with_context(|| format!("{ENVELOPE} is no JSON"))?;
    let statement = read(folder, STATEMENT)?;
    ensure!(envelope["payloadType"] == PAYLOAD_TYPE, "{ENVELOPE}: the payloadType is not {PAYLOAD_TYPE}");
    ensure!(
        envelope["payload"] == STANDARD.encode(&statement),
        "{ENVELOPE}: the payload is not {STATEMENT}: one of them was changed, sign it again"
    );
    let signature = envelope["signatures"][0]["sig"].as_str().and_then(|text| STANDARD.decode(text).ok());
    let signature = signature.with_context(|| format!("{ENVELOPE} has no signature"))?;
    let scratch = tempfile::tempdir().context("a folder for the signature")?;
    let (message, file) = (scratch.path().join("message"), scratch.path().join("signature"));
    fs::write(&message, pre_authentication(&statement)).context("writing what is signed")?;
    fs::write(&file, signature).context("writing the signature")?;
    let mut verify = openssl(&["dgst", "-sha256", "-verify"]);
    verify.arg(public).arg("-signature").arg(&file).arg(&message);
    output(&mut verify)
        .with_context(|| format!("{ENVELOPE}: the signature is not of this key and statement"))?;
    Ok(())
}

fn openssl(args: &[&str]) -> std::process::Command {
    let mut command = program("openssl");
    command.args(args);
    command
}

/// The text that is signed instead of the statement itself (DSSE 1.0, PAE).
fn pre_authentication(statement: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), statement.len());
    [head.as_bytes(), statement].concat()
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    fs::read(&path).with_context(|| format!("reading {}: `cargo xtask release` makes it", path.display()))
}

/// The sha256 of each file that was built.
fn sums(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut sums = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let name = entry.with_context(|| format!("reading {}", folder.display()))?.file_name();
        let name = name.to_string_lossy().into_owned();
        if !NOT_BUILT.contains(&name.as_str()) {
            let sum = digest(&read(folder, &name)?).trim_start_matches("sha256:").to_owned();
            sums.insert(name, sum);
        }
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build() -> Build {
        Build {
            builder: "https://example.org/builder".into(),
            commit: "0123456789abcdef0123456789abcdef01234567".into(),
            lock: b"[[package]]\n".to_vec(),
            profile: "release".into(),
            compiler: "rustc 1.95.0".into(),
        }
    }

    /// A folder as `cargo xtask release` fills it, with a statement.
    fn released() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tunnel-agent-linux-amd64", "tunnel-agent.oci.tar", "NOTES.md", "postern.yaml"] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        build().state(folder.path()).unwrap();
        fs::write(folder.path().join("SHA256SUMS"), "").unwrap();
        folder
    }

    fn refused(build: &Build, folder: &Path, words: &[&str]) {
        let error = format!("{:#}", build.verify(folder).expect_err(&format!("{words:?}: it was accepted")));
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} are not in {error}");
    }

    #[test]
    fn the_statement_names_every_file_that_was_built() {
        let folder = released();
        build().verify(folder.path()).unwrap();
        let statement: Value = serde_json::from_slice(&read(folder.path(), STATEMENT).unwrap()).unwrap();
        assert_eq!(
            statement["subject"][0],
            json!({ "name": "tunnel-agent-linux-amd64", "digest": {
                "sha256": digest(b"tunnel-agent-linux-amd64").trim_start_matches("sha256:"),
            } })
        );
        assert_eq!(statement["subject"].as_array().unwrap().len(), 2);
        // A file that a person edits before signing is not built.
        fs::write(folder.path().join("NOTES.md"), "better").unwrap();
        build().verify(folder.path()).unwrap();
    }

    #[test]
    fn a_file_that_changed_came_or_went_fails() {
        let folder = released();
        let file = folder.path().join("tunnel-agent.oci.tar");
        fs::write(&file, "other").unwrap();
        refused(&build(), folder.path(), &["tunnel-agent.oci.tar", "sha256"]);
        fs::remove_file(&file).unwrap();
        refused(&build(), folder.path(), &["tunnel-agent.oci.tar", "missing"]);
        let folder = released();
        fs::write(folder.path().join("one-more"), "").unwrap();
        refused(&build(), folder.path(), &["one-more", "does not name"]);
    }

    #[test]
    fn a_statement_that_changed_or_is_missing_fails() {
        let folder = released();
        let path = folder.path().join(STATEMENT);
        let text = fs::read_to_string(&path).unwrap();
        for (from, to) in [
            ("https://example.org/builder", "https://example.com/builder"),
            ("0123456789abcdef", "f123456789abcdef"),
            ("\"Cargo.lock\"", "\"cargo.lock\""),
            ("rustc 1.95.0", "rustc 1.94.0"),
            ("https://slsa.dev/provenance/v1", "https://slsa.dev/provenance/v0.2"),
            ("\"runDetails\"", "\"more\": 1, \"runDetails\""),
            ("{", "["),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            fs::write(&path, changed).unwrap();
            refused(&build(), folder.path(), &[STATEMENT]);
        }
        fs::remove_file(&path).unwrap();
        refused(&build(), folder.path(), &[STATEMENT, "cargo xtask release"]);
        fs::write(&path, text).unwrap();
        let others = [
            (Build { builder: "https://example.com".into(), ..build() }, "builder"),
            (Build { commit: "f".repeat(40), ..build() }, "resolvedDependencies"),
            (Build { lock: Vec::new(), ..build() }, "resolvedDependencies"),
        ];
        for (other, word) in others {
            refused(&other, folder.path(), &[word]);
        }
    }

    #[test]
    fn an_envelope_that_changed_or_is_of_another_key_fails() {
        let folder = released();
        let keys = tempfile::tempdir().unwrap();
        let key = |name: &str| {
            let (key, public) = (keys.path().join(name), keys.path().join(format!("{name}.pub")));
            let curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"];
            output(openssl(&["genpkey"]).args(curve).arg(&key)).unwrap();
            output(openssl(&["pkey", "-pubout", "-in"]).arg(&key).arg("-out").arg(&public)).unwrap();
            (key, public)
        };
        let ((key, public), (_, other)) = (key("one"), key("two"));
        let refused = |public: &Path, word: &str| {
            let error = verify_signature(folder.path(), public).expect_err(word);
            assert!(format!("{error:#}").contains(word), "{word:?} is not in {error:#}");
        };
        refused(&public, ENVELOPE);
        sign(folder.path(), &key).unwrap();
        build().verify(folder.path()).unwrap();
        verify_signature(folder.path(), &public).unwrap();
        refused(&other, "signature");

        let path = folder.path().join(ENVELOPE);
        let envelope = fs::read_to_string(&path).unwrap();
        let value: Value = serde_json::from_str(&envelope).unwrap();
        let changed = |pointer: &str, to: Value, word: &str| {
            let mut value = value.clone();
            *value.pointer_mut(pointer).unwrap() = to;
            fs::write(&path, value.to_string()).unwrap();
            refused(&public, word);
        };
        changed("/signatures", json!([]), "signature");
        changed("/signatures/0/sig", json!("?"), "signature");
        changed("/payloadType", json!("text/plain"), "payloadType");
        changed("/payload", json!(STANDARD.encode("{}")), "payload");
        fs::write(&path, &envelope).unwrap();
        // The statement beside it.
        let statement = folder.path().join(STATEMENT);
        fs::write(&statement, fs::read_to_string(&statement).unwrap() + " ").unwrap();
        refused(&public, "payload");
    }
}
