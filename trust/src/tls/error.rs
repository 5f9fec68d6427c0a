//! Errors of reading certificates and keys.

use std::io;
use std::path::PathBuf;

/// Certificates or keys that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {} ({source}): {}", .file.display(), remedy(.source))]
    Read { file: PathBuf, source: io::Error },
    /// A folder lacks a file.
    #[error(
        "{} has no {expected}: expected the folder that `switchyard certs issue` has written", .dir.display()
    )]
    Folder { dir: PathBuf, expected: &'static str },
    /// A certificate is given without a key, or the other way round.
    #[error(
        "a certificate and its key belong together: give both --tls-cert and --tls-key, or --tls DIR"
    )]
    Half,
    /// No file is given.
    #[error("no TLS file is given: give --tls DIR, or --tls-ca for a client without a certificate")]
    Nothing,
    /// A file has other contents.
    #[error("{} has no {expected} in PEM format ({reason})", .file.display())]
    Pem { file: PathBuf, expected: &'static str, reason: String },
    /// A certificate cannot be parsed.
    #[error("{} has a damaged certificate ({reason}): issue it again", .file.display())]
    Certificate { file: PathBuf, reason: String },
    /// The key is that of another certificate.
    #[error(
        "the key {} is not the key of the certificate {}: copy both from one `switchyard certs issue`",
        .key.display(), .cert.display()
    )]
    Mismatch { cert: PathBuf, key: PathBuf },
    /// The certificate has ended.
    #[error(
        "the certificate {} has expired on {not_after}, and the clock of this host says {now}: issue a new one, or \
         correct the clock", .file.display()
    )]
    Expired { file: PathBuf, not_after: String, now: String },
    /// The certificate is not valid yet.
    #[error(
        "the certificate {} is valid from {not_before}, and the clock of this host says {now}: correct the clock", .file.display()
    )]
    NotYetValid { file: PathBuf, not_before: String, now: String },
    /// The cryptography refuses the files.
    #[error("TLS cannot use {} ({reason})", .file.display())]
    Refused { file: PathBuf, reason: String },
    /// Clients must show certificates that nothing can check.
    #[error(
        "client certificates are required (--tls-clients required), and no authority is given to check them: give --tls-ca \
         FILE, or --tls DIR with a ca.pem"
    )]
    NoAuthority,
    /// No thread could be started to follow the files.
    #[error("cannot start a thread that follows the TLS files: {0}")]
    Thread(#[source] io::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "let the user of this process read it",
        io::ErrorKind::NotFound => "check the path",
        _ => "check the file",
    }
}
