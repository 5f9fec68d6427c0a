//! Names of endpoint memory in the provider `shm`.

use std::path::{Path, PathBuf};

/// Removes the name of an endpoint's shared memory once no peer needs it. A process may exit before
/// the endpoint is closed, and would leave the memory behind. The library accepts a missing name
/// when it closes the endpoint later.
pub(super) fn unlink(address: &[u8]) {
    let Some(path) = path_of(address, std::process::id()) else {
        return;
    };
    match std::fs::remove_file(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "an endpoint's memory stays after its process");
        }
    }
}

/// Path of the memory of `process`'s endpoint with this address. The address is
/// `fi_shm://PROCESS:USER:NUMBER` with a zero byte at its end; some versions omit the scheme.
/// Returns `None` for any other form.
fn path_of(address: &[u8], process: u32) -> Option<PathBuf> {
    let text = std::str::from_utf8(address).ok()?;
    let text = text.split('\0').next()?;
    let name = text.strip_prefix("fi_shm://").unwrap_or(text);
    let (owner, rest) = name.split_once(':')?;
    let is_plain = rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b':');
    (owner == process.to_string() && is_plain).then(|| Path::new("/dev/shm").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_process_only_are_removed() {
        let found = |address: &[u8]| path_of(address, 417);
        let path = Some(PathBuf::from("/dev/shm/417:0:3"));
        assert_eq!(found(b"fi_shm://417:0:3\0"), path);
        assert_eq!(found(b"417:0:3"), path);
        assert_eq!(found(b"fi_shm://417:0:3\0garbage"), path);
        for other in [
            &b"fi_shm://418:0:3\0"[..],
            b"fi_shm://4170:0:3\0",
            b"fi_shm://417:../x\0",
            b"417",
            b"\xff417:0:3",
            b"",
        ] {
            assert_eq!(found(other), None, "{other:?}");
        }
    }
}
