//! A small certificate authority: makes its key, issues certificates, and shows certificates.
//!
//! Keys are ECDSA on the curve P-256, which every browser knows.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};

use crate::Role;
use crate::tls::{certificate_uri, is_valid_name};

mod show;

pub use show::{CertificateInfo, read_certificates};

/// Certificate of the authority, in its folder and in the folder of every holder.
pub const CA_FILE: &str = "ca.pem";
/// Key of the authority.
pub const CA_KEY_FILE: &str = "ca-key.pem";
/// Certificate of a holder.
pub const CERT_FILE: &str = "cert.pem";
/// Key of a holder.
pub const KEY_FILE: &str = "key.pem";

/// A certificate or key could not be made or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum CertsError {
    /// A file is there already.
    #[error("{} exists: give another folder, or --force to replace it for good", .file.display())]
    Exists { file: PathBuf },
    /// A file cannot be written.
    #[error("cannot write {} ({source})", .file.display())]
    Write { file: PathBuf, source: io::Error },
    /// A file cannot be read.
    #[error("cannot read {} ({source}): expected a folder that `switchyard certs init` has made", .file.display())]
    Read { file: PathBuf, source: io::Error },
    /// A file to show cannot be read.
    #[error("cannot read {} ({source}): expected a file with certificates in PEM format", .file.display())]
    Show { file: PathBuf, source: io::Error },
    /// A file has other contents.
    #[error("{} is not usable ({reason})", .file.display())]
    Damaged { file: PathBuf, reason: String },
    /// The holder's name has other characters.
    #[error(
        "the name \"{}\" is not usable in a certificate: expected 1 to 128 letters, digits, '.', '_' and '-'",
        .found.escape_default()
    )]
    Name { found: String },
    /// An address is neither a host name nor an IP address.
    #[error("the address \"{}\" is neither a host name nor an IP address", .found.escape_default())]
    Address { found: String },
    /// A server's certificate without an address would fit no connection.
    #[error(
        "a certificate for servers needs --address: the host names and IP addresses by which clients reach them"
    )]
    NoAddress,
    /// The library failed.
    #[error("the certificate could not be made: {0}")]
    Make(#[from] rcgen::Error),
}

/// Holder and use of a certificate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the holder, such as the name of an expert server.
    pub name: String,
    /// Rights of the holder.
    pub role: Role,
    /// Host names and IP addresses by which clients reach a server.
    pub addresses: Vec<String>,
    /// Beginning of the validity. [`validity_from_now`] gives the usual one.
    pub not_before: SystemTime,
    /// End of the validity.
    pub not_after: SystemTime,
}

/// A certificate and its key, in PEM. The debug output shows no key.
#[derive(Clone)]
pub struct Issued {
    /// The certificate.
    pub cert_pem: String,
    /// The key.
    pub key_pem: String,
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issued").field("cert_pem", &self.cert_pem).finish_non_exhaustive()
    }
}

/// A certificate authority with its key.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    cert_pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("cert_pem", &self.cert_pem).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a new authority in memory, valid for ten years.
    ///
    /// # Errors
    /// [`CertsError::Make`].
    pub fn generate() -> Result<Self, CertsError> {
        let (not_before, not_after) = validity_from_now(CA_DAYS);
        Self::generate_valid(not_before, not_after)
    }

    /// As [`generate`](Self::generate), with a given validity.
    ///
    /// # Errors
    /// As for [`generate`](Self::generate).
    pub fn generate_valid(
        not_before: SystemTime,
        not_after: SystemTime,
    ) -> Result<Self, CertsError> {
        let key = KeyPair::generate()?;
        let mut params = params(not_before, not_after);
        // Several authorities of one owner need names that differ, or a verifier takes one for the other.
        let name = format!("Switchyard fleet authority {}", hex(&key_tag(&key)));
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let cert_pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), cert_pem })
    }

    /// Makes a new authority and writes it into `dir`, which is made if it is missing. The key's file is readable by
    /// its owner only.
    ///
    /// # Errors
    /// [`CertsError::Exists`] when the folder has an authority and `force` is false, or another [`CertsError`].
    pub fn init(dir: &Path, force: bool) -> Result<Self, CertsError> {
        let (cert_file, key_file) = (dir.join(CA_FILE), dir.join(CA_KEY_FILE));
        check_absent([&cert_file, &key_file], force)?;
        make_folder(dir)?;
        let authority = Self::generate()?;
        write_file(&key_file, &authority.issuer.key().serialize_pem(), PRIVATE, force)?;
        write_file(&cert_file, &authority.cert_pem, PUBLIC, force)?;
        Ok(authority)
    }

    /// Reads the authority in `dir`.
    ///
    /// # Errors
    /// [`CertsError`] names the file.
    pub fn open(dir: &Path) -> Result<Self, CertsError> {
        let (cert_file, key_file) = (dir.join(CA_FILE), dir.join(CA_KEY_FILE));
        let read = |file: &Path| {
            fs::read_to_string(file)
                .map_err(|source| CertsError::Read { file: file.to_owned(), source })
        };
        let (cert_pem, key_pem) = (read(&cert_file)?, read(&key_file)?);
        let damaged =
            |file: &Path, reason: String| CertsError::Damaged { file: file.to_owned(), reason };
        let key = KeyPair::from_pem(&key_pem).map_err(|e| damaged(&key_file, e.to_string()))?;
        let own_key = key.public_key_raw().to_vec();
        let issuer = Issuer::from_ca_cert_pem(&cert_pem, key)
            .map_err(|error| damaged(&cert_file, error.to_string()))?;
        let found = show::first_public_key(cert_pem.as_bytes());
        if found.as_deref() != Some(&own_key[..]) {
            let reason = format!("its first certificate is not that of {CA_KEY_FILE}");
            return Err(damaged(&cert_file, reason));
        }
        Ok(Self { issuer, cert_pem })
    }

    /// The certificate that every side trusts.
    #[must_use]
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// Makes a key, and a certificate for it.
    ///
    /// # Errors
    /// [`CertsError`] for a name or address that no certificate can have.
    pub fn issue(&self, request: &Request) -> Result<Issued, CertsError> {
        if !is_valid_name(&request.name) {
            return Err(CertsError::Name { found: request.name.clone() });
        }
        if request.role == Role::Server && request.addresses.is_empty() {
            return Err(CertsError::NoAddress);
        }
        let key = KeyPair::generate()?;
        let mut params = params(request.not_before, request.not_after);
        params.distinguished_name.push(DnType::CommonName, request.name.as_str());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        // Servers are clients, too: of the control plane, and of each other.
        params.extended_key_usages = match request.role {
            Role::Server => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
            _ => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        let bad = |found: &str| CertsError::Address { found: found.to_owned() };
        let names: Result<Vec<SanType>, CertsError> =
            request.addresses.iter().map(|text| san(text).ok_or_else(|| bad(text))).collect();
        params.subject_alt_names = names?;
        let uri = certificate_uri(request.role, &request.name);
        params.subject_alt_names.push(SanType::URI(uri.try_into()?));
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Issued { cert_pem: certificate.pem(), key_pem: key.serialize_pem() })
    }

    /// Issues a certificate and writes it into `dir` with its key and the authority's certificate, as `--tls DIR`
    /// reads them. The key's file is readable by its owner only.
    ///
    /// # Errors
    /// [`CertsError::Exists`] when the folder has a certificate or key and `force` is false, or another
    /// [`CertsError`].
    pub fn issue_into(&self, dir: &Path, request: &Request, force: bool) -> Result<(), CertsError> {
        let (cert_file, key_file) = (dir.join(CERT_FILE), dir.join(KEY_FILE));
        check_absent([&cert_file, &key_file], force)?;
        let issued = self.issue(request)?;
        make_folder(dir)?;
        write_file(&key_file, &issued.key_pem, PRIVATE, force)?;
        write_file(&cert_file, &issued.cert_pem, PUBLIC, force)?;
        // The same for all holders, so an older copy is replaced.
        write_file(&dir.join(CA_FILE), &self.cert_pem, PUBLIC, true)
    }
}

