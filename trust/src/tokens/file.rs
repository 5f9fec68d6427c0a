//! Reading and changing a token file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{TokenEntry, TokenTable, TokenTableError};

/// Reads a token file.
///
/// # Errors
/// [`TokenFileError`] when it cannot be read, is larger than 4 MiB, or is wrong.
pub fn read(path: &Path) -> Result<TokenTable, TokenFileError> {
    let fail = |source| TokenFileError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(fail)?;
    // One byte more than allowed tells a file that is too large.
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(fail)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(TokenFileError::TooLarge { path: path.to_owned() });
    }
    parse(path, &text)
}

/// Adds an entry to a token file. Creates the file for its owner alone if there is none.
///
/// # Errors
/// [`TokenFileError`] when the file cannot be written, is wrong, or has the name with another role.
pub fn add(path: &Path, entry: &TokenEntry) -> Result<(), TokenFileError> {
    let mut options = OpenOptions::new();
    options.create(true).mode(OWNER_ONLY);
    let (mut file, mut text) = lock(path, &mut options)?;
    let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    let line = format!("{end}{}\n", entry.to_line());
    text.push_str(&line);
    parse(path, &text)?;
    let write = file.write_all(line.as_bytes()).and_then(|()| file.sync_all());
    write.map_err(|source| TokenFileError::Write { path: path.to_owned(), source })
}

/// Removes the tokens of a name, or the one whose hash begins with `selector` (at least 8 hex digits). Returns the
/// removed entries. Comments stay.
///
/// # Errors
/// [`TokenFileError`] when the file cannot be written, is wrong, or has no such token, and when no token would be left.
pub fn remove(path: &Path, selector: &str) -> Result<Vec<TokenEntry>, TokenFileError> {
    let (_locked, text) = lock(path, &mut OpenOptions::new())?;
    let table = parse(path, &text)?;
    let is_id = selector.len() >= 8 && selector.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_meant = |entry: &TokenEntry| {
        entry.name == selector || (is_id && entry.hash.to_string().starts_with(selector))
    };
    let removed: Vec<_> = table.entries().iter().filter(|entry| is_meant(entry)).cloned().collect();
    if removed.is_empty() {
        let selector = selector.chars().take(MAX_SELECTOR_CHARS).collect();
        return Err(TokenFileError::Unknown { path: path.to_owned(), selector });
    }
    if removed.len() == table.entries().len() {
        return Err(TokenFileError::Last { path: path.to_owned() });
    }
    let mut kept = String::with_capacity(text.len());
    for line in text.lines() {
        let entry = TokenEntry::from_line(line.trim());
        if !entry.is_ok_and(|entry| is_meant(&entry)) {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    replace(path, &kept)
        .map_err(|source| TokenFileError::Write { path: path.to_owned(), source })?;
    Ok(removed)
}

fn parse(path: &Path, text: &str) -> Result<TokenTable, TokenFileError> {
    TokenTable::parse(text)
        .map_err(|source| TokenFileError::Wrong { path: path.to_owned(), source })
}

/// Opens the file for appending with a lock against other commands that change it, and reads it.
fn lock(path: &Path, options: &mut OpenOptions) -> Result<(File, String), TokenFileError> {
    let fail = |source| TokenFileError::Write { path: path.to_owned(), source };
    let mut last = io::Error::from(io::ErrorKind::WouldBlock);
    for _ in 0..LOCK_ATTEMPTS {
        let mut file = options.read(true).append(true).open(path).map_err(fail)?;
        if let Err(err) = file.try_lock() {
            last = err.into();
            std::thread::sleep(LOCK_RETRY);
            continue;
        }
        // Another command may have replaced the file before the lock was taken.
        let is_current = std::fs::metadata(path).is_ok_and(|now| {
            file.metadata().is_ok_and(|held| (held.dev(), held.ino()) == (now.dev(), now.ino()))
        });
        if is_current {
            let mut text = String::new();
            (&mut file).take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(fail)?;
            if text.len() as u64 > MAX_FILE_BYTES {
                return Err(TokenFileError::TooLarge { path: path.to_owned() });
            }
            return Ok((file, text));
        }
    }
    Err(fail(last))
}

/// Replaces the file as a whole, with the same owner and rights.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    // A link, such as one of Kubernetes, stays: its target is replaced.
    let path = std::fs::canonicalize(path)?;
    let old = std::fs::metadata(&path)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".new-{}", std::process::id()));
    let new = path.with_file_name(name);
    let write = || {
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(OWNER_ONLY).open(&new)?;
        file.set_permissions(old.permissions())?;
        if (old.uid(), old.gid()) != (file.metadata()?.uid(), file.metadata()?.gid()) {
            std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()))?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &path)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&new)))
}

/// Error of a token file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TokenFileError {
    /// It cannot be read.
    #[error("the token file {} cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// It cannot be changed.
    #[error("the token file {} cannot be changed: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// It is larger than any sensible list.
    #[error("the token file {} has more than {} MiB", path.display(), MAX_FILE_BYTES >> 20)]
    TooLarge { path: PathBuf },
    /// Its text is wrong.
    #[error("the token file {} is wrong: {source}", path.display())]
    Wrong { path: PathBuf, source: TokenTableError },
    /// No token has that name or hash.
    #[error("the token file {} has no token {selector:?}: see `switchyard token list`", path.display())]
    Unknown { path: PathBuf, selector: String },
    /// Without a token, the control plane would refuse the file and keep the old tokens.
    #[error(
        "the token file {} would have no token left, which a control plane refuses: add another token first",
        path.display()
    )]
    Last { path: PathBuf },
}

const OWNER_ONLY: u32 = 0o600;
const MAX_FILE_BYTES: u64 = 4 << 20;
const MAX_SELECTOR_CHARS: usize = 128;
const LOCK_ATTEMPTS: u32 = 100;
const LOCK_RETRY: std::time::Duration = std::time::Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::Role;
    use crate::tokens::generate;

    #[test]
    fn tokens_are_added_and_removed_while_comments_and_rights_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let entry = |name: &str, role| TokenEntry::new(name, role, &generate(), None).unwrap();
        let (first, second) = (entry("ops", Role::Operator), entry("gpu", Role::Server));
        add(&path, &first).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // A file edited by hand may lack its last line break.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("# mine\n{}", text.trim_end())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        add(&path, &second).unwrap();
        let third = entry("gpu", Role::Server);
        add(&path, &third).unwrap();
        assert!(matches!(
            add(&path, &entry("gpu", Role::Client)),
            Err(TokenFileError::Wrong { .. })
        ));
        assert_eq!(read(&path).unwrap().entries(), [first.clone(), second.clone(), third.clone()]);
        assert_eq!(remove(&path, &second.hash.id()).unwrap(), [second]);
        assert!(matches!(remove(&path, "nobody"), Err(TokenFileError::Unknown { .. })));
        assert_eq!(remove(&path, "gpu").unwrap(), [third]);
        assert!(matches!(remove(&path, "ops"), Err(TokenFileError::Last { .. })));
        assert_eq!(read(&path).unwrap().entries(), [first]);
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("# mine\n"));
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }
}
