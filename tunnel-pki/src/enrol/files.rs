//! Files of the identity in the state directory.

use std::fs;
use std::path::{Path, PathBuf};

use tunnel_runtime::blocking::blocking;
use tunnel_runtime::files::{self, FileError, PRIVATE_FILE, PUBLIC_FILE};

use crate::{AgentIdentity, Holder, IdentityError, PrivateKey, TrustBundle, pem_of_certificates};

const RESTORE: &str = "restore it from a backup, or move the key, the certificate and ca.crt away and enrol again with a \
                    new token (`tunnel-server token create`)";

/// True if an agent or a redirector with this state directory has enrolled.
pub(crate) fn has_certificate(state_dir: &Path, holder: Holder) -> bool {
    IdentityFiles::new(state_dir, holder).certificate().exists()
}

/// Reads the identity in a state directory, which may have expired or be another node's, and changes nothing there. There is
/// none if there is no certificate.
///
/// # Errors
/// Names the file that is missing, cannot be read or does not fit the others.
pub fn stored_identity(state_dir: &Path, holder: Holder) -> Result<Option<AgentIdentity>, IdentityError> {
    Ok(IdentityFiles::new(state_dir, holder).read()?.map(|(identity, _)| identity))
}

/// Reads or writes on a thread for that: an edge's disk may take long, and the caller's relays all connections.
///
/// # Errors
/// Those of `work`. It has panicked, or the runtime ends.
pub(crate) async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, IdentityError> + Send + 'static,
) -> Result<T, IdentityError> {
    let interrupted =
        |stopped| Err(IdentityError::Key(format!("work on its file was interrupted: {stopped}")));
    blocking(work).await.unwrap_or_else(interrupted)
}

#[derive(Clone, Debug)]
pub(crate) struct IdentityFiles {
    directory: PathBuf,
    holder: Holder,
}

impl IdentityFiles {
    pub(crate) fn new(state_dir: &Path, holder: Holder) -> Self {
        Self { directory: state_dir.to_owned(), holder }
    }

    pub(crate) fn certificate(&self) -> PathBuf {
        self.directory.join(format!("{}.crt", self.holder))
    }

    fn key(&self) -> PathBuf {
        self.directory.join(format!("{}.key", self.holder))
    }

    fn next_key(&self) -> PathBuf {
        self.directory.join(format!("{}.key.next", self.holder))
    }

    fn roots(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    pub(crate) fn prepare(&self) -> Result<(), IdentityError> {
        Ok(files::create_private_directory(&self.directory)?)
    }

    /// [`stored_identity`]. Finishes a [`IdentityFiles::store`] that a crash interrupted.
    pub(crate) fn load(&self) -> Result<Option<AgentIdentity>, IdentityError> {
        let Some((identity, is_next)) = self.read()? else { return Ok(None) };
        if is_next && let Err(error) = self.promote_next_key() {
            tracing::warn!(%error, "failed to rename the file of the new key");
        }
        Ok(Some(identity))
    }

    /// The identity, and true if its key is still [`IdentityFiles::next_key`].
    fn read(&self) -> Result<Option<(AgentIdentity, bool)>, IdentityError> {
        let path = self.certificate();
        // A key without a certificate is worthless, so nothing is lost by enrolling.
        let Some(chain) = files::read_optional(&path)? else { return Ok(None) };
        let roots = self.roots();
        let bundle = files::read_optional(&roots)?
            .ok_or_else(|| IdentityError::file(&roots, &"there is no such file", RESTORE))?;
        let bundle =
            TrustBundle::from_pem(&bundle).map_err(|error| IdentityError::file(&roots, &error, RESTORE))?;
        let of_key = |key: &str| {
            let identity = AgentIdentity::from_pem(&chain, key, bundle.clone())?;
            match identity.holder {
                holder if holder == self.holder => Ok(identity),
                other => Err(IdentityError::Parse(format!("it is a {other}'s certificate"))),
            }
        };
        let next = files::read_optional_private(&self.next_key());
        if let Ok(Some(key)) = &next
            && let Ok(identity) = of_key(key)
        {
            return Ok(Some((identity, true)));
        }
        let key_path = self.key();
        let key = files::read_optional_private(&key_path)?
            .ok_or_else(|| IdentityError::file(&key_path, &"there is no such file", RESTORE))?;
        match (of_key(&key), next) {
            (Ok(identity), _) => Ok(Some((identity, false))),
            // The certificate may be the next key's.
            (Err(IdentityError::Key(_)), Err(error)) => Err(error.into()),
            (Err(error @ IdentityError::Key(_)), Ok(_)) => {
                Err(IdentityError::file(&key_path, &error, RESTORE))
            }
            (Err(error), _) => Err(IdentityError::file(&path, &error, RESTORE)),
        }
    }

    /// Returns the key to request a certificate for: that of an earlier attempt, whose answer may have been lost, or a
    /// new one, also in place of one that cannot be used.
    pub(crate) fn pending_key(&self) -> Result<PrivateKey, IdentityError> {
        let path = self.next_key();
        let unusable = match files::read_optional_private(&path) {
            Ok(None) => None,
            Ok(Some(pem)) => match PrivateKey::from_pem(&pem) {
                Ok(key) => return Ok(key),
                Err(error) => Some(error.to_string()),
            },
            Err(error @ FileError::Io { .. }) => return Err(error.into()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = unusable {
            // At most a token that was used with it is lost.
            tracing::warn!(path = %path.display(), error, "pending key is unusable, replacing it");
        }
        let key = PrivateKey::generate()?;
        files::replace(&path, key.to_pem().as_bytes(), PRIVATE_FILE)?;
        Ok(key)
    }

    /// [`IdentityFiles::pending_key`], or a key only in memory while the directory cannot be written. Not for a request
    /// that works only once, as with a token.
    pub(crate) fn pending_key_or_unsaved(&self) -> Result<PrivateKey, IdentityError> {
        match self.pending_key() {
            Err(error @ IdentityError::File(FileError::Io { .. })) => {
                tracing::warn!(%error, "failed to store the key of the new certificate, keeping it in memory");
                PrivateKey::generate()
            }
            key => key,
        }
    }

    /// Stores an identity. Writes its key first, unless it is [`IdentityFiles::pending_key`]: after a crash between any
    /// two steps [`IdentityFiles::load`] finds either the old identity or the new one.
    pub(crate) fn store(&self, identity: &AgentIdentity) -> Result<(), IdentityError> {
        let next = self.next_key();
        let key = PrivateKey::from_der(&identity.key)?.to_pem();
        // One that cannot be read is replaced.
        if files::read_optional_private(&next).ok().flatten().as_ref() != Some(&key) {
            files::replace(&next, key.as_bytes(), PRIVATE_FILE)?;
        }
        self.store_bundle(&identity.bundle)?;
        files::replace(&self.certificate(), pem_of_certificates(&identity.chain).as_bytes(), PUBLIC_FILE)?;
        self.promote_next_key()
    }

    fn promote_next_key(&self) -> Result<(), IdentityError> {
        let path = self.key();
        fs::rename(self.next_key(), &path).map_err(|source| FileError::Io { path, source }.into())
    }

    pub(crate) fn store_bundle(&self, bundle: &TrustBundle) -> Result<(), IdentityError> {
        Ok(files::replace(&self.roots(), bundle.to_pem().as_bytes(), PUBLIC_FILE)?)
    }
}