/// A validity of `days` from this moment on. It begins two hours earlier, so that a host whose clock is late accepts
/// the certificate.
#[must_use]
pub fn validity_from_now(days: u32) -> (SystemTime, SystemTime) {
    let now = SystemTime::now();
    (now - CLOCK_SKEW, now + Duration::from_secs(u64::from(days) * 86_400))
}

fn params(not_before: SystemTime, not_after: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let since = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    params.not_before = epoch + Duration::from_secs(since(not_before).as_secs());
    params.not_after = epoch + Duration::from_secs(since(not_after).as_secs());
    params.distinguished_name = DistinguishedName::new();
    params
}

fn san(address: &str) -> Option<SanType> {
    let bare = address.trim_start_matches('[').trim_end_matches(']');
    if let Ok(addr) = bare.parse::<IpAddr>() {
        return Some(SanType::IpAddress(addr));
    }
    let wildcard = address.strip_prefix("*.").unwrap_or(address);
    // The rules of the side that checks the name.
    let is_name = rustls::pki_types::DnsName::try_from(wildcard).is_ok();
    is_name.then(|| address.to_owned().try_into().ok().map(SanType::DnsName)).flatten()
}

fn key_tag(key: &KeyPair) -> [u8; 4] {
    // The last bytes of a point on the curve are as good as random.
    let raw = key.public_key_raw();
    let mut tag = [0; 4];
    for (to, from) in tag.iter_mut().zip(raw.iter().rev()) {
        *to = *from;
    }
    tag
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check_absent(files: [&Path; 2], force: bool) -> Result<(), CertsError> {
    match files.into_iter().find(|file| !force && file.exists()) {
        Some(file) => Err(CertsError::Exists { file: file.to_owned() }),
        None => Ok(()),
    }
}

fn make_folder(dir: &Path) -> Result<(), CertsError> {
    fs::create_dir_all(dir).map_err(|source| CertsError::Write { file: dir.to_owned(), source })
}

/// Writes a file in one step, so that a process that follows it never reads a part.
fn write_file(file: &Path, text: &str, mode: u32, force: bool) -> Result<(), CertsError> {
    let failed = |source| CertsError::Write { file: file.to_owned(), source };
    let part = file.with_extension(format!("{}.part", std::process::id()));
    // A file that an earlier process of the same number left behind may have other rights.
    match fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let mut out = options.write(true).create_new(true).mode(mode).open(&part).map_err(failed)?;
    let written = out.write_all(text.as_bytes()).and_then(|()| out.sync_all());
    let placed = written.and_then(|()| match force {
        true => fs::rename(&part, file),
        // Fails if the file has come into being since the check.
        false => fs::hard_link(&part, file),
    });
    let _ = fs::remove_file(&part);
    placed.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => CertsError::Exists { file: file.to_owned() },
        _ => failed(source),
    })
}

/// Longest validity, and that of an authority.
const CA_DAYS: u32 = 3650;
const CLOCK_SKEW: Duration = Duration::from_secs(2 * 3600);
const PRIVATE: u32 = 0o600;
const PUBLIC: u32 = 0o644;
