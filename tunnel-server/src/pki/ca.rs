use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::KeyPair;
use rustls_pki_types::CertificateDer;
use tunnel_core::identity::files::{self, DirectoryLock, PRIVATE_FILE, PUBLIC_FILE};
use tunnel_core::identity::{TrustBundle, pem_of_certificates};

use super::authority::short_hash;
use super::{CaState, IssuedLedger, LOCK, Lifetimes, PkiError, Role, Root};

const DIRECTORY: &str = "ca";
const ROOTS: &str = "ca.crt";
const BACKUP: &str = "restore it from a backup; only if there is none, move the directory `ca` away: a new CA is made \
                      then, and every agent must enrol again";

/// The CA's files under a state directory. Every method takes the lock for itself; [`Ca::state`] reads without it,
/// because each change is one replacement of `ca.crt`.
#[derive(Clone, Debug)]
pub struct Ca {
    state_dir: PathBuf,
    lifetimes: Lifetimes,
}

impl Ca {
    /// The CA of a state directory; when there is none yet, the directory and a CA are made.
    ///
    /// # Errors
    /// Files that are there but cannot be understood: nothing is made anew over them.
    pub fn load_or_create(state_dir: &Path, lifetimes: Lifetimes) -> Result<Self, PkiError> {
        let ca = Self { state_dir: state_dir.to_owned(), lifetimes };
        files::create_private_directory(state_dir)?;
        let _lock = ca.lock()?;
        if !ca.directory().exists() {
            ca.create()?;
        }
        ca.state()?;
        Ok(ca)
    }

    /// The CA of a state directory, which must be there.
    pub fn open(state_dir: &Path, lifetimes: Lifetimes) -> Result<Self, PkiError> {
        let ca = Self { state_dir: state_dir.to_owned(), lifetimes };
        if !ca.directory().exists() {
            return Err(PkiError::file(
                &ca.directory(),
                &"there is no CA",
                "mend --state-dir, or make a CA by starting the server or by `tunnel-server token create`",
            ));
        }
        ca.state()?;
        Ok(ca)
    }

    /// The state directory.
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    fn directory(&self) -> PathBuf {
        self.state_dir.join(DIRECTORY)
    }

    fn roots_file(&self) -> PathBuf {
        self.directory().join(ROOTS)
    }

    fn key_file(&self, hash: &str) -> PathBuf {
        self.directory().join(format!("{}.key", short_hash(hash)))
    }

    fn lock(&self) -> Result<DirectoryLock, PkiError> {
        Ok(DirectoryLock::acquire(&self.state_dir, LOCK)?)
    }

