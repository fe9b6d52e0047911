//! Pins of the links and of what a successor reads, in a BPF file system; and what dead servers have left there.
//!
//! Each server has a folder `postern/NETNS-DEVICE-INODE-RANDOM`: its network namespace and its state directory tell whose
//! it is. (A name in a BPF file system has no dots.)

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aya::Ebpf;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{Array, Map, MapData, MapError};
use aya::programs::links::FdLink;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::time::{ClockId, clock_gettime};
use tunnel_abi::{Mapping, V4, V6, names};
use tunnel_core::error::chain;

use super::attached::AttachType;
use super::config::{PinConfig, RedirectConfig};
use super::error::RedirectError;
use super::netns::this_netns;

/// Below the BPF file system.
const FOLDER: &str = "postern";
/// A server that has given no sign of life for so long is not alive; it gives one each second. One that is, but is slow,
/// loses its pins and nothing else.
const DEAD: Duration = Duration::from_secs(3);
/// How often to look for one.
const LOOK: Duration = Duration::from_millis(100);

/// This server's folder. Dropping it removes the folder, and with it what is still pinned there.
#[derive(Debug)]
pub(super) struct Pins {
    dir: PathBuf,
}

impl Pins {
    /// Makes the folder, with the maps that a successor reads.
    ///
    /// # Errors
    /// The reason why nothing can be pinned there.
    pub(super) fn create(config: &PinConfig, netns: &File, ebpf: &Ebpf) -> Result<Self, String> {
        let kind = statfs(&config.dir).map_err(|error| error.to_string())?.filesystem_type();
        if kind != BPF_FS_MAGIC {
            return Err("it is not a BPF file system".into());
        }
        let prefix = prefix(config, netns).map_err(|error| error.to_string())?;
        let dir = config.dir.join(FOLDER).join(format!("{prefix}{:016x}", rand::random::<u64>()));
        fs::create_dir_all(&dir).map_err(|error| not_made(&dir, &error))?;
        let pins = Self { dir };
        for name in [names::ROUTES_V4, names::ROUTES_V6, names::ALIVE] {
            let map = ebpf.map(name).ok_or_else(|| format!("the object has no map {name}"))?;
            map.pin(pins.dir.join(name)).map_err(|error| format!("map {name}: {}", chain(&error)))?;
        }
        Ok(pins)
    }

    /// Pins the link at `hook`, if there is one. After an error it is detached.
    pub(super) fn pin(&self, link: &mut Option<FdLink>, hook: AttachType) -> Result<(), RedirectError> {
        let Some(taken) = link.take() else { return Ok(()) };
        let path = self.dir.join(hook.name());
        match taken.pin(&path) {
            Ok(pinned) => *link = Some(pinned.into()),
            Err(error) => return Err(RedirectError::Pin { path, reason: chain(&error) }),
        }
        Ok(())
    }

    pub(super) fn unpin(&self, hook: AttachType) {
        remove(&self.dir.join(hook.name()));
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        remove_folder(&self.dir);
    }
}

/// What servers with the same state directory have left when they died.
#[derive(Debug, Default)]
pub struct Orphans {
    folders: Vec<PathBuf>,
    tokens: Vec<(IpNet, IpAddr)>,
}

impl Orphans {
    /// Searches for them. `live` is the folder of a server that is still there.
    ///
    /// # Errors
    /// The BPF file system cannot be read.
    pub fn find(config: &RedirectConfig, live: Option<&Path>) -> Result<Self, RedirectError> {
        let Some(pins) = &config.pins else { return Ok(Self::default()) };
        let mut folders = of_state(pins)?;
        // Its container may have the file system at another path.
        let live = live.and_then(Path::file_name);
        folders.retain(|folder| folder.file_name() != live);
        let mut tokens = Vec::new();
        for folder in &folders {
            match read_tokens(folder) {
                Ok(found) => tokens.extend(found),
                // Of another version, perhaps. Its programs go as well.
                Err(error) => {
                    tracing::warn!(folder = %folder.display(), error = chain(&error), "cannot read a dead server's tokens");
                }
            }
        }
        Ok(Self { folders, tokens })
    }

    pub fn is_empty(&self) -> bool {
        self.folders.is_empty()
    }

