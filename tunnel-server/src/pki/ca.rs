//! The CA's files in the state directory, and the steps of a rotation.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tunnel_pki::Zeroizing;
use tunnel_runtime::files::{self, DirectoryLock, PRIVATE_FILE, PUBLIC_FILE};

use super::LOCK;
use super::ca_state::{CaState, Lifetimes, short_hash};
use super::error::PkiError;
use super::issued::IssuedLedger;
use super::material::{CaMaterial, KEY_SUFFIX, ROOTS, key_names};

const DIRECTORY: &str = "ca";
/// Begins the name of a CA that is being written.
const STAGED: &str = ".ca-";
/// File with the name of the Secret that the directory is a copy of.
const SOURCE: &str = "secret";
const BACKUP: &str = "restore it from a backup; only if there is none, move the directory `ca` away: a new CA is created \
                      then, and every agent must enrol again";

/// The Secret of which a state directory has a copy; None if it belongs to no cluster.
pub fn cluster_of(state_dir: &Path) -> Result<Option<String>, PkiError> {
    let secret = files::read_optional(&state_dir.join(DIRECTORY).join(SOURCE))?;
    Ok(secret.map(|secret| secret.trim().to_owned()))
}

/// Names the Secret that `directory` is a copy of.
fn write_source(directory: &Path, secret: &str) -> Result<(), PkiError> {
    Ok(files::replace(&directory.join(SOURCE), format!("{secret}\n").as_bytes(), PUBLIC_FILE)?)
}

/// The CA's files in a state directory. Every method that writes takes the lock; [`Ca::state`] reads without it,
/// because each change is one replacement of `ca.crt`.
#[derive(Clone, Debug)]
pub struct Ca {
    state_dir: PathBuf,
    lifetimes: Lifetimes,
}

impl Ca {
    /// Opens the CA of a state directory; creates the directory and a CA if there is none.
    ///
    /// # Errors
    /// If files exist but are unusable: they are never overwritten.
    pub fn load_or_create(state_dir: &Path, lifetimes: Lifetimes) -> Result<Self, PkiError> {
        let ca = Self { state_dir: state_dir.to_owned(), lifetimes };
        files::create_private_directory(state_dir)?;
        let _lock = ca.lock()?;
        ca.clear_staged();
        if !ca.directory().exists() {
            ca.place(ca.stage(&CaMaterial::generate()?, None)?)?;
            tracing::info!(path = %ca.directory().display(), ca_hash = ca.state()?.hash(), "created a new CA");
        }
        ca.state()?;
        Ok(ca)
    }

    /// Opens the CA of a state directory, which must exist.
    pub fn open(state_dir: &Path, lifetimes: Lifetimes) -> Result<Self, PkiError> {
        let ca = Self { state_dir: state_dir.to_owned(), lifetimes };
        if !ca.directory().exists() {
            return Err(PkiError::file(
                &ca.directory(),
                &"there is no CA",
                "correct --state-dir, or create a CA by starting the server or by `tunnel-server token create`",
            ));
        }
        ca.state()?;
        Ok(ca)
    }

    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    fn directory(&self) -> PathBuf {
        self.state_dir.join(DIRECTORY)
    }

    fn roots_file(&self) -> PathBuf {
        self.directory().join(ROOTS)
    }

    fn lock(&self) -> Result<DirectoryLock, PkiError> {
        Ok(DirectoryLock::acquire(&self.state_dir, LOCK)?)
    }

