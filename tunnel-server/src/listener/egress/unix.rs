//! The Unix socket of the egress listener. A server that takes over from another one gets the listening socket itself;
//! one that starts without a predecessor puts its own at the path once it is ready.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use tokio::net::{UnixListener, UnixStream};
use tunnel_runtime::files::identity;

/// A listening socket, which is at its path from [`Socket::place`] on.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    /// Its path until then; `None` if it came from the predecessor and is at its final path.
    aside: Option<PathBuf>,
    /// Device and inode of its file.
    file: (u64, u64),
}

impl Socket {
    /// Takes the predecessor's listening socket. Returns `None` if it is not at the path any more.
    ///
    /// # Errors
    /// Its permissions cannot be set.
    pub(crate) fn take(path: &Path, mode: u32, socket: OwnedFd) -> anyhow::Result<Option<Self>> {
        let Ok(file) = identity(path) else { return Ok(None) };
        if !std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            return Ok(None);
        }
        let taken = || -> io::Result<_> {
            let listener = std::os::unix::net::UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
            UnixListener::from_std(listener)
        };
        let listener = taken().with_context(|| format!("--egress-socket={}", path.display()))?;
        Ok(Some(Self { listener, path: path.to_owned(), aside: None, file }))
    }

    /// Listens on a socket with these file permissions. `taking_over`: another server of this host has the path, and
    /// hands it over.
    ///
    /// # Errors
    /// Another file is at the path, another process listens there, or the directory cannot be written.
    pub(crate) async fn bind(path: &Path, mode: u32, taking_over: bool) -> anyhow::Result<Self> {
        let shown = path.display();
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                bail!("--egress-socket={shown}: there is a file that is not a socket; choose another path")
            }
            Ok(_) if !taking_over && UnixStream::connect(path).await.is_ok() => {
                bail!(
                    "--egress-socket={shown}: another process listens there; stop it or choose another path"
                )
            }
            _ => {}
        }
        // Creates one directory, which can be mounted where kube-apiserver runs; more would be a mistyped path.
        if let Some(folder) = path.parent() {
            let _ = std::fs::create_dir(folder);
        }
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".{}", std::process::id()));
        let aside = PathBuf::from(aside);
        let bound = || -> io::Result<_> {
            // Left by an earlier process with the same number.
            let _ = std::fs::remove_file(&aside);
            let listener = UnixListener::bind(&aside)?;
            std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(mode))?;
            Ok((listener, identity(&aside)?))
        };
        let (listener, file) = bound().map_err(|error: io::Error| {
            let reason = match error.kind() {
                io::ErrorKind::NotFound => "its directory does not exist".to_owned(),
                _ => error.to_string(),
            };
            anyhow::anyhow!("--egress-socket={shown}: cannot listen there: {reason}")
        })?;
        Ok(Self { listener, path: path.to_owned(), aside: Some(aside), file })
    }

    /// Name of the socket for a successor.
    pub(crate) fn name(path: &Path) -> String {
        format!("egress-socket {}", path.display())
    }

    /// Returns the name and a copy of the socket for a successor.
    pub(crate) fn copy(&self) -> io::Result<(String, OwnedFd)> {
        Ok((Self::name(&self.path), self.listener.as_fd().try_clone_to_owned()?))
    }

    /// Moves the socket to its path, replacing any other socket there.
    pub(crate) fn place(&mut self) -> anyhow::Result<()> {
        let Some(aside) = self.aside.take() else { return Ok(()) };
        std::fs::rename(&aside, &self.path)
            .with_context(|| format!("--egress-socket={}: cannot be put there", self.path.display()))
    }

    /// Removes its file, unless another socket has replaced it. A remaining file would refuse connections, as a missing
    /// one does.
    pub(super) fn remove(self) {
        if identity(&self.path).is_ok_and(|found| found == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(aside) = &self.aside {
            let _ = std::fs::remove_file(aside);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_successor_takes_the_socket_and_what_waits_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("folder/egress.sock");
        let mut first = Socket::bind(&path, 0o600, false).await.unwrap();
        assert!(UnixStream::connect(&path).await.is_err(), "found before its time");
        first.place().unwrap();
        assert_eq!(mode(&path), 0o600);
        let waits = UnixStream::connect(&path).await.unwrap();
        let error = Socket::bind(&path, 0o600, false).await.unwrap_err().to_string();
        assert!(error.contains("another process listens there"), "{error}");
        let (name, copy) = first.copy().unwrap();
        assert_eq!(name, Socket::name(&path));
        let mut second = Socket::take(&path, 0o660, copy).unwrap().expect("it is there");
        assert_eq!(mode(&path), 0o660);
        drop(first);
        second.place().unwrap();
        let client = UnixStream::connect(&path).await.unwrap();
        for _ in 0..2 {
            second.listener.accept().await.unwrap();
        }
        let copy = second.copy().unwrap().1;
        drop((waits, client));
        second.remove();
        assert!(!path.exists());
        assert!(Socket::take(&path, 0o600, copy).unwrap().is_none(), "taken although nobody finds it");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn another_ones_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        let mut first = Socket::bind(&path, 0o600, false).await.unwrap();
        first.place().unwrap();
        let mut second = Socket::bind(&path, 0o600, true).await.unwrap();
        second.place().unwrap();
        first.remove();
        UnixStream::connect(&path).await.unwrap();
        drop(Socket::bind(&path, 0o600, true).await.unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn what_is_not_a_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "text").unwrap();
        let error = Socket::bind(&path, 0o600, false).await.unwrap_err().to_string();
        assert!(error.contains("not a socket"), "{error}");
        let nowhere = dir.path().join("missing/deeper/egress.sock");
        let error = Socket::bind(&nowhere, 0o600, false).await.unwrap_err().to_string();
        assert!(error.contains("does not exist"), "{error}");
    }

    #[tokio::test]
    async fn a_dead_servers_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let mut socket = Socket::bind(&path, 0o660, false).await.unwrap();
        socket.place().unwrap();
        UnixStream::connect(&path).await.unwrap();
    }
}