    /// The addresses that they redirected, and the first token of each.
    pub fn tokens(&self) -> &[(IpNet, IpAddr)] {
        &self.tokens
    }

    /// Ends what they redirect.
    pub fn remove(self) {
        for folder in self.folders {
            remove_of_dead(&folder);
        }
    }
}

/// The folders of other servers with the same state directory, which may die.
#[derive(Debug, Default)]
pub struct Others(Vec<PathBuf>);

impl Others {
    /// `own` is the folder of this server.
    ///
    /// # Errors
    /// The BPF file system cannot be read.
    pub(super) fn find(config: &PinConfig, own: Option<&Path>) -> Result<Self, RedirectError> {
        let mut folders = of_state(config)?;
        folders.retain(|folder| Some(folder.as_path()) != own);
        Ok(Self(folders))
    }

    /// Removes what those have pinned that are dead by now. That of one which has just died takes seconds.
    pub async fn remove_dead(self) {
        let remove = move || {
            for folder in self.0 {
                // One that stopped has removed its own.
                if folder.exists() && !is_alive(&folder) {
                    remove_of_dead(&folder);
                }
            }
        };
        // It fails only when this process ends.
        let _ = tokio::task::spawn_blocking(remove).await;
    }
}

/// Removes what dead servers of this network namespace have left, and returns their folders.
pub(super) fn remove_dead(bpffs: &Path) -> Result<Vec<PathBuf>, RedirectError> {
    let dead = dead(bpffs)?;
    for folder in &dead {
        remove_folder(folder);
    }
    Ok(dead)
}

/// The folders of dead servers of this network namespace.
pub(super) fn dead(bpffs: &Path) -> Result<Vec<PathBuf>, RedirectError> {
    let netns = this_netns()?;
    let prefix = netns_prefix(&netns)
        .map_err(|source| RedirectError::Io { what: "cannot read the network namespace".into(), source })?;
    let mut dead = folders(bpffs, &prefix)?;
    dead.retain(|folder| !is_alive(folder));
    Ok(dead)
}

/// Waits for a sign of life if there was one a moment ago.
fn is_alive(folder: &Path) -> bool {
    let read = || -> Result<u64, MapError> {
        let map = Array::<_, u64>::try_from(Map::Array(MapData::from_pin(folder.join(names::ALIVE))?))?;
        map.get(&0, 0)
    };
    // One that cannot be read was not written by any server that still runs.
    let Ok(first) = read() else { return false };
    while u128::from(monotonic_nanos().saturating_sub(first)) < DEAD.as_nanos() {
        std::thread::sleep(LOOK);
        if read().is_ok_and(|now| now != first) {
            return true;
        }
    }
    false
}

/// The clock that the programs read as well.
pub(super) fn monotonic_nanos() -> u64 {
    // It fails for unknown clocks only, and counts from the boot.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Why this folder cannot be made, and what usually is the reason.
fn not_made(folder: &Path, error: &io::Error) -> String {
    let usual = match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            ": it is mounted read-only for this process (systemd: ProtectKernelTunables=yes does that, whatever \
             ReadWritePaths= says; Kubernetes: readOnly of the volumeMount)"
        }
        io::ErrorKind::PermissionDenied => {
            ": a security module denies it (AppArmor's profile for containers everything below /sys/fs: mount it \
             elsewhere in the container, and name that with --bpffs; SELinux: seLinuxOptions)"
        }
        _ => "",
    };
    format!("creating {}: {error}{usual}", folder.display())
}

fn netns_prefix(netns: &File) -> io::Result<String> {
    Ok(format!("{}-", netns.metadata()?.ino()))
}

fn prefix(config: &PinConfig, netns: &File) -> io::Result<String> {
    let state = fs::metadata(&config.state_dir)?;
    Ok(format!("{}{:x}-{:x}-", netns_prefix(netns)?, state.dev(), state.ino()))
}

/// The folders of the servers with this state directory.
fn of_state(config: &PinConfig) -> Result<Vec<PathBuf>, RedirectError> {
    let netns = this_netns()?;
    let prefix = prefix(config, &netns).map_err(|source| RedirectError::Io {
        what: format!("cannot read {}", config.state_dir.display()),
        source,
    })?;
    folders(&config.dir, &prefix)
}

