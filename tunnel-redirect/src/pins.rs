//! Pins the programs, and the maps that a successor reads, in a BPF file system; and removes the pins of dead servers.
//!
//! Each server has a directory `postern/NETNS-DEVICE-INODE-RANDOM`, which identifies its network namespace and its
//! state directory. (A name in a BPF file system has no dots.)

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{Map, MapData, MapError};
use aya::programs::links::FdLink;
use aya::programs::{CgroupSockAddr, CgroupSockAddrAttachType};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::time::{ClockId, clock_gettime};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tunnel_abi::{Mapping, V4, V6, names};
use tunnel_runtime::error::chain;

use super::attached::{self, AttachType};
use super::cgroup;
use super::config::{PinConfig, RedirectConfig};
use super::error::RedirectError;
use super::netns::this_netns;

/// Name below the BPF file system.
const FOLDER: &str = "postern";
/// Name in a server's directory.
const LOOKUP_LINK: &str = "sk_lookup";
/// Maximum time for a process to exit after its connection has ended.
const ENDING: Duration = Duration::from_secs(3);
/// Interval at which that is checked.
const LOOK: Duration = Duration::from_millis(100);

/// This server's directory. Dropping it removes the directory and all pins left in it.
#[derive(Debug)]
pub(super) struct Pins {
    dir: PathBuf,
    /// Locked while this process lives.
    _alive: File,
}

impl Pins {
    /// Creates the directory and pins the maps that a successor reads.
    ///
    /// # Errors
    /// The reason why nothing can be pinned there.
    pub(super) fn create(config: &PinConfig, netns: &File, ebpf: &Ebpf) -> Result<Self, String> {
        let folder = config.dir.join(FOLDER);
        // A pod has only this folder of it.
        let known = if folder.exists() { &folder } else { &config.dir };
        let kind = statfs(known).map_err(|error| error.to_string())?.filesystem_type();
        if kind != BPF_FS_MAGIC {
            return Err("it is not a BPF file system".into());
        }
        let prefix = prefix(config, netns).map_err(|error| error.to_string())?;
        let dir = folder.join(format!("{prefix}{:016x}", rand::random::<u64>()));
        // Private, so that no other user can lock it.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        let locked = made.and_then(|()| File::open(&dir)).and_then(|dir| dir.lock().map(|()| dir));
        let alive = locked.map_err(|error| not_made(&dir, &error))?;
        let pins = Self { dir, _alive: alive };
        for name in [names::ROUTES_V4, names::ROUTES_V6] {
            let map = ebpf.map(name).ok_or_else(|| format!("the object has no map {name}"))?;
            map.pin(pins.dir.join(name)).map_err(|error| format!("map {name}: {}", chain(&error)))?;
        }
        Ok(pins)
    }

    /// Pins a cgroup's program, so that a process with the pin can detach it.
    pub(super) fn pin_program(
        &self,
        program: &mut CgroupSockAddr,
        hook: AttachType,
    ) -> Result<(), RedirectError> {
        let path = self.dir.join(hook.program());
        program.pin(&path).map_err(|error| RedirectError::Pin { path, reason: chain(&error) })
    }

    /// Pins the lookup's link, if any. On an error the lookup is detached.
    pub(super) fn pin_lookup(&self, link: &mut Option<FdLink>) -> Result<(), RedirectError> {
        let Some(taken) = link.take() else { return Ok(()) };
        let path = self.dir.join(LOOKUP_LINK);
        match taken.pin(&path) {
            Ok(pinned) => *link = Some(pinned.into()),
            Err(error) => return Err(RedirectError::Pin { path, reason: chain(&error) }),
        }
        Ok(())
    }