    /// Writes the CA under another name, for [`Ca::place`]: a crash leaves no half-written CA. `secret` is the Secret that
    /// it is a copy of.
    fn stage(&self, material: &CaMaterial, secret: Option<&str>) -> Result<TempDir, PkiError> {
        let new = tempfile::Builder::new()
            .prefix(STAGED)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&self.state_dir)
            .map_err(|error| PkiError::io(&self.directory(), error))?;
        for (name, key) in material.keys() {
            files::replace(&new.path().join(name), key.as_bytes(), PRIVATE_FILE)?;
        }
        files::replace(&new.path().join(ROOTS), material.roots().as_bytes(), PUBLIC_FILE)?;
        if let Some(secret) = secret {
            write_source(new.path(), secret)?;
        }
        Ok(new)
    }

    /// Removes what was staged when a process or the host died: it has private keys. The caller holds the lock.
    fn clear_staged(&self) {
        for entry in fs::read_dir(&self.state_dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_name().as_encoded_bytes().starts_with(STAGED.as_bytes())
                && let Err(error) = fs::remove_dir_all(&path)
            {
                tracing::warn!(path = %path.display(), %error, "failed to remove an unfinished CA, remove it");
            }
        }
    }

    /// Gives a staged CA its name, which must be free.
    fn place(&self, staged: TempDir) -> Result<(), PkiError> {
        let fail = |error: io::Error| PkiError::io(&self.directory(), error);
        fs::rename(staged.path(), self.directory()).map_err(fail)?;
        // It was renamed: nothing is left to remove under the old name.
        let _ = staged.keep();
        fs::File::open(&self.state_dir).and_then(|directory| directory.sync_all()).map_err(fail)
    }

    /// The text of `ca.crt`, which differs after every change.
    pub(super) fn fingerprint(&self) -> Result<String, PkiError> {
        let path = self.roots_file();
        files::read_optional(&path)?.ok_or_else(|| PkiError::file(&path, &"there is no such file", BACKUP))
    }

    /// Reads the directory's texts.
    ///
    /// # Errors
    /// If the roots are unusable, or a file cannot be read.
    pub fn material(&self) -> Result<CaMaterial, PkiError> {
        let roots = self.fingerprint()?;
        let mut keys = BTreeMap::new();
        for name in key_names(&roots).map_err(|error| self.located(error))? {
            if let Some(key) = files::read_optional_private(&self.directory().join(&name))? {
                keys.insert(name, key);
            }
        }
        Ok(CaMaterial::new(roots, keys))
    }

    pub fn state(&self) -> Result<CaState, PkiError> {
        self.material()?.state(self.lifetimes).map_err(|error| self.located(error))
    }

    /// Adds the path of the wrong text, and the fix.
    fn located(&self, error: PkiError) -> PkiError {
        match error {
            PkiError::Material { name, reason } => {
                PkiError::file(&self.directory().join(name), &reason, BACKUP)
            }
            other => other,
        }
    }

    /// Writes keys before the roots that need them, and removes keys after their roots.
    fn write(&self, material: &CaMaterial) -> Result<(), PkiError> {
        for (name, key) in material.keys() {
            let path = self.directory().join(name);
            if files::read_optional(&path)?.map(Zeroizing::new).as_ref() != Some(key) {
                files::replace(&path, key.as_bytes(), PRIVATE_FILE)?;
            }
        }
        if files::read_optional(&self.roots_file())?.as_deref() != Some(material.roots()) {
            files::replace(&self.roots_file(), material.roots().as_bytes(), PUBLIC_FILE)?;
        }
        let directory = self.directory();
        let entries = fs::read_dir(&directory).map_err(|error| PkiError::io(&directory, error))?;
        for entry in entries {
            let path = entry.map_err(|error| PkiError::io(&directory, error))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.ends_with(KEY_SUFFIX) && !material.keys().contains_key(name) {
                files::remove_if_present(&path)?;
            }
        }
        Ok(())
    }

    /// Makes the directory a copy of a Secret's material; returns true if that changed anything. A CA without a common
    /// root is moved aside, not overwritten. A copy that is current is only read: a disk that is full or read-only does not
    /// matter then.
    ///
    /// # Errors
    /// If the material is not a CA (then nothing is changed), or the files cannot be written. The present CA is still there
    /// if there is no room for the new one.
    pub fn install(
        state_dir: &Path,
        lifetimes: Lifetimes,
        material: &CaMaterial,
        secret: &str,
    ) -> Result<(Self, bool), PkiError> {
        let state = material.state(lifetimes)?;
        let ca = Self { state_dir: state_dir.to_owned(), lifetimes };
        files::create_private_directory(state_dir)?;
        let _lock = ca.lock()?;
        ca.clear_staged();
        // Unusable files are kept too.
        let present = ca.directory().exists().then(|| ca.material());
        let known = present.as_ref().and_then(|present| present.as_ref().ok()?.state(lifetimes).ok());
        if known.as_ref().is_some_and(|known| known.roots().iter().any(|root| state.trusts(&root.hash))) {
            ca.write(material)?;
            let source = cluster_of(state_dir).ok().flatten();
            if source.as_deref() != Some(secret) {
                write_source(&ca.directory(), secret)?;
            }
        } else {
            // Written before the present one is moved, which stays in use if there is no room for another.
            let staged = ca.stage(material, Some(secret))?;
            if present.is_some() {
                ca.set_aside(known.as_ref().map_or("broken", |known| short_hash(known.hash())), secret)?;
            }
            ca.place(staged)?;
        }
        let changed = !matches!(&present, Some(Ok(present)) if present == material);
        Ok((ca, changed))
    }

    fn set_aside(&self, name: &str, secret: &str) -> Result<(), PkiError> {
        let mut aside = self.state_dir.join(format!("{DIRECTORY}.replaced-{name}"));
        // An earlier one of this name may hold other keys; broken ones share a name.
        for number in 2_u32.. {
            if !aside.exists() {
                break;
            }
            aside.set_file_name(format!("{DIRECTORY}.replaced-{name}-{number}"));
        }
        fs::rename(self.directory(), &aside).map_err(|error| PkiError::io(&aside, error))?;
        tracing::warn!(
            secret,
            path = %aside.display(),
            "replaced the CA of the state directory by the Secret's and kept the old one at the path"
        );
        Ok(())
    }

    /// Changes the files in one locked step; `step` also returns the hash of the changed root.
    fn rotate(
        &self,
        step: impl FnOnce(&CaMaterial) -> Result<(CaMaterial, String), PkiError>,
    ) -> Result<String, PkiError> {
        let _lock = self.lock()?;
        let path = self.directory().join(SOURCE);
        if let Some(secret) = cluster_of(&self.state_dir)? {
            return Err(PkiError::file(
                &path,
                &format_args!("this is a copy of the CA in Secret {secret}"),
                "change it there: give --kubeconfig FILE, or --in-cluster within a pod (a server that left the cluster \
                 for good: remove this file)",
            ));
        }
        let (next, hash) = step(&self.material()?).map_err(|error| self.located(error))?;
        self.write(&next)?;
        Ok(hash)
    }

    /// First step of a rotation: creates a new root that is trusted besides the signing one. Returns its hash.
    pub fn introduce(&self) -> Result<String, PkiError> {
        self.rotate(CaMaterial::introduce)
    }

    /// Second step: the introduced root starts to sign. Returns its hash.
    pub fn activate(&self) -> Result<String, PkiError> {
        self.rotate(CaMaterial::activate)
    }

    /// Last step: removes the old root from the trusted ones, and its key. Returns its hash.
    ///
    /// # Errors
    /// [`PkiError::Rotation`] while a node holds an unexpired certificate of the old root, unless `force`: its agent would
    /// have to enrol again with a token.
    pub fn retire(&self, force: bool) -> Result<String, PkiError> {
        self.rotate(|present| {
            let (next, old) = present.retire()?;
            let left = IssuedLedger::new(&self.state_dir).live_of_root(&old)?;
            if !left.is_empty() && !force {
                let names: Vec<_> = left.iter().take(10).map(|issued| issued.node.as_str()).collect();
                let more = if left.len() > names.len() { ", …" } else { "" };
                return Err(PkiError::Rotation(format!(
                    "{} node(s) still hold a certificate of the old root: {}{more}; they renew by themselves once \
                     they are connected. `ca retire --force` gives them up: they must enrol again with a new token",
                    left.len(),
                    names.join(", "),
                )));
            }
            Ok((next, old))
        })
    }
}
