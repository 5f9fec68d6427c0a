//! The authority's files.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use switchyard_trust::Role;
use switchyard_trust::certs::{
    Authority, CertsError, Request, read_certificates, validity_from_now,
};
use tempfile::TempDir;

fn request(role: Role, name: &str, addresses: &[&str]) -> Request {
    let (not_before, not_after) = validity_from_now(30);
    let addresses = addresses.iter().map(|&address| address.to_owned()).collect();
    Request { name: name.to_owned(), role, addresses, not_before, not_after }
}

#[test]
fn keys_are_private_and_are_never_replaced_unasked() {
    let dir = TempDir::new().unwrap();
    let ca = dir.path().join("deep/ca");
    Authority::init(&ca, false).unwrap();
    let key = fs::read(ca.join("ca-key.pem")).unwrap();
    let error = Authority::init(&ca, false).unwrap_err();
    assert!(matches!(&error, CertsError::Exists { .. }), "{error}");
    assert_eq!(fs::read(ca.join("ca-key.pem")).unwrap(), key);

    let authority = Authority::open(&ca).unwrap();
    let holder = dir.path().join("server");
    let server = request(Role::Server, "server-1", &["10.0.0.5", "fd00::5", "host.example"]);
    authority.issue_into(&holder, &server, false).unwrap();
    let first = fs::read(holder.join("key.pem")).unwrap();
    let error = authority.issue_into(&holder, &server, false).unwrap_err().to_string();
    assert!(error.contains("exists") && error.contains("--force"), "{error}");
    assert_eq!(fs::read(holder.join("key.pem")).unwrap(), first);
    // A key that was readable by others is not any more.
    fs::set_permissions(holder.join("key.pem"), fs::Permissions::from_mode(0o644)).unwrap();
    authority.issue_into(&holder, &server, true).unwrap();
    assert_ne!(fs::read(holder.join("key.pem")).unwrap(), first);
    for file in [ca.join("ca-key.pem"), holder.join("key.pem")] {
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "{file:?}");
    }
    let names = |dir: &std::path::Path| {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&holder), ["ca.pem", "cert.pem", "key.pem"]);
    assert_eq!(names(&ca), ["ca-key.pem", "ca.pem"]);

    let shown = read_certificates(&holder.join("cert.pem")).unwrap().remove(0);
    assert_eq!(shown.name.as_deref(), Some("server-1"));
    assert_eq!(shown.role.as_deref(), Some("server"));
    assert_eq!(shown.addresses, ["10.0.0.5", "fd00::5", "host.example"]);
    assert!(!shown.is_authority);
    assert!(read_certificates(&ca.join("ca.pem")).unwrap()[0].is_authority);
}

#[test]
fn names_and_addresses_that_fit_no_certificate_are_refused() {
    let authority = Authority::generate().unwrap();
    for name in ["", "a b", "a/b", "-a", "\u{1b}[2J", &"x".repeat(129)] {
        let error = authority.issue(&request(Role::Client, name, &[])).unwrap_err();
        assert!(matches!(error, CertsError::Name { .. }), "{name:?}: {error}");
        assert!(!error.to_string().contains('\u{1b}'));
    }
    for address in ["a b", "http://x", "10.0.0.5:7070", "", "é"] {
        let error = authority.issue(&request(Role::Server, "s", &[address])).unwrap_err();
        assert!(matches!(error, CertsError::Address { .. }), "{address:?}: {error}");
    }
    authority.issue(&request(Role::Server, "s", &["*.example.org", "[::1]"])).unwrap();
    let error = authority.issue(&request(Role::Server, "s", &[])).unwrap_err().to_string();
    assert!(error.contains("--address"), "{error}");
}

#[test]
fn an_authority_without_its_own_key_is_not_opened() {
    let dir = TempDir::new().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    Authority::init(&one, false).unwrap();
    Authority::init(&two, false).unwrap();
    fs::copy(two.join("ca-key.pem"), one.join("ca-key.pem")).unwrap();
    let error = Authority::open(&one).unwrap_err().to_string();
    assert!(error.contains("ca.pem") && error.contains("not that of ca-key.pem"), "{error}");
    let error = Authority::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("switchyard certs init"), "{error}");
    assert!(!format!("{:?}", Authority::generate().unwrap()).contains("PRIVATE KEY"));
}