    pub(super) fn unpin_lookup(&self) {
        remove(&self.dir.join(LOOKUP_LINK));
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

/// Remains of dead servers with the same state directory.
#[derive(Debug, Default)]
pub struct Orphans {
    folders: Vec<PathBuf>,
    virtual_addresses: Vec<(IpNet, IpAddr)>,
}

impl Orphans {
    /// Finds them. `live` is the directory of a server that is still running.
    ///
    /// # Errors
    /// The BPF file system cannot be read.
    pub fn find(config: &RedirectConfig, live: Option<&Path>) -> Result<Self, RedirectError> {
        let Some(pins) = &config.pins else { return Ok(Self::default()) };
        let mut folders = of_state(pins)?;
        // Compares names, as the server's container may have the file system at another path.
        let live = live.and_then(Path::file_name);
        folders.retain(|folder| folder.file_name() != live);
        let mut virtual_addresses = Vec::new();
        for folder in &folders {
            match read_virtual_addresses(folder) {
                Ok(found) => virtual_addresses.extend(found),
                // Perhaps of another version. Its programs are removed as well.
                Err(error) => {
                    tracing::warn!(path = %folder.display(), error = chain(&error), "failed to read the virtual addresses of a dead server");
                }
            }
        }
        Ok(Self { folders, virtual_addresses })
    }

    pub fn is_empty(&self) -> bool {
        self.folders.is_empty()
    }

    /// The networks that they redirected, each with the first virtual address.
    pub fn virtual_addresses(&self) -> &[(IpNet, IpAddr)] {
        &self.virtual_addresses
    }

    /// Removes their redirects. Skips a server that lives: it has handed its redirect over and finishes its
    /// connections.
    pub fn remove(self) {
        for folder in self.folders.iter().filter(|folder| !is_alive(folder)) {
            remove_of_dead(folder);
        }
    }
}

/// Directories of other servers with the same state directory, which may die.
#[derive(Debug, Default)]
pub struct Others(Vec<PathBuf>);

impl Others {
    /// `own` is the directory of this server.
    ///
    /// # Errors
    /// The BPF file system cannot be read.
    pub(super) fn find(config: &PinConfig, own: Option<&Path>) -> Result<Self, RedirectError> {
        let mut folders = of_state(config)?;
        folders.retain(|folder| Some(folder.as_path()) != own);
        Ok(Self(folders))
    }

    /// Removes the pins of servers that are dead or about to exit: a process closes its connections before its locks.
    pub async fn remove_dead(self) {
        for folder in self.0 {
            let since = Instant::now();
            while is_alive(&folder) && since.elapsed() < ENDING {
                sleep(LOOK).await;
            }
            // A server that stopped has removed its own.
            if folder.exists() && !is_alive(&folder) {
                // Fails only when this process exits.
                let _ = spawn_blocking(move || remove_of_dead(&folder)).await;
            }
        }
    }
}

/// Removes the remains of dead servers of this network namespace, and returns their directories.
pub(super) fn remove_dead(bpffs: &Path) -> Result<Vec<PathBuf>, RedirectError> {
    let mut dead = dead(bpffs)?;
    dead.retain(|folder| remove_of_dead(folder));
    Ok(dead)
}

/// Directories of dead servers of this network namespace.
pub(super) fn dead(bpffs: &Path) -> Result<Vec<PathBuf>, RedirectError> {
    let netns = this_netns()?;
    let prefix = netns_prefix(&netns)
        .map_err(|source| RedirectError::Io { what: "cannot read the network namespace".into(), source })?;
    let mut dead = folders(bpffs, &prefix)?;
    dead.retain(|folder| !is_alive(folder));
    Ok(dead)
}

/// Reports whether the directory's server is alive: it holds a lock on the directory.
fn is_alive(folder: &Path) -> bool {
    File::open(folder).is_ok_and(|dir| matches!(dir.try_lock(), Err(TryLockError::WouldBlock)))
}

/// Reads the same clock as the programs.
pub(super) fn monotonic_nanos() -> u64 {
    // Fails for unknown clocks only; counts from boot.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Describes why this directory cannot be created, with the usual cause.
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

/// Directories of the servers with this state directory.
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

fn read_virtual_addresses(folder: &Path) -> Result<Vec<(IpNet, IpAddr)>, MapError> {
    let map = |name: &str| MapData::from_pin(folder.join(name)).map(Map::LpmTrie);
    let v4 = LpmTrie::<_, V4, Mapping<V4>>::try_from(map(names::ROUTES_V4)?)?;
    let v6 = LpmTrie::<_, V6, Mapping<V6>>::try_from(map(names::ROUTES_V6)?)?;
    let mut virtual_addresses = Vec::new();
    for entry in v4.iter() {
        let (key, route) = entry?;
        let net = u8::try_from(key.prefix_len()).ok();
        let net = net.and_then(|len| Ipv4Net::new(Ipv4Addr::from(key.data()), len).ok());
        virtual_addresses.extend(net.map(|net| (IpNet::V4(net), IpAddr::V4(route.base.into()))));
    }
    for entry in v6.iter() {
        let (key, route) = entry?;
        let net = u8::try_from(key.prefix_len()).ok();
        let net = net.and_then(|len| Ipv6Net::new(Ipv6Addr::from(key.data()), len).ok());
        virtual_addresses.extend(net.map(|net| (IpNet::V6(net), IpAddr::V6(route.base.into()))));
    }
    Ok(virtual_addresses)
}

/// Returns false if programs are still attached. Their pins stay: a program can be detached only through its pin.
fn remove_of_dead(folder: &Path) -> bool {
    tracing::info!(path = %folder.display(), "removing the BPF programs of a dead server");
    // New connects come first: while steering still works, none goes to a listener that is gone.
    if let Err(error) = detach(folder) {
        tracing::warn!(path = %folder.display(), %error, "failed to detach the BPF programs of a dead server");
        return false;
    }
    remove_folder(folder);
    true
}

/// Detaches the programs that are pinned there from any cgroup, as the server may have had any `--redirect-cgroup`.
fn detach(folder: &Path) -> Result<(), RedirectError> {
    let mut pinned = Vec::new();
    for hook in AttachType::CGROUP {
        // Only aya's own attach() would use the type.
        let program =
            CgroupSockAddr::from_pin(folder.join(hook.program()), CgroupSockAddrAttachType::Connect4);
        if let Ok(program) = program
            && let Ok(info) = program.info()
        {
            pinned.push((hook, program, info.id()));
        }
    }
    if pinned.is_empty() {
        return Ok(());
    }
    let mut result = Ok(());
    for cgroup in cgroup::all()? {
        // A cgroup removed meanwhile has lost its attachments too.
        let Ok(dir) = File::open(&cgroup) else { continue };
        for (hook, program, id) in &pinned {
            let detached = match program.fd() {
                Ok(fd) => attached::detach(&dir, *hook, fd.as_fd(), *id),
                Err(_) => Ok(()),
            };
            if let Err(source) = detached
                && cgroup.exists()
            {
                let what = format!("cannot detach {} from {}", hook.program(), cgroup.display());
                // One that fails must not keep the programs in the others.
                result = Err(RedirectError::Io { what, source });
            }
        }
    }
    result
}

fn remove_folder(folder: &Path) {
    let rest = fs::read_dir(folder).into_iter().flatten().flatten();
    rest.for_each(|entry| remove(&entry.path()));
    match fs::remove_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %folder.display(), %error, "failed to remove a BPF pin directory");
        }
        _ => {}
    }
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "failed to remove a BPF pin");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// The directories of two servers with this state directory, next to one of another.
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
        let others = || Others::find(&pins, Some(&own)).unwrap();
        assert_eq!(others().0, std::slice::from_ref(&other));
        let alive = File::open(&other).unwrap();
        alive.lock().unwrap();
        let orphans = Orphans { folders: vec![other.clone()], virtual_addresses: Vec::new() };
        orphans.remove();
        let removing = tokio::spawn(others().remove_dead());
        tokio::time::sleep(2 * LOOK).await;
        assert!(other.exists() && !removing.is_finished());
        drop(alive);
        removing.await.unwrap();
        assert!(!other.exists() && own.exists());
        assert_eq!(fs::read_dir(bpffs.path().join(FOLDER)).unwrap().count(), 2);
    }
}
