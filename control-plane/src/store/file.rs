//! The embedded store: one file, replaced atomically and checked when it is read.
//!
//! The file `state.snapshot` holds the snapshot as [`document`] encodes it. A write goes to `state.snapshot.tmp`,
//! which is synced and renamed over the old file. Then the directory is synced. A lock on the file `lock` refuses a
//! second control plane. The file `reserved-epoch` holds epochs that were reserved while there was no space for a
//! snapshot.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::{Revision, Snapshot, Store, StoreError, document, epoch_file};

/// A snapshot in a directory of its own.
#[derive(Debug)]
pub struct FileStore {
    dir: PathBuf,
    /// Revision of the last successful read or write. The lock excludes other writers.
    revision: Option<Revision>,
    /// True once this process has allocated the space for epochs.
    has_epoch_file: bool,
    /// Held for the life of the store.
    _lock: File,
}

impl FileStore {
    /// Creates `dir` if needed, opens the store in it and locks it.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(dir).map_err(|err| classify("create directory", dir, err))?;
        let path = dir.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        // A file that exists can be locked on a file system that takes no writes.
        let lock = lock.or_else(|err| File::open(&path).map_err(|_| err));
        let lock = lock.map_err(|err| classify("open", &path, err))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::InUse { path: dir.to_owned() });
            }
            Err(TryLockError::Error(err)) => return Err(classify("lock", &path, err)),
        }
        Ok(Self { dir: dir.to_owned(), revision: None, has_epoch_file: false, _lock: lock })
    }

    /// The file that holds the snapshot.
    pub fn path(&self) -> PathBuf {
        self.dir.join("state.snapshot")
    }

    fn epoch_path(&self) -> PathBuf {
        self.dir.join("reserved-epoch")
    }

    fn read(&self) -> Result<Option<(Snapshot, Revision)>, StoreError> {
        let path = self.path();
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(mut file) => {
                let read = file.read_to_end(&mut bytes);
                read.map_err(|err| classify("read", &path, err))?;
            }
            Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(err) => return Err(classify("open", &path, err)),
        }
        document::decode(&path, &bytes).map(Some)
    }

    fn replace(&self, bytes: &[u8]) -> Result<(), StoreError> {
        let tmp = self.dir.join("state.snapshot.tmp");
        let written = write_synced(&tmp, bytes);
        if written.is_err() {
            // A partial file would occupy space that the next write needs.
            let _ = fs::remove_file(&tmp);
        }
        written?;
        let path = self.path();
        fs::rename(&tmp, &path).map_err(|err| classify("rename", &path, err))?;
        let dir = File::open(&self.dir).map_err(|err| classify("open", &self.dir, err))?;
        dir.sync_all().map_err(|err| classify("sync", &self.dir, err))
    }
}

impl Store for FileStore {
    fn kind(&self) -> &'static str {
        "snapshot"
    }

    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError> {
        let (snapshot, revision) = match self.read()? {
            Some((mut snapshot, revision)) => {
                let path = self.epoch_path();
                let reserved =
                    epoch_file::read(&path).map_err(|err| classify("read", &path, err))?;
                snapshot.reserved_epoch = snapshot.reserved_epoch.max(reserved);
                (Some(snapshot), revision)
            }
            None => (None, Revision::default()),
        };
        self.revision = Some(revision);
        Ok((snapshot, revision))
    }

    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError> {
        let found = match self.revision {
            Some(revision) => revision,
            None => self.load()?.1,
        };
        if found != expected {
            return Err(StoreError::Conflict { expected: expected.0, found: found.0 });
        }
        let (path, next) = (self.path(), Revision(expected.0 + 1));
        self.replace(&document::encode(&path, snapshot, next)?)?;
        self.revision = Some(next);
        if !self.has_epoch_file {
            let path = self.epoch_path();
            // Only a full disk needs the file, and the snapshot is safe: no reason to fail.
            match epoch_file::allocate(&path) {
                Ok(()) => self.has_epoch_file = true,
                Err(err) => {
                    tracing::warn!(path = %path.display(), error = %err, "cannot allocate space for epochs")
                }
            }
        }
        Ok(next)
    }

    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
        let path = self.epoch_path();
        epoch_file::write(&path, epoch).map_err(|err| classify("write", &path, err))
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let mut file = File::create(path).map_err(|err| classify("create", path, err))?;
    file.write_all(bytes).map_err(|err| classify("write", path, err))?;
    file.sync_all().map_err(|err| classify("sync", path, err))
}

fn classify(operation: &'static str, path: &Path, source: io::Error) -> StoreError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            StoreError::Full { path, source }
        }
        _ => StoreError::Io { operation, path, source },
    }
}
