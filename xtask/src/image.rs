//! `cargo xtask image`: static binaries, and an OCI archive of each from its Containerfile, without a daemon.
//!
//! An archive holds `oci-layout`, `index.json` and three blobs: manifest, configuration, and one layer with the binary.
//! It is a pure function of the binary and the Containerfile: no times, no owners, sorted.
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::command::{cargo, program, root, run, succeeds, target_dir};
use crate::{build_ebpf, packages};

/// Images are of the machine that builds them.
const TARGET: &str =
    if cfg!(target_arch = "aarch64") { "aarch64-unknown-linux-musl" } else { "x86_64-unknown-linux-musl" };
/// Go's name for it, which OCI uses.
const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How the binaries are compiled.
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// Only one of the two images.
    #[arg(long, value_enum)]
    only: Option<Image>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    Dev,
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Image {
    Server,
    Agent,
}

impl Image {
    /// The crate, its binary and the image's last name.
    fn name(self) -> &'static str {
        match self {
            Self::Server => "tunnel-server",
            Self::Agent => "tunnel-agent",
        }
    }

    fn containerfile(self) -> PathBuf {
        let name = match self {
            Self::Server => "server.Containerfile",
            Self::Agent => "agent.Containerfile",
        };
        root().join("deploy/images").join(name)
    }

    /// As the manifests name it. `localhost` is not a registry: the archive is imported, not pulled.
    fn reference(self) -> String {
        format!("localhost/postern/{}:{VERSION}", self.name())
    }
}

pub(crate) fn run_image(options: &Options) -> Result<ExitCode> {
    let images = options.only.map_or_else(|| vec![Image::Server, Image::Agent], |image| vec![image]);
    for archive in build(options.profile, &images)? {
        println!("{}", archive.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the images and returns their archives, `<target dir>/image/NAME.oci.tar`.
pub(crate) fn build(profile: Profile, images: &[Image]) -> Result<Vec<PathBuf>> {
    need_target()?;
    packages::install(&[packages::MUSL])?;
    if images.contains(&Image::Server) {
        build_ebpf::run()?;
    }
    let mut compile = cargo();
    compile.args(["build", "--target", TARGET]);
    for image in images {
        compile.args(["-p", image.name()]);
    }
    let folder = match profile {
        Profile::Dev => "debug",
        Profile::Release => {
            compile.arg("--release");
            "release"
        }
    };
    // For crates with C files; static is what the target makes anyway.
    compile.env(format!("CC_{}", TARGET.replace('-', "_")), "musl-gcc");
    run(&mut compile)?;

    let target_dir = target_dir()?;
    let out = target_dir.join("image");
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    let mut archives = Vec::new();
    for image in images {
        let recipe = Recipe::read(&image.containerfile())?;
        let context = target_dir.join(TARGET).join(folder);
        let archive = out.join(format!("{}.oci.tar", image.name()));
        let bytes = recipe.archive(&context, &image.reference())?;
        fs::write(&archive, bytes).with_context(|| format!("writing {}", archive.display()))?;
        archives.push(archive);
    }
    Ok(archives)
}

fn need_target() -> Result<()> {
    let libraries = || {
        let output = program("rustc").args(["--print", "target-libdir", "--target", TARGET]).output().ok()?;
        let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
        path.is_dir().then_some(())
    };
    if libraries().is_some() {
        return Ok(());
    }
    println!("the Rust target {TARGET} is missing: installing it with `rustup target add {TARGET}`");
    ensure!(
        succeeds(program("rustup").arg("--version")),
        "this machine has no rustup: install Rust's standard library for {TARGET} yourself"
    );
    run(program("rustup").args(["target", "add", TARGET]))
}

/// The instructions of a Containerfile that ours use.
#[derive(Debug, Default, PartialEq, Eq)]
struct Recipe {
    /// Paths in the image, and the files of the build's directory that go there.
    files: BTreeMap<String, String>,
    user: String,
    labels: BTreeMap<String, String>,
    entrypoint: Vec<String>,
}

impl Recipe {
    fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let mut recipe = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let understood = recipe.instruction(line);
            understood.with_context(|| format!("line {}: {line}", number + 1))?;
        }
        ensure!(!recipe.entrypoint.is_empty(), "no ENTRYPOINT");
        Ok(recipe)
    }

    fn instruction(&mut self, line: &str) -> Result<()> {
        let (name, rest) = line.split_once(' ').context("an instruction without a value")?;
        match name {
            "FROM" => ensure!(rest == "scratch", "only FROM scratch: the image is the binary"),
            "COPY" => {
                let (from, to) = rest.split_once(' ').context("want COPY FILE /PATH")?;
                let path = to.strip_prefix('/').context("the path in the image has to begin with /")?;
                self.files.insert(path.to_owned(), from.to_owned());
            }
            "USER" => rest.clone_into(&mut self.user),
            "LABEL" => {
                let (key, value) = rest.split_once('=').context("want LABEL KEY=\"VALUE\"")?;
                let value = serde_json::from_str(value).context("the value has to be in double quotes")?;
                self.labels.insert(key.to_owned(), value);
            }
            "ENTRYPOINT" => {
                self.entrypoint = serde_json::from_str(rest).context("want a JSON list of strings")?;
            }
            _ => bail!("xtask understands FROM, COPY, USER, LABEL and ENTRYPOINT"),
        }
        Ok(())
    }

    /// The whole archive.
    fn archive(&self, context: &Path, reference: &str) -> Result<Vec<u8>> {
        let mut layer = Archive::default();
        for (path, file) in &self.files {
            let file = context.join(file);
            let bytes = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
            layer.add(path, 0o755, &bytes)?;
        }
        let layer = layer.finish()?;
        let mut labels = self.labels.clone();
        labels.insert("org.opencontainers.image.version".into(), VERSION.into());
        let configuration = serde_json::to_vec(&json!({
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": { "User": self.user, "Entrypoint": self.entrypoint, "Labels": labels },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &configuration),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["annotations"] = json!({
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": reference,
        });
        entry["platform"] = json!({ "architecture": ARCHITECTURE, "os": "linux" });
        let index = serde_json::to_vec(&json!({ "schemaVersion": 2, "manifests": [entry] }))?;

        let blob = |bytes: &[u8]| format!("blobs/sha256/{}", digest(bytes).trim_start_matches("sha256:"));
        let files: BTreeMap<String, &[u8]> = BTreeMap::from([
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.as_slice()),
            ("index.json".to_owned(), &index),
            (blob(&manifest), &manifest),
            (blob(&configuration), &configuration),
            (blob(&layer), &layer),
        ]);
        let mut archive = Archive::default();
        for (path, bytes) in files {
            archive.add(&path, 0o644, bytes)?;
        }
        archive.finish()
    }
}

/// `sha256:` and 64 hexadecimal digits.
fn digest(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    hash.iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() })
}