fn folders(bpffs: &Path, prefix: &str) -> Result<Vec<PathBuf>, RedirectError> {
    let path = bpffs.join(FOLDER);
    let failed =
        |source| RedirectError::Io { what: format!("cannot list the pins in {}", path.display()), source };
    let entries = match fs::read_dir(&path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut folders = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

fn read_tokens(folder: &Path) -> Result<Vec<(IpNet, IpAddr)>, MapError> {
    let map = |name: &str| MapData::from_pin(folder.join(name)).map(Map::LpmTrie);
    let v4 = LpmTrie::<_, V4, Mapping<V4>>::try_from(map(names::ROUTES_V4)?)?;
    let v6 = LpmTrie::<_, V6, Mapping<V6>>::try_from(map(names::ROUTES_V6)?)?;
    let mut tokens = Vec::new();
    for entry in v4.iter() {
        let (key, route) = entry?;
        let net = u8::try_from(key.prefix_len()).ok();
        let net = net.and_then(|len| Ipv4Net::new(Ipv4Addr::from(key.data()), len).ok());
        tokens.extend(net.map(|net| (IpNet::V4(net), IpAddr::V4(route.base.into()))));
    }
    for entry in v6.iter() {
        let (key, route) = entry?;
        let net = u8::try_from(key.prefix_len()).ok();
        let net = net.and_then(|len| Ipv6Net::new(Ipv6Addr::from(key.data()), len).ok());
        tokens.extend(net.map(|net| (IpNet::V6(net), IpAddr::V6(route.base.into()))));
    }
    Ok(tokens)
}

fn remove_of_dead(folder: &Path) {
    tracing::info!(folder = %folder.display(), "removing the programs of a server that died");
    remove_folder(folder);
}

/// New connects first: while steering still works, none of them is led to where nobody listens.
fn remove_folder(folder: &Path) {
    for hook in [AttachType::Connect4, AttachType::Connect6, AttachType::SkLookup] {
        remove(&folder.join(hook.name()));
    }
    let rest = fs::read_dir(folder).into_iter().flatten().flatten();
    rest.for_each(|entry| remove(&entry.path()));
    match fs::remove_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(folder = %folder.display(), %error, "a folder of pins stays");
        }
        _ => {}
    }
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "a pin stays");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// The folders of two servers with this state directory, beside that of another.
    fn folders_of_two(bpffs: &TempDir, state: &TempDir) -> (PinConfig, [PathBuf; 2]) {
        let pins = PinConfig { dir: bpffs.path().into(), state_dir: state.path().into() };
        let prefix = prefix(&pins, &this_netns().unwrap()).unwrap();
        let folders = ["0", "1"].map(|number| bpffs.path().join(FOLDER).join(format!("{prefix}{number}")));
        folders.iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        fs::create_dir(bpffs.path().join(FOLDER).join("1-2-3-another")).unwrap();
        (pins, folders)
    }

    #[test]
    fn a_server_that_lives_is_no_orphan_though_its_file_system_is_at_another_path() {
        let (bpffs, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pins, folders) = folders_of_two(&bpffs, &state);
        let live = folders[0].file_name().unwrap();
        let live = Path::new("/elsewhere").join(FOLDER).join(live);
        let config = RedirectConfig { pins: Some(pins), ..RedirectConfig::default() };
        assert_eq!(Orphans::find(&config, Some(&live)).unwrap().folders, folders[1..]);
        let mut all = Orphans::find(&config, None).unwrap().folders;
        all.sort();
        assert_eq!(all, folders);
    }

    #[tokio::test]
    async fn what_another_server_leaves_is_removed_and_nothing_else() {
        let (bpffs, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (pins, [own, other]) = folders_of_two(&bpffs, &state);
        fs::write(other.join("connect4"), "").unwrap();
        let others = Others::find(&pins, Some(&own)).unwrap();
        assert_eq!(others.0, std::slice::from_ref(&other));
        // It gives no sign of life.
        others.remove_dead().await;
        assert!(!other.exists() && own.exists());
        assert_eq!(fs::read_dir(bpffs.path().join(FOLDER)).unwrap().count(), 2);
    }
}
