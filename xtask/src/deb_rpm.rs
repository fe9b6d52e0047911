//! Packages for Debian and for Fedora and its kin: what a program needs as a unit of systemd. cargo-deb and cargo-generate-rpm pack
//! them from a folder with a manifest of its own, so that neither builds anything.
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::command::{name_of, need_program, output, program, root, run, which};
use crate::cross::Arch;
use crate::files::{bytes, copy, create, file_name, paths_in, text, write};
use crate::image::{Image, VERSION};

const CARGO_DEB: &str = "3.8.0";
const CARGO_GENERATE_RPM: &str = "0.21.1";
/// Folders of zsh's completion below /usr/share/zsh.
const ZSH_OF_DEBIAN: &str = "vendor-completions";
const ZSH_OF_FEDORA: &str = "site-functions";
/// Line of a package's script that stands for deploy/packages/unit.sh.
const SHARED: &str = ". \"${0%/*}/unit.sh\"\n";
const MAINTAINER: &str = "The Postern authors <postern@example.org>";

/// Debian has the licence's text.
const COPYRIGHT: &str = "\
Copyright (C) 2026 The Postern authors

Licensed under the Apache License, Version 2.0. On Debian systems, its text is in /usr/share/common-licenses/Apache-2.0.
";
/// Findings of lintian that are meant.
const JUSTIFIED: [&str; 3] = [
    // cargo-deb's, of a static program.
    "empty-field Depends",
    // Not uploaded to Debian.
    "initial-upload-closes-no-bugs *",
    // One unit with instances, one of which takes over from another: debhelper's helpers have nothing for that.
    "maintainer-script-calls-systemctl *",
];

/// Programs of both packages' architecture, in one folder, and what the packages are of.
pub(crate) struct Programs<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) arch: Arch,
    /// Debian's revision and rpm's release: packages of one version may be built again.
    pub(crate) revision: u32,
    /// Seconds since 1970.
    pub(crate) epoch: u64,
    /// Folder with `man` and `completion`, if they were made.
    pub(crate) documents: Option<&'a Path>,
}

/// A file of a package.
struct File {
    /// Below the folder that is packed.
    source: String,
    /// In the package. Where Debian and Fedora differ, Debian's.
    path: String,
    mode: &'static str,
}

/// A folder with the files and the manifest of a package.
pub(crate) struct Stage<'a> {
    dir: tempfile::TempDir,
    package: String,
    programs: &'a Programs<'a>,
}

impl<'a> Stage<'a> {
    pub(crate) fn new(image: Image, programs: &'a Programs<'a>) -> Result<Self> {
        let package = image.name().replace("tunnel-", "postern-");
        let dir = tempfile::tempdir().context("a folder for a package")?;
        let files = stage_files(image, programs, dir.path())?;
        write(&dir.path().join("Cargo.toml"), manifest(&package, image, programs, &files))?;
        Ok(Self { dir, package, programs })
    }

    fn version(&self) -> String {
        format!("{VERSION}-{}", self.programs.revision)
    }

    /// Writes the .deb into this folder; returns its path.
    pub(crate) fn deb(&self, out: &Path) -> Result<PathBuf> {
        let path =
            out.join(format!("{}_{}_{}.deb", self.package, self.version(), name_of(&self.programs.arch)));
        let mut tool = program(cargo_deb()?);
        tool.args(["--no-build", "--no-strip", "--no-dbgsym", "--quiet", "--offline"]);
        self.run(&mut tool, path)
    }

    /// Writes the .rpm.
    pub(crate) fn rpm(&self, out: &Path) -> Result<PathBuf> {
        let arch = match self.programs.arch {
            Arch::Amd64 => "x86_64",
            Arch::Arm64 => "aarch64",
        };
        let path = out.join(format!("{}-{}.{arch}.rpm", self.package, self.version()));
        let mut tool = program(cargo_generate_rpm()?);
        tool.args(["generate-rpm", "--auto-req", "no", "--arch", arch]);
        self.run(&mut tool, path)
    }

    fn run(&self, tool: &mut Command, path: PathBuf) -> Result<PathBuf> {
        let stage = self.dir.path();
        tool.args(["--target", self.programs.arch.target(), "--output"]).arg(&path);
        tool.current_dir(stage).env("CARGO_TARGET_DIR", stage.join("target"));
        run(tool.env("SOURCE_DATE_EPOCH", self.programs.epoch.to_string()))?;
        Ok(path)
    }
}

