//! Provenance of a release: how, from which commit and by whom its files were built, as an in-toto statement with a predicate of
//! SLSA 1.0. cosign signs it (docs/releases.md).
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::files;
use crate::image::VERSION;
use crate::image::oci::sha256;

/// The statement: the same for everyone who builds the same commit.
const STATEMENT: &str = "provenance.json";
/// Files that are no subject: signatures, the statements that they sign, and those that a person edits before signing.
const NOT_BUILT: &[&str] = &[
    STATEMENT,
    "provenance.sigstore.json",
    "SHA256SUMS",
    "SHA256SUMS.sigstore.json",
    "NOTES.md",
    "postern.yaml",
];

/// Facts of the statement beside the files.
pub(crate) struct Build {
    /// URI of who built, and is trusted with that.
    pub(crate) builder: String,
    pub(crate) commit: String,
    /// Contents of Cargo.lock.
    pub(crate) lock: Vec<u8>,
    pub(crate) profile: String,
    /// URL of the book in `doctor`'s findings, if it is not the default.
    pub(crate) docs_url: Option<String>,
    /// Output of `rustc --version`.
    pub(crate) compiler: String,
}

impl Build {
    /// Writes the statement about the files in `folder`.
    pub(crate) fn state(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.statement(folder)?).context("the provenance")?;
        files::write(&folder.join(STATEMENT), text + "\n")
    }

    fn statement(&self, folder: &Path) -> Result<Value> {
        let built = sums(folder)?.into_iter().filter(|(name, _)| !NOT_BUILT.contains(&name.as_str()));
        let subjects: Vec<Value> =
            built.map(|(name, sum)| json!({ "name": name, "digest": { "sha256": sum } })).collect();
        Ok(json!({
            "_type": "https://in-toto.io/Statement/v1",
            "subject": subjects,
            "predicateType": "https://slsa.dev/provenance/v1",
            "predicate": {
                "buildDefinition": {
                    "buildType": "urn:postern:cargo-xtask-release:1",
                    "externalParameters": { "version": VERSION, "profile": self.profile, "docsUrl": self.docs_url },
                    "internalParameters": { "compiler": self.compiler },
                    "resolvedDependencies": [
                        { "name": "source", "digest": { "gitCommit": self.commit } },
                        { "name": "Cargo.lock", "digest": { "sha256": sha256(&self.lock) } },
                    ],
                },
                "runDetails": { "builder": { "id": self.builder } },
            },
        }))
    }
}

/// The sha256 of each file in a folder.
pub(crate) fn sums(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut sums = BTreeMap::new();
    for path in files::paths_in(folder)? {
        sums.insert(files::file_name(&path), sha256(&files::bytes(&path)?));
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn build() -> Build {
        Build {
            builder: "https://example.org/builder".into(),
            commit: "0123456789abcdef0123456789abcdef01234567".into(),
            lock: b"[[package]]\n".to_vec(),
            profile: "release".into(),
            docs_url: None,
            compiler: "rustc 1.95.0".into(),
        }
    }

    fn stated(build: &Build, folder: &Path) -> Value {
        build.state(folder).unwrap();
        serde_json::from_slice(&fs::read(folder.join(STATEMENT)).unwrap()).unwrap()
    }

    #[test]
    fn the_statement_names_every_file_that_was_built() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tunnel-agent-linux-amd64", "tunnel-agent.oci.tar", "NOTES.md", "postern.yaml"] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        let statement = stated(&build(), folder.path());
        let subject = |name: &str| json!({ "name": name, "digest": { "sha256": sha256(name.as_bytes()) } });
        let subjects = ["tunnel-agent-linux-amd64", "tunnel-agent.oci.tar"].map(subject);
        assert_eq!(statement["subject"], json!(subjects));
        // Files that a person edits before signing are not built, nor are those about the others.
        fs::write(folder.path().join("NOTES.md"), "better").unwrap();
        fs::write(folder.path().join("SHA256SUMS"), "").unwrap();
        assert_eq!(stated(&build(), folder.path()), statement);
    }

    #[test]
    fn the_statement_is_about_one_build() {
        let folder = tempfile::tempdir().unwrap();
        let [from, lock] =
            ["/resolvedDependencies/0/digest/gitCommit", "/resolvedDependencies/1/digest/sha256"];
        let statement = stated(&build(), folder.path());
        let definition = &statement["predicate"]["buildDefinition"];
        assert_eq!(definition.pointer(from), Some(&json!(build().commit)));
        assert_eq!(definition.pointer(lock), Some(&json!(sha256(&build().lock))));
        assert_eq!(definition["internalParameters"]["compiler"], build().compiler);
        assert_eq!(definition["externalParameters"]["profile"], build().profile);
        assert_eq!(statement["predicate"]["runDetails"]["builder"]["id"], build().builder);
    }
}
