//! An OCI archive: `oci-layout`, `index.json` and blobs. It names one index, with an image for each architecture, and refers each
//! image's SBOM to it. A pure function of its inputs: no times, no owners, sorted.
use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Media type of the configuration of an artifact that has none.
const EMPTY: &str = "application/vnd.oci.empty.v1+json";
const SBOM: &str = "application/vnd.cyclonedx+json";

/// Properties that all architectures share.
pub(super) struct Common {
    pub(super) reference: String,
    pub(super) user: String,
    pub(super) entrypoint: Vec<String>,
    pub(super) labels: BTreeMap<String, String>,
    /// RFC 3339.
    pub(super) created: String,
}

/// An image of one architecture.
pub(super) struct Platform {
    pub(super) architecture: String,
    /// Programs by their path in the image.
    pub(super) files: BTreeMap<String, Vec<u8>>,
    pub(super) sbom: Vec<u8>,
}

#[derive(Default)]
struct Layout {
    /// By digest.
    blobs: BTreeMap<String, Vec<u8>>,
}

impl Layout {
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let digest = digest(&bytes);
        let descriptor = json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() });
        self.blobs.insert(digest, bytes);
        descriptor
    }

    fn add_json(&mut self, media_type: &str, value: &Value) -> Result<Value> {
        Ok(self.add(media_type, serde_json::to_vec(value)?))
    }

    /// The archive, whose index names these.
    fn archive(self, manifests: &[Value]) -> Result<Vec<u8>> {
        let top = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
        let mut files = BTreeMap::from([
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json".to_owned(), serde_json::to_vec(&top)?),
        ]);
        for (digest, bytes) in self.blobs {
            files.insert(format!("blobs/sha256/{}", digest.trim_start_matches("sha256:")), bytes);
        }
        packed(&files, 0o644)
    }
}

/// The whole archive.
pub(super) fn archive(common: &Common, platforms: &[Platform]) -> Result<Vec<u8>> {
    let mut layout = Layout::default();
    let (mut images, mut sboms) = (Vec::new(), Vec::new());
    for platform in platforms {
        let sbom = layout.add(SBOM, platform.sbom.clone());
        let image = image(&mut layout, common, platform)?;
        sboms.push(sbom_of(&mut layout, &image, &sbom)?);
        images.push(image);
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": images,
        "annotations": annotations(common),
    });
    let mut index = layout.add_json(INDEX, &index)?;
    index["annotations"] = json!({
        "io.containerd.image.name": common.reference,
        "org.opencontainers.image.ref.name": common.reference,
    });
    let named_first: Vec<Value> = [index].into_iter().chain(sboms).collect();
    layout.archive(&named_first)
}

/// An archive of a Helm chart as `helm push` puts it into a registry. `metadata` is Chart.yaml; its version is the tag.
pub(crate) fn chart(metadata: &Value, packed: Vec<u8>, created: &str) -> Result<Vec<u8>> {
    let mut layout = Layout::default();
    let configuration = layout.add_json("application/vnd.cncf.helm.config.v1+json", metadata)?;
    let content = layout.add("application/vnd.cncf.helm.chart.content.v1.tar+gzip", packed);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": configuration,
        "layers": [content],
        "annotations": {
            "org.opencontainers.image.created": created,
            "org.opencontainers.image.description": metadata["description"],
            "org.opencontainers.image.title": metadata["name"],
            "org.opencontainers.image.version": metadata["version"],
        },
    });
    let mut manifest = layout.add_json(MANIFEST, &manifest)?;
    manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": metadata["version"] });
    layout.archive(&[manifest])
}

fn annotations(common: &Common) -> Value {
    let mut annotations = json!(common.labels);
    annotations["org.opencontainers.image.created"] = json!(common.created);
    annotations
}

fn image(layout: &mut Layout, common: &Common, platform: &Platform) -> Result<Value> {
    // Not compressed: tools that push it do that, and containerd imports it as it is.
    let layer = layout.add("application/vnd.oci.image.layer.v1.tar", packed(&platform.files, 0o755)?);
    let configuration = json!({
        "created": common.created,
        "architecture": platform.architecture,
        "os": "linux",
        "config": {
            "User": common.user,
            "Entrypoint": common.entrypoint,
            "WorkingDir": "/",
            "Labels": common.labels,
        },
        "rootfs": { "type": "layers", "diff_ids": [layer["digest"]] },
        "history": [{ "created": common.created, "created_by": "cargo xtask image" }],
    });
    let configuration = layout.add_json("application/vnd.oci.image.config.v1+json", &configuration)?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": configuration,
        "layers": [layer],
        "annotations": annotations(common),
    });
    let mut manifest = layout.add_json(MANIFEST, &manifest)?;
    manifest["platform"] = json!({ "architecture": platform.architecture, "os": "linux" });
    Ok(manifest)
}