/// Installs the tools that make the packages, if they are missing.
pub(crate) fn need_tools() -> Result<()> {
    cargo_deb()?;
    cargo_generate_rpm().map(drop)
}

fn cargo_deb() -> Result<PathBuf> {
    // Without liblzma's headers, which need another package: it runs xz.
    let options = ["--locked", "--no-default-features", "--features", "gzip"];
    need_program("cargo-deb", CARGO_DEB, &options)
}

fn cargo_generate_rpm() -> Result<PathBuf> {
    need_program("cargo-generate-rpm", CARGO_GENERATE_RPM, &["--locked"])
}

fn stage_files(image: Image, programs: &Programs<'_>, stage: &Path) -> Result<Vec<File>> {
    let name = name_of(&image);
    let (binary, package) = (image.name(), format!("postern-{name}"));
    let mut files = Vec::new();
    let mut add = |from: PathBuf, path: String, mode: &'static str| -> Result<()> {
        let source = file_name(&from);
        copy(&from, &stage.join(&source))?;
        files.push(File { source, path, mode });
        Ok(())
    };
    let deploy = root().join("deploy/systemd");
    add(programs.folder.join(binary), format!("usr/bin/{binary}"), "755")?;
    let unit = format!("{package}@.service");
    add(deploy.join(&unit), format!("usr/lib/systemd/system/{unit}"), "644")?;
    let environment = format!("{name}.env");
    // The script postinst copies them to /etc/postern.
    let examples = format!("usr/share/postern/{name}");
    add(deploy.join(&environment), format!("{examples}/{environment}"), "644")?;
    if image == Image::Server {
        add(deploy.join("nodes.yaml"), format!("{examples}/nodes.yaml"), "644")?;
    }
    if let Some(documents) = programs.documents {
        for (from, path) in man_and_completion(documents, binary)? {
            add(from, path, "644")?;
        }
    }
    let scripts = root().join("deploy/packages");
    let shared = text(&scripts.join("unit.sh"))?;
    for script in ["postinst", "prerm", "postrm"] {
        let text = text(&scripts.join(script))?.replace(SHARED, &shared);
        write(&stage.join("scripts").join(script), text.replace("NAME", &name))?;
    }
    write(&stage.join("copyright"), COPYRIGHT)?;
    write(&stage.join("lintian"), format!("{package}: {}\n", JUSTIFIED.join(&format!("\n{package}: "))))?;
    files.push(File {
        source: "lintian".to_owned(),
        path: format!("usr/share/lintian/overrides/{package}"),
        mode: "644",
    });
    write(&stage.join("src/main.rs"), "fn main() {}\n")?;
    symlink(root().join("LICENSE"), stage.join("LICENSE")).context("linking LICENSE")?;
    let day = output(program("date").args(["--utc", "--rfc-email", &format!("--date=@{}", programs.epoch)]))?;
    let changelog = format!(
        "{package} ({VERSION}-{}) unstable; urgency=medium\n\n  * See CHANGELOG.md of the release.\n\n -- {MAINTAINER}  {day}",
        programs.revision
    );
    write(&stage.join("changelog"), &changelog)?;
    Ok(files)
}

/// The program's manual pages and completion, and where they belong.
fn man_and_completion(folder: &Path, binary: &str) -> Result<Vec<(PathBuf, String)>> {
    let completion = [
        (format!("{binary}.bash"), format!("bash-completion/completions/{binary}")),
        (format!("{binary}.zsh"), format!("zsh/{ZSH_OF_DEBIAN}/_{binary}")),
        (format!("{binary}.fish"), format!("fish/vendor_completions.d/{binary}.fish")),
    ];
    let completion =
        completion.map(|(from, to)| (folder.join("completion").join(from), format!("usr/share/{to}")));
    let mut files = Vec::from(completion);
    for path in paths_in(&folder.join("man"))? {
        let name = file_name(&path);
        if name.starts_with(binary) {
            files.push((path, format!("usr/share/man/man1/{name}")));
        }
    }
    files.sort();
    Ok(files)
}

