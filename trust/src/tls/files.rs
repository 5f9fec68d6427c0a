//! The files of a process: certificate, key, and the authority that it trusts.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::TlsError;

/// Paths of PEM files. A listener needs a certificate and a key. A client needs the authority; with a certificate
/// and a key it proves its own identity, too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate of this process, with intermediate ones behind it.
    pub cert: Option<PathBuf>,
    /// Key of the certificate.
    pub key: Option<PathBuf>,
    /// Certificates of the authorities that this process trusts: one, or two during a change.
    pub ca: Option<PathBuf>,
}

impl TlsFiles {
    /// The files of a folder: `cert.pem`, `key.pem` and `ca.pem`, or `tls.crt`, `tls.key` and `ca.crt` as in
    /// Kubernetes. A folder without certificate and key serves a client.
    ///
    /// # Errors
    /// [`TlsError::Folder`] when the folder has no `ca.pem`, or only one of certificate and key.
    pub fn in_folder(dir: &Path) -> Result<Self, TlsError> {
        let find = |names: [&str; 2]| {
            names.into_iter().map(|name| dir.join(name)).find(|path| path.exists())
        };
        let [cert, key, ca] =
            [["cert.pem", "tls.crt"], ["key.pem", "tls.key"], ["ca.pem", "ca.crt"]];
        let (cert, key, ca) = (find(cert), find(key), find(ca));
        let missing = |expected| Err(TlsError::Folder { dir: dir.to_owned(), expected });
        match (&cert, &key, &ca) {
            (_, _, None) => missing("ca.pem"),
            (Some(_), None, _) => missing("key.pem"),
            (None, Some(_), _) => missing("cert.pem"),
            _ => Ok(Self { cert, key, ca }),
        }
    }

    pub(super) fn check(&self) -> Result<(), TlsError> {
        match self {
            Self { cert: None, key: None, ca: None } => Err(TlsError::Nothing),
            Self { cert: Some(_), key: None, .. } | Self { cert: None, key: Some(_), .. } => {
                Err(TlsError::Half)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn read(&self) -> Result<Contents, TlsError> {
        let read = |path: &Option<PathBuf>| path.as_deref().map(read_file).transpose();
        Ok(Contents { cert: read(&self.cert)?, key: read(&self.key)?, ca: read(&self.ca)? })
    }
}

impl fmt::Display for TlsFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths = [&self.cert, &self.key, &self.ca];
        for (idx, path) in paths.into_iter().flatten().enumerate() {
            let comma = if idx == 0 { "" } else { ", " };
            write!(f, "{comma}{}", path.display())?;
        }
        Ok(())
    }
}

/// Contents of the files. The debug output shows no key.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) cert: Option<Vec<u8>>,
    pub(super) key: Option<Vec<u8>>,
    pub(super) ca: Option<Vec<u8>>,
}

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contents").finish_non_exhaustive()
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { file: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(failed(io::Error::other("larger than 1 MiB")));
    }
    Ok(bytes)
}

const MAX_FILE_BYTES: u64 = 1 << 20;
