//! The store in an etcd that speaks TLS and asks for certificates.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use trust::Role;
use trust::certs::{Authority, Request, validity_from_now};
use trust::tls::{ClientCertificates, Tls, TlsFiles};

use super::*;

/// Ends with its owner.
struct Etcd(Child);

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn security(files: TlsFiles) -> Security {
    let tls = Tls::open(files, ClientCertificates::Optional).unwrap();
    Security { tls: Some(tls), insecure: false }
}

#[test]
fn an_etcd_with_tls_needs_its_authority_and_a_certificate() {
    let dir = TempDir::new().unwrap();
    let authority = Authority::generate().unwrap();
    let (not_before, not_after) = validity_from_now(2);
    let folder = dir.path().join("tls");
    let request = Request {
        name: "etcd".to_owned(),
        role: Role::Server,
        addresses: vec!["127.0.0.1".to_owned()],
        not_before,
        not_after,
    };
    authority.issue_into(&folder, &request, false).unwrap();
    let port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (client, peer) =
        (format!("https://127.0.0.1:{}", port()), format!("http://127.0.0.1:{}", port()));
    let child = Command::new(test_support::etcd::program())
        .args(["--name", "m0", "--data-dir"])
        .arg(dir.path().join("data"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("m0={peer}"), "--client-cert-auth"])
        .arg("--cert-file")
        .arg(folder.join("cert.pem"))
        .arg("--key-file")
        .arg(folder.join("key.pem"))
        .arg("--trusted-ca-file")
        .arg(folder.join("ca.pem"))
        .args(["--unsafe-no-fsync", "--logger", "zap", "--log-level", "error"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _etcd = Etcd(child.expect("etcd"));

    let runtime = runtime();
    let files = TlsFiles::in_folder(&folder).unwrap();
    let endpoints = [client];
    let open = |security: &Security| {
        let client = Arc::new(EtcdClient::new(&endpoints, None, security).unwrap());
        EtcdStore::new(client, "/test/", runtime.handle().clone(), None)
    };
    let mut store = open(&security(files.clone()));
    test_support::eventually("an etcd", Duration::from_secs(60), || store.load().is_ok());
    store.save(&snapshot(1), Revision(0)).unwrap();

    let err = EtcdClient::new(&endpoints, None, &Security::default()).unwrap_err().to_string();
    assert!(err.contains("https needs --etcd-ca"), "{err}");

    // Certificates for https do not allow plain HTTP.
    let mut settings = security(files.clone());
    for (url, is_exposed) in [("http://10.255.255.1:2379", true), ("http://127.0.0.1:2379", false)]
    {
        let open = |settings: &Security| EtcdClient::new(&[url.to_owned()], None, settings);
        settings.insecure = false;
        match open(&settings) {
            Ok(client) => assert!(!is_exposed && client.exposure().is_none(), "{url}"),
            Err(err) => {
                let text = err.to_string();
                assert!(
                    is_exposed && text.contains("--etcd-ca") && text.contains("--etcd-insecure"),
                    "{text}"
                );
            }
        }
        settings.insecure = true;
        assert_eq!(open(&settings).unwrap().exposure().is_some(), is_exposed, "{url}");
    }
    for url in ["http://root:hunter2@10.0.0.5:2379", "ftp://root:hunter2@a", "root:hunter2@a"] {
        let err = EtcdClient::new(&[url.to_owned()], None, &settings).unwrap_err().to_string();
        assert!(!err.contains("hunter2"), "{err}");
    }
    let ca_only = TlsFiles { ca: files.ca.clone(), ..TlsFiles::default() };
    let err = open(&security(ca_only)).load().unwrap_err().to_string();
    assert!(err.contains("requires a client certificate") || err.contains("refuses"), "{err}");
    let other = dir.path().join("other.pem");
    std::fs::write(&other, Authority::generate().unwrap().cert_pem()).unwrap();
    let foreign = TlsFiles { ca: Some(other), ..files.clone() };
    let err = open(&security(foreign)).load().unwrap_err().to_string();
    assert!(err.contains("not signed by an authority that this side trusts"), "{err}");

    // With users, etcd refuses the certificate for its Common Name.
    let client = EtcdClient::new(&endpoints, None, &security(files.clone())).unwrap();
    for (path, body) in [
        ("auth/user/add", json!({ "name": "root", "password": "secret" })),
        ("auth/role/add", json!({ "name": "root" })),
        ("auth/user/grant", json!({ "user": "root", "role": "root" })),
        ("auth/enable", json!({})),
    ] {
        let call = client.call::<serde_json::Value>(path, &body, Duration::from_secs(20));
        runtime.block_on(call).unwrap();
    }
    let err = open(&security(files)).load().unwrap_err().to_string();
    assert!(err.contains("because it has a Common Name"), "{err}");
}