/// The manifest that both tools read.
fn manifest(package: &str, image: Image, programs: &Programs<'_>, files: &[File]) -> String {
    let (summary, text) = match image {
        Image::Server => (
            "Postern's server: reach Kubernetes nodes behind NAT",
            "It redirects connections to edge nodes into the tunnels that their agents dial.",
        ),
        Image::Agent => (
            "Postern's agent for Kubernetes nodes behind NAT",
            "It dials the servers and lets them reach this node.",
        ),
    };
    let (mut deb, mut rpm) = (String::new(), String::new());
    for File { source, path, mode } in files {
        // Writing to a String cannot fail.
        writeln!(deb, "  [{source:?}, {path:?}, {mode:?}],").ok();
        let path = path.replace(ZSH_OF_DEBIAN, ZSH_OF_FEDORA);
        writeln!(rpm, "  {{ source = {source:?}, dest = \"/{path}\", mode = {mode:?} }},").ok();
    }
    let revision = programs.revision;
    format!(
        r#"[workspace]
[package]
name = "{package}"
version = "{VERSION}"
edition = "2024"
license = "Apache-2.0"
description = "{summary}"

[package.metadata.deb]
maintainer = "{MAINTAINER}"
copyright = "The Postern authors"
license-file = ["copyright", "0"]
extended-description = "{text}"
revision = "{revision}"
section = "net"
depends = ""
changelog = "changelog"
maintainer-scripts = "scripts"
assets = [
{deb}]

[package.metadata.generate-rpm]
release = "{revision}"
post_install_script = "scripts/postinst"
pre_uninstall_script = "scripts/prerm"
post_uninstall_script = "scripts/postrm"
assets = [
{rpm}  {{ source = "LICENSE", dest = "/usr/share/licenses/{package}/LICENSE", mode = "644", doc = true }},
]
"#
    )
}

/// A program that writes down how it is called.
const RECORDER: &str = "#!/bin/sh\necho \"${0##*/} $*\" >> /calls\n";

/// Has Debian's and rpm's own tools judge the packages: lintian; and rpm, which installs, upgrades and removes them below a folder
/// whose programs, systemctl too, write down how they are called. `cargo xtask test --kernel` has dpkg and the real ones.
pub(crate) fn check(out: &Path, epoch: u64) -> Result<()> {
    let (folder, again) = (out.join("programs"), out.join("again"));
    create(&again)?;
    for image in Image::ALL {
        write_program(&folder.join(image.name()))?;
        let of = |revision| Programs { folder: &folder, arch: Arch::HOST, revision, epoch, documents: None };
        let (first, second) = (of(1), of(2));
        let stage = Stage::new(image, &first)?;
        let [deb, rpm] = [stage.deb(out)?, stage.rpm(out)?];
        let mut lintian = program("lintian");
        // A release has the manual pages.
        lintian.args(["--allow-root", "--fail-on", "error,warning", "--suppress-tags", "no-manual-page"]);
        run(lintian.arg(&deb))?;
        let stage = Stage::new(image, &first)?;
        for (path, same) in [(&deb, stage.deb(&again)?), (&rpm, stage.rpm(&again)?)] {
            ensure!(
                bytes(path)? == bytes(&same)?,
                "{} has other bytes when it is made again",
                path.display()
            );
        }
        for (arch, [debian, fedora]) in
            [(Arch::Amd64, ["amd64", "x86_64"]), (Arch::Arm64, ["arm64", "aarch64"])]
        {
            let programs = Programs { folder: &folder, arch, revision: 1, epoch, documents: None };
            let stage = Stage::new(image, &programs)?;
            let deb = output(program("dpkg-deb").arg("--field").arg(stage.deb(&again)?).arg("Architecture"))?;
            let rpm =
                output(program("rpm").args(["-qp", "--queryformat", "%{ARCH}"]).arg(stage.rpm(&again)?))?;
            ensure!(
                (deb.trim(), rpm.trim()) == (debian, fedora),
                "packages for {arch:?} are for {deb} and {rpm}"
            );
        }
        lifecycle(image, &rpm, &Stage::new(image, &second)?.rpm(out)?)?;
    }
    Ok(())
}

fn write_program(path: &Path) -> Result<()> {
    write(path, RECORDER)?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(path, executable).with_context(|| format!("making {} executable", path.display()))
}

