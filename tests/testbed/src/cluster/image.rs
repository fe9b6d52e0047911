//! The test image, made without a registry or a daemon: one layer with Debian's static busybox, as an OCI archive.
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::netns::run;

/// The image's name in pods.
pub const BUSYBOX: &str = "postern.test/busybox:1";
const PROGRAM: &str = "/bin/busybox";

/// Makes the archive in `dir` and returns its path.
pub fn busybox(dir: &Path) -> Result<PathBuf> {
    let root = dir.join("root");
    let bin = root.join("bin");
    for folder in [&bin, &root.join("tmp"), &root.join("etc"), &root.join("www")] {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    fs::copy(PROGRAM, bin.join("busybox"))
        .with_context(|| format!("copying {PROGRAM}: apt-get install busybox-static"))?;
    let output = Command::new(PROGRAM).arg("--list").output().context("running busybox --list")?;
    let applets = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        applets.lines().any(|applet| applet == "httpd"),
        "{PROGRAM} has no httpd: it is not that of the package busybox-static"
    );
    for applet in applets.lines().filter(|applet| *applet != "busybox") {
        symlink("busybox", bin.join(applet)).with_context(|| format!("linking {applet}"))?;
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n").context("writing passwd")?;
    fs::write(root.join("www/index.html"), "hello from an edge pod\n").context("writing index.html")?;

    let layer = dir.join("layer.tar");
    tar(&root, &layer)?;
    let archive = dir.join("busybox.tar");
    pack(dir, &layer, BUSYBOX, &archive)?;
    Ok(archive)
}

fn pack(dir: &Path, layer: &Path, name: &str, archive: &Path) -> Result<()> {
    let layout = dir.join("oci");
    let blobs = Blobs { dir: layout.join("blobs/sha256") };
    fs::create_dir_all(&blobs.dir).context("creating the layout")?;
    let layer = blobs
        .add(&fs::read(layer).context("reading the layer")?, "application/vnd.oci.image.layer.v1.tar")?;
    let config = json!({
        "architecture": architecture(),
        "os": "linux",
        "config": { "Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "2147483647"] },
        "rootfs": { "type": "layers", "diff_ids": [layer["digest"]] },
    });
    let config = blobs.add(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json")?;
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [layer] });
    let mut manifest =
        blobs.add(manifest.to_string().as_bytes(), "application/vnd.oci.image.manifest.v1+json")?;
    manifest["annotations"] = json!({ "io.containerd.image.name": name });
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(layout.join("index.json"), index.to_string()).context("writing index.json")?;
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)
        .context("writing oci-layout")?;
    tar(&layout, archive)
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn tar(root: &Path, archive: &Path) -> Result<()> {
    run(Command::new("tar")
        .args(["--create", "--owner=0", "--group=0", "--numeric-owner", "--file"])
        .arg(archive)
        .arg("--directory")
        .arg(root)
        .arg("."))
}

struct Blobs {
    dir: PathBuf,
}

impl Blobs {
    /// Stores a blob and returns its descriptor.
    fn add(&self, bytes: &[u8], media_type: &str) -> Result<Value> {
        let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(self.dir.join(&digest), bytes).with_context(|| format!("writing blob {digest}"))?;
        Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() }))
    }
}
