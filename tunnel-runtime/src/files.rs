//! Files that hold identities: written completely or not at all, private where required, and never overwritten if they
//! cannot be read.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use zeroize::Zeroizing;

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A file that exists but cannot be used. It is never overwritten.
    #[error("{path}: {reason}; {fix}", path = .path.display())]
    Unusable {
        path: PathBuf,
        reason: String,
        /// Advice for the operator.
        fix: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl FileError {
    pub fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// Creates an error for an unusable file, with the reason and a fix.
    pub fn unusable(path: &Path, reason: &dyn std::fmt::Display, fix: impl Into<String>) -> Self {
        Self::Unusable { path: path.to_owned(), reason: reason.to_string(), fix: fix.into() }
    }
}

/// Mode of a file that holds a private key or the hash of a token.
pub const PRIVATE_FILE: u32 = 0o600;
/// Mode of a file that any user may read, such as a certificate.
pub const PUBLIC_FILE: u32 = 0o644;
const PRIVATE_DIRECTORY: u32 = 0o700;

/// Replaces a file atomically (a new file in the same directory, fsync, rename, fsync of the directory): a reader or a
/// crash sees the old content or the new, never a part. The directory must exist.
///
/// `mode` is the file's permission bits, regardless of the umask.
///
/// # Errors
/// Creating, writing or renaming failed: the old content is still there, and no temporary file. If only the
/// directory's fsync failed, the new content is there.
pub fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // tempfile creates it with mode 0600, so that others can never read a private key.
    let mut file = tempfile::Builder::new().prefix(".postern-").suffix(".tmp").tempfile_in(directory)?;
    file.write_all(bytes)?;
    file.as_file().set_permissions(Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    File::open(directory)?.sync_all()
}

/// Creates a directory (and its parents) that only this user may enter. Leaves an existing one unchanged: it may be
/// the operator's.
pub fn create_private_directory(path: &Path) -> Result<(), FileError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(PRIVATE_DIRECTORY);
    builder.create(path).map_err(|error| FileError::io(path, error))
}

/// Reads a file of at most so many bytes.
///
/// # Errors
/// Fails also if it is larger, or not a regular file.
pub fn read_at_most(path: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    let regular = |metadata: fs::Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("it is not a regular file")),
    };
    regular(fs::metadata(path)?)?;
    // Opening must not block on a file that was put there meanwhile, such as a FIFO.
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    regular(file.metadata()?)?;
    let mut bytes = Vec::new();
    if file.take(most_bytes + 1).read_to_end(&mut bytes)? as u64 > most_bytes {
        return Err(io::Error::other(format!("larger than {} MiB", most_bytes >> 20)));
    }
    Ok(bytes)
}

/// Returns the file's text, or `None` if there is no such file.
///
/// # Errors
/// Fails if the file exists but cannot be read, or is not UTF-8.
pub fn read_optional(path: &Path) -> Result<Option<String>, FileError> {
    match fs::read(path) {
        Ok(bytes) => String::from_utf8(bytes).map(Some).map_err(|_| {
            FileError::unusable(
                path,
                &"it is not text",
                "restore it from a backup, or move it out of the way",
            )
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::io(path, error)),
    }
}

/// Like [`read_optional`], for a file that holds a private key.
///
/// # Errors
/// Also fails if others may read the file, because they may already know the key.
pub fn read_optional_private(path: &Path) -> Result<Option<Zeroizing<String>>, FileError> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.mode() & 0o077 != 0 => Err(FileError::unusable(
            path,
            &format_args!("a private key that others may read (mode {:04o})", metadata.mode() & 0o7777),
            format!(
                "`chmod 600 {}`, and replace the key if another user could have copied it",
                path.display()
            ),
        )),
        _ => Ok(read_optional(path)?.map(Zeroizing::new)),
    }
}

/// Returns the device and inode of the file at this path, which another file there does not have.
///
/// # Errors
/// Fails if there is no file.
pub fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Removes a file if it exists.
pub fn remove_if_present(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(FileError::io(path, error)),
        _ => Ok(()),
    }
}

/// [`write_atomically`] with the path in the error.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), FileError> {
    write_atomically(path, bytes, mode).map_err(|error| FileError::io(path, error))
}

/// An exclusive lock on a directory shared by processes. Released on drop, and by the kernel when the process dies.
#[derive(Debug)]
pub struct DirectoryLock {
    _file: File,
}

impl DirectoryLock {
    /// Waits for the lock file `name` in `directory`. Blocks the thread; holders keep the lock for a few file
    /// operations.
    pub fn acquire(directory: &Path, name: &str) -> Result<Self, FileError> {
        let path = directory.join(name);
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(PRIVATE_FILE).open(&path);
        // On a disk that has become read-only, an existing file can still be locked.
        let file = match file {
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                File::open(&path).map_err(|_| error)
            }
            file => file,
        };
        let file = file.map_err(|error| FileError::io(&path, error))?;
        file.lock().map_err(|error| FileError::io(&path, error))?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn files_are_written_whole_and_with_their_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        write_atomically(&path, b"one", PRIVATE_FILE).unwrap();
        assert_eq!((fs::read(&path).unwrap().as_slice(), mode(&path)), (b"one".as_slice(), 0o600));
        write_atomically(&path, b"two", PUBLIC_FILE).unwrap();
        assert_eq!((fs::read(&path).unwrap().as_slice(), mode(&path)), (b"two".as_slice(), 0o644));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_failed_write_leaves_the_old_content_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("taken");
        fs::create_dir(&path).unwrap();
        assert!(write_atomically(&path, b"x", PRIVATE_FILE).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_key_that_others_may_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        assert!(read_optional_private(&path).unwrap().is_none());
        write_atomically(&path, b"k", 0o640).unwrap();
        let error = read_optional_private(&path).unwrap_err().to_string();
        assert!(error.contains("0640") && error.contains("chmod 600"), "{error}");
        write_atomically(&path, b"k", PRIVATE_FILE).unwrap();
        assert_eq!(read_optional_private(&path).unwrap().unwrap().as_str(), "k");
    }

    #[test]
    fn directories_are_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b");
        create_private_directory(&path).unwrap();
        assert_eq!(mode(&path), 0o700);
    }

    #[test]
    fn the_lock_is_exclusive() {
        let directory = tempfile::tempdir().unwrap();
        let held = DirectoryLock::acquire(directory.path(), "lock").unwrap();
        let second = File::open(directory.path().join("lock")).unwrap();
        assert!(second.try_lock().is_err());
        drop(held);
        second.try_lock().unwrap();
    }
}