/// Installs, upgrades and removes a package with rpm.
fn lifecycle(image: Image, first: &Path, second: &Path) -> Result<()> {
    let dir = tempfile::tempdir().context("a folder for rpm")?;
    let root = dir.path();
    for folder in ["bin", "run/systemd/system"] {
        create(&root.join(folder))?;
    }
    copy(&which("busybox")?, &root.join("bin/busybox"))?;
    for tool in ["cp", "mkdir", "readlink", "rm", "rmdir", "sh", "test"] {
        symlink("busybox", root.join("bin").join(tool)).context("linking busybox")?;
    }
    write_program(&root.join("usr/bin/systemctl"))?;
    let (name, package) = (name_of(&image), image.name().replace("tunnel-", "postern-"));
    let link = root.join(format!("etc/systemd/system/multi-user.target.wants/{package}@a.service"));
    write(&link, "")?;
    let rpm = |action: &str, what: &OsStr| {
        run(program("rpm").arg("--root").arg(root).args(["--nodeps", action]).arg(what))?;
        let calls = root.join("calls");
        let text = fs::read_to_string(&calls).unwrap_or_default();
        fs::remove_file(&calls).ok();
        anyhow::Ok(text)
    };
    let expect = |what: &str, calls: &str, expected: &str| {
        ensure!(calls == expected, "{what} called {calls:?} instead of {expected:?}");
        Ok(())
    };
    // The program itself knows whether one runs.
    let upgrade = format!("systemctl daemon-reload\ntunnel-{name} service upgrade\n");
    expect("an installation", &rpm("--install", first.as_os_str())?, &upgrade)?;
    let flags = root.join(format!("etc/postern/{name}.env"));
    let mode = fs::metadata(&flags).context("the example's copy")?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "{} has mode {mode:o}", flags.display());
    let edited = "POSTERN_SERVER_FLAGS=\"--bpffs /own \\\n --config /etc/postern/own.yaml\"\n";
    write(&flags, edited)?;
    write(&root.join("etc/postern/own.yaml"), "bpffs: /other\nredirect-range: 10.0.0.0/16 # ours")?;
    expect("an upgrade", &rpm("--upgrade", second.as_os_str())?, &upgrade)?;
    ensure!(fs::read_to_string(&flags).is_ok_and(|text| text == edited), "edited flags are lost");
    let removed = rpm("--erase", package.as_ref())?;
    let cleanup = if image == Image::Server {
        "tunnel-server cleanup --bpffs=/own --redirect-range=10.0.0.0/16\n"
    } else {
        ""
    };
    let stop = format!("tunnel-{name} service uninstall\n{cleanup}systemctl daemon-reload\n");
    expect("a removal", &removed, &stop)?;
    ensure!(flags.exists(), "a removal took the flags");
    for left in [link, root.join(format!("usr/lib/systemd/system/{package}@.service"))] {
        ensure!(!left.exists(), "{} is left", left.display());
    }
    // A unit in /etc may be a copy of the package's, or start a program of the host's own.
    let unit = root.join(format!("etc/systemd/system/{package}@.service"));
    write(&unit, format!("[Service]\nExecStart = tunnel-{name} $POSTERN_FLAGS\n"))?;
    rpm("--install", first.as_os_str())?;
    expect("a removal beside a copy of the unit", &rpm("--erase", package.as_ref())?, &stop)?;
    write_program(&root.join(format!("usr/local/bin/tunnel-{name}")))?;
    rpm("--install", first.as_os_str())?;
    let alone = "systemctl daemon-reload\n";
    expect("a removal beside a program of the host's", &rpm("--erase", package.as_ref())?, alone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_pages_and_completion_are_packed_where_shells_look() {
        let documents = tempfile::tempdir().unwrap();
        for file in ["man/tunnel-agent.1", "man/tunnel-agent-status.1", "man/tunnel-server.1"] {
            write(&documents.path().join(file), "").unwrap();
        }
        let files = man_and_completion(documents.path(), "tunnel-agent").unwrap();
        let paths: Vec<&str> = files.iter().map(|(_, path)| path.as_str()).collect();
        let expected = [
            "usr/share/bash-completion/completions/tunnel-agent",
            "usr/share/fish/vendor_completions.d/tunnel-agent.fish",
            "usr/share/zsh/vendor-completions/_tunnel-agent",
            "usr/share/man/man1/tunnel-agent-status.1",
            "usr/share/man/man1/tunnel-agent.1",
        ];
        assert_eq!(paths, expected);
    }
}