    /// Made under another name and moved into place: a crash leaves no half of a CA.
    fn create(&self) -> Result<(), PkiError> {
        let fail = |error: io::Error| PkiError::io(&self.directory(), error);
        let new = tempfile::Builder::new()
            .prefix(".ca-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&self.state_dir)
            .map_err(fail)?;
        let (root, key) = Root::create(1)?;
        let key_path = new.path().join(format!("{}.key", short_hash(&root.hash)));
        files::replace(&key_path, key.serialize_pem().as_bytes(), PRIVATE_FILE)?;
        let pem = pem_of_certificates(std::slice::from_ref(&root.certificate));
        files::replace(&new.path().join(ROOTS), pem.as_bytes(), PUBLIC_FILE)?;
        fs::rename(new.path(), self.directory()).map_err(fail)?;
        // Moved: there is nothing left to remove under the old name.
        let _ = new.keep();
        fs::File::open(&self.state_dir).and_then(|directory| directory.sync_all()).map_err(fail)?;
        tracing::info!(directory = %self.directory().display(), ca_hash = root.hash, "made a new CA");
        Ok(())
    }

    /// The text of `ca.crt`: another text means that something changed.
    pub(super) fn fingerprint(&self) -> Result<String, PkiError> {
        let path = self.roots_file();
        files::read_optional(&path)?.ok_or_else(|| PkiError::file(&path, &"there is no such file", BACKUP))
    }

    /// Reads the roots and their keys.
    pub fn state(&self) -> Result<CaState, PkiError> {
        let path = self.roots_file();
        let bundle = TrustBundle::from_pem(&self.fingerprint()?)
            .map_err(|error| PkiError::file(&path, &error, BACKUP))?;
        let mut roots = Vec::new();
        for (index, certificate) in bundle.roots().iter().enumerate() {
            roots.push(self.read_root(certificate, index == 0)?);
        }
        CaState::new(roots, self.lifetimes)
    }

    fn read_root(&self, certificate: &CertificateDer<'static>, signs: bool) -> Result<Root, PkiError> {
        let hash = tunnel_core::identity::ca_hash(certificate)?;
        let path = self.key_file(&hash);
        let Some(pem) = files::read_optional_private(&path)? else {
            if signs {
                return Err(PkiError::file(&path, &"the signing root's key is missing", BACKUP));
            }
            return Root::new(certificate.clone(), None);
        };
        let key = KeyPair::from_pem(&pem).map_err(|error| PkiError::file(&path, &error, BACKUP))?;
        Root::new(certificate.clone(), Some(key)).map_err(|error| PkiError::file(&path, &error, BACKUP))
    }

    fn write_roots(&self, roots: &[&Root]) -> Result<(), PkiError> {
        let certificates: Vec<_> = roots.iter().map(|root| root.certificate.clone()).collect();
        let pem = TrustBundle::new(certificates)?.to_pem();
        Ok(files::replace(&self.roots_file(), pem.as_bytes(), PUBLIC_FILE)?)
    }

    /// First step of a rotation: makes a new root that is trusted besides the one that signs. Returns its hash.
    pub fn introduce(&self) -> Result<String, PkiError> {
        let _lock = self.lock()?;
        let state = self.state()?;
        if let Some(other) = state.roots().get(1) {
            return Err(PkiError::Rotation(match state.role(other) {
                Role::Introduced => format!(
                    "a rotation is under way: root {} is introduced and waits for `ca activate`",
                    other.hash
                ),
                _ => format!("a rotation is under way: root {} waits for `ca retire`", other.hash),
            }));
        }
        let generation = state.roots().iter().map(|root| root.generation).max().unwrap_or(0) + 1;
        let (root, key) = Root::create(generation)?;
        files::replace(&self.key_file(&root.hash), key.serialize_pem().as_bytes(), PRIVATE_FILE)?;
        let all: Vec<_> = state.roots().iter().chain([&root]).collect();
        self.write_roots(&all)?;
        Ok(root.hash)
    }

    /// Second step: the introduced root signs from now on. Returns its hash.
    pub fn activate(&self) -> Result<String, PkiError> {
        let _lock = self.lock()?;
        let state = self.state()?;
        let introduced =
            state.roots().iter().find(|root| state.role(root) == Role::Introduced).ok_or_else(|| {
                PkiError::Rotation("there is no introduced root to activate; `ca introduce` makes one".into())
            })?;
        if !introduced.has_key() {
            let path = self.key_file(&introduced.hash);
            return Err(PkiError::file(
                &path,
                &"the introduced root's key is missing",
                "restore it from a backup",
            ));
        }
        let rest = state.roots().iter().filter(|root| root.hash != introduced.hash);
        let order: Vec<_> = std::iter::once(introduced).chain(rest).collect();
        self.write_roots(&order)?;
        Ok(introduced.hash.clone())
    }

    /// Last step: the old root is trusted no longer, and its key is removed. Returns its hash.
    ///
    /// # Errors
    /// [`PkiError::Rotation`] while a node holds a certificate of the old root that has not ended, unless `force`:
    /// such an agent would have to enrol again by a token.
    pub fn retire(&self, force: bool) -> Result<String, PkiError> {
        let _lock = self.lock()?;
        let state = self.state()?;
        let old = state.roots().iter().find(|root| state.role(root) == Role::Retiring).ok_or_else(|| {
            PkiError::Rotation(
                "there is no old root to retire; `ca introduce` and `ca activate` come first".into(),
            )
        })?;
        let left = IssuedLedger::new(&self.state_dir).live_of_root(&old.hash)?;
        if !left.is_empty() && !force {
            let names: Vec<_> = left.iter().take(10).map(|issued| issued.node.as_str()).collect();
            let more = if left.len() > names.len() { ", …" } else { "" };
            return Err(PkiError::Rotation(format!(
                "{} node(s) still hold a certificate of the old root: {}{more}; they renew by themselves once they \
                 are connected. `ca retire --force` gives them up: they must enrol again with a new token",
                left.len(),
                names.join(", "),
            )));
        }
        let kept: Vec<_> = state.roots().iter().filter(|root| root.hash != old.hash).collect();
        self.write_roots(&kept)?;
        files::remove_if_present(&self.key_file(&old.hash))?;
        Ok(old.hash.clone())
    }
}
