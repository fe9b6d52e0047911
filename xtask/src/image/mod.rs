//! `cargo xtask image`: static binaries, and an OCI archive of each from its Containerfile, without a daemon: one index for
//! amd64 and arm64, with an SBOM for each.
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::command::{name_of, root, target_dir};
use crate::cross::{self, Arch, Profile};
use crate::source::Source;
use crate::{build_ebpf, files, sbom};

pub(crate) mod oci;
mod recipe;
mod twice;

use oci::{Common, Platform};
use recipe::Recipe;

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How the binaries are compiled.
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// Only one of the two images.
    #[arg(long, value_enum)]
    only: Option<Image>,
    /// Only one architecture.
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Builds a second time, from a clone in another folder, and fails unless the archives are the same bytes.
    #[arg(long)]
    twice: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Image {
    Server,
    Agent,
}

impl Image {
    pub(crate) const ALL: [Self; 2] = [Self::Server, Self::Agent];

    /// The crate, its binary and the image's last name.
    pub(crate) fn name(self) -> &'static str {
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

    /// The reference in the manifests. `localhost` is not a registry: the archive is imported, not pulled.
    fn reference(self) -> String {
        format!("localhost/postern/{}:{VERSION}", self.name())
    }
}

/// An image and the architectures it is for.
pub(crate) type Wanted<'a> = (Image, &'a [Arch]);

pub(crate) fn run_image(options: &Options) -> Result<ExitCode> {
    let images = options.only.map_or_else(|| Image::ALL.to_vec(), |image| vec![image]);
    let archs = options.arch.map_or_else(|| Arch::ALL.to_vec(), |arch| vec![arch]);
    let wanted: Vec<Wanted<'_>> = images.into_iter().map(|image| (image, archs.as_slice())).collect();
    if options.twice {
        Source::read()?.ensure_committed()?;
    }
    let archives = build(options.profile, &wanted)?;
    for archive in &archives {
        println!("{}", archive.display());
    }
    if options.twice {
        twice::check(&archives)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the images and returns their archives, `<target dir>/image/NAME.oci.tar`. An SBOM of each platform is beside them.
pub(crate) fn build(profile: Profile, wanted: &[Wanted<'_>]) -> Result<Vec<PathBuf>> {
    let serves = wanted.iter().any(|(image, _)| *image == Image::Server);
    let object = if serves { Some(build_ebpf::run()?) } else { None };
    let source = Source::read()?;
    let mut platforms: BTreeMap<&str, Vec<Platform>> = BTreeMap::new();
    for arch in Arch::ALL {
        let images: Vec<Image> =
            wanted.iter().filter(|(_, archs)| archs.contains(&arch)).map(|(image, _)| *image).collect();
        if images.is_empty() {
            continue;
        }
        let names: Vec<&str> = images.iter().map(|image| image.name()).collect();
        let folder = cross::build(arch, profile, &names)?;
        let mut sboms = sbom::of(&names, arch, &source)?;
        for image in images {
            let recipe = Recipe::read(&image.containerfile())?;
            let files = files(&recipe, &folder)?;
            if let (Image::Server, Some(object)) = (image, &object) {
                embeds(&files, object)?;
            }
            let sbom = sboms.remove(image.name()).context("cargo cyclonedx left a program out")?;
            let platform = Platform { architecture: name_of(&arch), files, sbom };
            platforms.entry(image.name()).or_default().push(platform);
        }
    }
    let out = target_dir()?.join("image");
    files::create(&out)?;
    let write = |name: String, bytes: &[u8]| {
        let (path, partial) = (out.join(&name), out.join(format!("{name}.tmp")));
        // Renamed into place: a scenario may be importing the previous one.
        let written = fs::write(&partial, bytes).and_then(|()| fs::rename(&partial, &path));
        written.with_context(|| format!("writing {}", path.display()))?;
        anyhow::Ok(path)
    };
    let mut archives = Vec::new();
    for (image, _) in wanted {
        let platforms = platforms.remove(image.name()).unwrap_or_default();
        for platform in &platforms {
            write(format!("{}-linux-{}.cdx.json", image.name(), platform.architecture), &platform.sbom)?;
        }
        let recipe = Recipe::read(&image.containerfile())?;
        let bytes = oci::archive(&common(*image, recipe, &source), &platforms)?;
        archives.push(write(format!("{}.oci.tar", image.name()), &bytes)?);
    }
    Ok(archives)
}

fn common(image: Image, recipe: Recipe, source: &Source) -> Common {
    let mut labels = recipe.labels;
    labels.insert("org.opencontainers.image.version".into(), VERSION.into());
    if let Some(revision) = &source.revision {
        labels.insert("org.opencontainers.image.revision".into(), revision.clone());
    }
    Common {
        reference: image.reference(),
        user: recipe.user,
        entrypoint: recipe.entrypoint,
        labels,
        created: source.created.clone(),
    }
}

fn files(recipe: &Recipe, context: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for (path, file) in &recipe.files {
        let file = context.join(file);
        let bytes = files::bytes(&file)?;
        files.insert(path.clone(), bytes);
    }
    Ok(files)
}

/// Fails unless the server contains the eBPF object. Both architectures are little-endian, so one object is for both.
fn embeds(files: &BTreeMap<String, Vec<u8>>, object: &Path) -> Result<()> {
    let object_bytes = files::bytes(object)?;
    ensure!(!object_bytes.is_empty(), "{} is empty", object.display());
    ensure!(
        files.values().any(|binary| cross::contains(binary, &object_bytes)),
        "the server does not contain {}",
        object.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn labels_say_what_it_is_and_from_which_commit() {
        let recipe = || Recipe::read(&Image::Server.containerfile()).unwrap();
        let source = |revision: Option<&str>| Source {
            revision: revision.map(str::to_owned),
            created: "2026-01-02T03:04:05Z".into(),
            epoch: 0,
        };
        let labels = common(Image::Server, recipe(), &source(Some("abc"))).labels;
        for label in ["title", "description", "licenses", "version", "revision"] {
            let name = format!("org.opencontainers.image.{label}");
            assert!(labels.get(&name).is_some_and(|value| !value.is_empty()), "{name}");
        }
        assert_eq!(labels["org.opencontainers.image.revision"], "abc");
        let unknown = common(Image::Server, recipe(), &source(None)).labels;
        assert!(!unknown.contains_key("org.opencontainers.image.revision"));
    }

    #[test]
    fn a_server_without_the_programs_is_refused() {
        let object = tempfile::NamedTempFile::new().unwrap();
        fs::write(object.path(), b"the object").unwrap();
        let files = |binary: &[u8]| BTreeMap::from([("tunnel-server".to_owned(), binary.to_vec())]);
        embeds(&files(b"code the object code"), object.path()).unwrap();
        assert!(embeds(&files(b"code the obj"), object.path()).is_err());
    }
}