/// A tar without times and owners.
struct Archive(tar::Builder<Vec<u8>>);

impl Default for Archive {
    fn default() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }
}

impl Archive {
    fn add(&mut self, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        let mut header = tar::Header::new_ustar();
        header.set_mode(mode);
        header.set_size(bytes.len() as u64);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        self.0.append_data(&mut header, path, bytes).with_context(|| format!("adding {path}"))
    }

    fn finish(self) -> Result<Vec<u8>> {
        let mut bytes = self.0.into_inner().context("ending the archive")?;
        bytes.flush().context("ending the archive")?;
        Ok(bytes)
    }
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

    #[test]
    fn our_containerfiles_are_understood() {
        let server = Recipe::read(&Image::Server.containerfile()).unwrap();
        assert_eq!(server.entrypoint, ["/tunnel-server"]);
        let agent = Recipe::read(&Image::Agent.containerfile()).unwrap();
        assert_eq!(agent.files, BTreeMap::from([("tunnel-agent".to_owned(), "tunnel-agent".to_owned())]));
        let user = agent.user.split(':').next().unwrap().parse::<u32>().unwrap();
        assert_ne!(user, 0, "the agent's image must not be root's");
    }

    #[test]
    fn what_is_not_understood_is_refused_by_its_line() {
        for (text, expected) in [
            ("FROM debian", "line 1: FROM debian: only FROM scratch: the image is the binary"),
            (
                "FROM scratch\nRUN true",
                "line 2: RUN true: xtask understands FROM, COPY, USER, LABEL and ENTRYPOINT",
            ),
            ("COPY a b", "line 1: COPY a b: the path in the image has to begin with /"),
            (
                "LABEL a=b",
                "line 1: LABEL a=b: the value has to be in double quotes: expected value at line 1 column 1",
            ),
            ("FROM scratch", "no ENTRYPOINT"),
        ] {
            assert_eq!(format!("{:#}", Recipe::parse(text).unwrap_err()), expected);
        }
    }

    #[test]
    fn an_archive_is_whole_and_the_same_every_time() {
        let directory = std::env::temp_dir().join(format!("postern-image-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("tunnel-agent"), b"a binary").unwrap();
        let recipe = Recipe::read(&Image::Agent.containerfile()).unwrap();
        let first = recipe.archive(&directory, "localhost/postern/x:1").unwrap();
        let second = recipe.archive(&directory, "localhost/postern/x:1").unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(first, second);

        let files = contents(&first);
        let blob = |descriptor: &Value| {
            let hash = descriptor["digest"].as_str().unwrap();
            let bytes = &files[&format!("blobs/sha256/{}", hash.trim_start_matches("sha256:"))];
            assert_eq!(digest(bytes), hash);
            assert_eq!(descriptor["size"], bytes.len());
            bytes
        };
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        let entry = &index["manifests"][0];
        assert_eq!(entry["annotations"]["io.containerd.image.name"], "localhost/postern/x:1");
        let manifest: Value = serde_json::from_slice(blob(entry)).unwrap();
        let configuration: Value = serde_json::from_slice(blob(&manifest["config"])).unwrap();
        assert_eq!(configuration["config"]["User"], "65532:65532");
        let layer = blob(&manifest["layers"][0]);
        assert_eq!(configuration["rootfs"]["diff_ids"][0], digest(layer));
        assert_eq!(contents(layer), BTreeMap::from([("tunnel-agent".to_owned(), b"a binary".to_vec())]));
    }
}