/// The SBOM as an artifact that names its image (OCI 1.1), as `oras discover` finds it in a registry.
fn sbom_of(layout: &mut Layout, image: &Value, sbom: &Value) -> Result<Value> {
    let empty = layout.add(EMPTY, b"{}".to_vec());
    let subject = json!({
        "mediaType": image["mediaType"],
        "digest": image["digest"],
        "size": image["size"],
    });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": SBOM,
        "config": empty,
        "layers": [sbom],
        "subject": subject,
    });
    let mut manifest = layout.add_json(MANIFEST, &manifest)?;
    manifest["artifactType"] = json!(SBOM);
    Ok(manifest)
}

/// `sha256:` and 64 hexadecimal digits.
pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256(bytes))
}

/// The digits alone.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A tar of files by their paths, without times and owners.
fn packed(files: &BTreeMap<String, Vec<u8>>, mode: u32) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, bytes) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(mode);
        header.set_size(bytes.len() as u64);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        archive.append_data(&mut header, path, bytes.as_slice()).with_context(|| format!("adding {path}"))?;
    }
    archive.into_inner().context("ending the archive")
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn contents(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(archive);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            assert_eq!((entry.header().mtime().unwrap(), entry.header().uid().unwrap()), (0, 0));
            let path = entry.path().unwrap().display().to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (path, bytes)
        });
        entries.collect()
    }

    fn example() -> Vec<u8> {
        let common = Common {
            reference: "localhost/postern/x:1".into(),
            user: "65532:65532".into(),
            entrypoint: vec!["/x".into()],
            labels: BTreeMap::from([("org.opencontainers.image.version".into(), "1".into())]),
            created: "2026-01-02T03:04:05Z".into(),
        };
        let platform = |architecture: &'static str| Platform {
            architecture: architecture.to_owned(),
            files: BTreeMap::from([("x".to_owned(), format!("a binary of {architecture}").into_bytes())]),
            sbom: format!("{{\"of\":\"{architecture}\"}}").into_bytes(),
        };
        archive(&common, &[platform("amd64"), platform("arm64")]).unwrap()
    }

    #[test]
    fn an_archive_is_whole_and_the_same_every_time() {
        let first = example();
        assert_eq!(first, example());

        let files = contents(&first);
        let blob = |descriptor: &Value| {
            let hash = descriptor["digest"].as_str().unwrap();
            let bytes = &files[&format!("blobs/sha256/{}", hash.trim_start_matches("sha256:"))];
            assert_eq!(digest(bytes), hash);
            assert_eq!(descriptor["size"], bytes.len());
            bytes
        };
        let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let top = parsed(&files["index.json"]);
        let [named, sboms @ ..] = top["manifests"].as_array().unwrap().as_slice() else { panic!("{top}") };
        assert_eq!(named["annotations"]["io.containerd.image.name"], "localhost/postern/x:1");
        let index = parsed(blob(named));
        let images = index["manifests"].as_array().unwrap();
        assert_eq!((images.len(), sboms.len()), (2, 2));
        for ((image, sbom), architecture) in images.iter().zip(sboms).zip(["amd64", "arm64"]) {
            assert_eq!(image["platform"], json!({ "architecture": architecture, "os": "linux" }));
            let manifest = parsed(blob(image));
            let configuration = parsed(blob(&manifest["config"]));
            assert_eq!(configuration["architecture"], architecture);
            assert_eq!(configuration["config"]["User"], "65532:65532");
            assert_eq!(configuration["config"]["Labels"]["org.opencontainers.image.version"], "1");
            let layer = blob(&manifest["layers"][0]);
            assert_eq!(configuration["rootfs"]["diff_ids"][0], digest(layer));
            let binary = format!("a binary of {architecture}").into_bytes();
            assert_eq!(contents(layer), BTreeMap::from([("x".to_owned(), binary)]));

            let artifact = parsed(blob(sbom));
            assert_eq!(artifact["subject"]["digest"], image["digest"]);
            blob(&artifact["config"]);
            assert_eq!(parsed(blob(&artifact["layers"][0])), json!({ "of": architecture }));
        }
    }
}
