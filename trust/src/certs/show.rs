//! The contents of certificates, for people and programs.

use std::fs;
use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Serialize;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::CertsError;
use crate::tls::{date, identity_of};

/// Contents of a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CertificateInfo {
    /// Subject as X.509 writes it, control characters escaped.
    pub subject: String,
    /// Issuer as X.509 writes it, control characters escaped.
    pub issuer: String,
    /// Name of the holder in the fleet.
    pub name: Option<String>,
    /// Role of the holder in the fleet.
    pub role: Option<String>,
    /// Host names and addresses for which it is valid.
    pub addresses: Vec<String>,
    /// Whether it can sign other certificates.
    pub is_authority: bool,
    /// Beginning of the validity, in seconds since 1970.
    pub not_before: u64,
    /// End of the validity, in seconds since 1970.
    pub not_after: u64,
    /// The end of the validity, for people.
    pub not_after_text: String,
}

/// The certificates of a PEM file: at least one.
///
/// # Errors
/// [`CertsError`] when the file cannot be read, has no certificate or a damaged one.
pub fn read_certificates(file: &Path) -> Result<Vec<CertificateInfo>, CertsError> {
    let damaged = |reason: String| CertsError::Damaged { file: file.to_owned(), reason };
    let pem = fs::read(file);
    let pem = pem.map_err(|source| CertsError::Show { file: file.to_owned(), source })?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| damaged(error.to_string()))?;
    if certificates.is_empty() {
        return Err(damaged("it has no section BEGIN CERTIFICATE".to_owned()));
    }
    certificates.iter().map(|der| info(der).map_err(damaged)).collect()
}

/// Public key of the first certificate.
pub(super) fn first_public_key(pem: &[u8]) -> Option<Vec<u8>> {
    let der = CertificateDer::pem_slice_iter(pem).next()?.ok()?;
    let (_, parsed) = X509Certificate::from_der(&der).ok()?;
    Some(parsed.public_key().subject_public_key.data.to_vec())
}

fn info(der: &[u8]) -> Result<CertificateInfo, String> {
    let (_, parsed) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
    let escaped = |text: String| text.escape_default().to_string();
    let names = parsed.subject_alternative_name().ok().flatten();
    let names = names.map(|names| names.value.general_names.clone()).unwrap_or_default();
    let addresses = names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(name.escape_default().to_string()),
        GeneralName::IPAddress(bytes) => Some(address(bytes)),
        _ => None,
    });
    let identity = identity_of(der);
    let seconds = |time: x509_parser::time::ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
    let not_after = seconds(parsed.validity().not_after);
    Ok(CertificateInfo {
        subject: escaped(parsed.subject().to_string()),
        issuer: escaped(parsed.issuer().to_string()),
        name: identity.as_ref().map(|identity| identity.name.clone()),
        role: identity.map(|identity| identity.role.to_string()),
        addresses: addresses.collect(),
        is_authority: parsed.is_ca(),
        not_before: seconds(parsed.validity().not_before),
        not_after,
        not_after_text: date(not_after),
    })
}

fn address(bytes: &[u8]) -> String {
    match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
        (Ok(bytes), _) => std::net::IpAddr::from(bytes).to_string(),
        (_, Ok(bytes)) => std::net::IpAddr::from(bytes).to_string(),
        _ => format!("{} bytes that are no address", bytes.len()),
    }
}
