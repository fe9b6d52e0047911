//! Kernels of Debian's archive: downloaded with apt on any release, and unpacked, not installed.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::cache;
use crate::command::{name_of, output, program, run};
use crate::files;

/// Debian's package that depends on a release's current kernel for clouds.
const CURRENT: &str = "linux-image-cloud-amd64";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Kernels for clouds in Debian's archive. Others are not available as packages that boot anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// Debian 11.
    #[value(name = "5.10")]
    V5_10,
    /// Debian 12.
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13.
    #[value(name = "6.12")]
    V6_12,
    /// The newest that Debian 13 is offered.
    Backports,
}

/// A kernel and its modules.
pub(super) struct Unpacked {
    pub(super) version: String,
    pub(super) image: PathBuf,
    /// The folder of this version's modules.
    pub(super) modules: PathBuf,
}

impl Kernel {
    /// The archive and the release that have it.
    fn source(self) -> (&'static str, &'static str) {
        match self {
            Self::V5_10 => ("debian-security", "bullseye-security"),
            Self::V6_1 => ("debian", "bookworm"),
            Self::V6_12 => ("debian", "trixie"),
            Self::Backports => ("debian", "trixie-backports"),
        }
    }
}

/// Returns a kernel from the cache, which is never updated: remove it for a newer one.
pub(super) fn unpacked(kernel: Kernel) -> Result<Unpacked> {
    let (archive, release) = kernel.source();
    let folder = cache::once("kernels", &name_of(&kernel), &[archive, release], |folder| {
        download(folder, archive, release).with_context(|| format!("Debian's kernel of {release}"))
    })?;
    found(&folder)
}

fn found(folder: &Path) -> Result<Unpacked> {
    let modules = ["lib/modules", "usr/lib/modules"]
        .iter()
        .find_map(|below| fs::read_dir(folder.join(below)).ok()?.flatten().next().map(|entry| entry.path()));
    let modules = modules.with_context(|| format!("no modules in {}", folder.display()))?;
    let version = modules.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let images = [folder.join("boot").join(format!("vmlinuz-{version}")), modules.join("vmlinuz")];
    let image = images.into_iter().find(|image| image.exists());
    let image = image.with_context(|| format!("no kernel in {}", folder.display()))?;
    Ok(Unpacked { version, image, modules })
}

fn download(folder: &Path, archive: &str, release: &str) -> Result<()> {
    ensure!(Path::new(KEYRING).exists(), "{KEYRING} is missing: `apt-get install debian-archive-keyring`");
    let apt = Apt(folder.join("apt"));
    for below in ["lists/partial", "cache/archives/partial"] {
        let path = apt.0.join(below);
        files::create(&path)?;
    }
    let source = format!("deb [signed-by={KEYRING}] http://deb.debian.org/{archive} {release} main\n");
    fs::write(apt.0.join("sources.list"), source).context("writing sources.list")?;
    run(apt.command("apt-get").args(["update", "--quiet"]))?;
    let packages = apt.packages(CURRENT)?;
    // apt-get puts the files into the current folder.
    run(apt.command("apt-get").current_dir(folder).args(["download", "--quiet"]).args(&packages))?;
    fs::remove_dir_all(&apt.0).context("removing apt's lists")?;
    for entry in fs::read_dir(folder).context("what was downloaded")?.flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(program("dpkg-deb").arg("--extract").arg(&path).arg(folder))?;
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    found(folder).map(drop)
}

/// apt with separate lists and sources: this machine's are neither read nor changed.
struct Apt(PathBuf);

impl Apt {
    fn command(&self, name: &str) -> Command {
        let mut command = program(name);
        for (option, value) in [
            ("Dir::State::Lists", self.0.join("lists")),
            ("Dir::Cache", self.0.join("cache")),
            ("Dir::Etc::SourceList", self.0.join("sources.list")),
            ("Dir::Etc::SourceParts", "/dev/null".into()),
            ("APT::Sandbox::User", "root".into()),
            // Descriptions for software centres would be most of the download.
            ("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", "false".into()),
        ] {
            command.arg("-o").arg(format!("{option}={}", value.display()));
        }
        command
    }

    /// The packages of the kernel that `name` depends on: newer releases divide it into several.
    fn packages(&self, name: &str) -> Result<Vec<String>> {
        let depends = |name: &str| {
            let text = output(self.command("apt-cache").args(["show", "--no-all-versions", name]))?;
            anyhow::Ok(dependencies(&text))
        };
        let versioned = |name: &String| name.starts_with("linux-image-") && name != CURRENT;
        let image = depends(name)?.into_iter().find(versioned);
        let image = image.with_context(|| format!("{name} depends on no kernel"))?;
        let parts = depends(&image)?.into_iter();
        let parts =
            parts.filter(|name| name.starts_with("linux-binary-") || name.starts_with("linux-modules-"));
        Ok(parts.chain([image]).collect())
    }
}

/// The names in a package's `Depends`.
fn dependencies(shown: &str) -> Vec<String> {
    let line = shown.lines().find_map(|line| line.strip_prefix("Depends: ")).unwrap_or_default();
    let names = line.split(',').filter_map(|name| name.split_whitespace().next());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_without_their_versions() {
        let shown =
            "Package: a\nPre-Depends: linux-base (>= 4)\nDepends: kmod, linux-modules-7.3 (= 7.3-1), x | y\n";
        assert_eq!(dependencies(shown), ["kmod", "linux-modules-7.3", "x"]);
        assert!(dependencies("Package: a\n").is_empty());
    }
}
