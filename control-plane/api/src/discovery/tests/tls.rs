//! Control planes behind TLS: the certificate must have the name that was looked up, whatever the address is.

use std::path::Path;

use rand::Rng as _;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use trust::Role;
use trust::certs::{Authority, Request, validity_from_now};
use trust::tls::{ClientCertificates, Security, Tls, TlsFiles};

use super::support::secure_client_with;
use super::*;
use crate::types::LeaderInfo;

/// A certificate of `authority` for these names, in a folder of its own below `dir`.
fn issue(authority: &Authority, dir: &Path, role: Role, names: &[&str]) -> Tls {
    let (not_before, not_after) = validity_from_now(1);
    let addresses = names.iter().map(|&name| name.to_owned()).collect();
    let name = format!("holder-{}", rand::rng().next_u32());
    let dir = dir.join(&name);
    let request = Request { name, role, addresses, not_before, not_after };
    authority.issue_into(&dir, &request, false).unwrap();
    Tls::open(TlsFiles::in_folder(&dir).unwrap(), ClientCertificates::Optional).unwrap()
}

/// A control plane that answers every request as the leader, one request per connection.
async fn serve(tls: Tls) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(tls.clone(), stream));
        }
    });
    addr
}

async fn answer(tls: Tls, stream: TcpStream) -> std::io::Result<()> {
    let Ok(mut stream) = tls.accept(stream).await else { return Ok(()) };
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let info = LeaderInfo { leads: true, url: None, term: 7 };
    let body = serde_json::to_string(&info).unwrap();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    stream.shutdown().await
}

fn client_of(addr: SocketAddr, tls: &Tls) -> ControlClient {
    let resolver = ScriptedResolver::new(vec![addr.ip()]);
    let backends = Backends {
        resolver: Arc::new(resolver),
        #[cfg(feature = "kubernetes")]
        kubernetes: None,
    };
    let security = Security { tls: Some(tls.clone()), insecure: false };
    secure_client_with(&format!("dns://control.test:{}", addr.port()), backends, security)
}

#[tokio::test]
async fn the_certificate_has_the_name_that_was_looked_up() {
    let (dir, authority) = (TempDir::new().unwrap(), Authority::generate().unwrap());
    let of_client = issue(&authority, dir.path(), Role::Client, &[]);
    let named = issue(&authority, dir.path(), Role::Server, &["control.test"]);
    let client = client_of(serve(named).await, &of_client);
    assert_eq!(client.leader().await.unwrap().term, 7);
    assert!(client.base_url().starts_with("https://127.0.0.1:"), "{}", client.base_url());
    // The name counts, not the address. So another pod at the same address is no control plane.
    for names in [&["127.0.0.1"][..], &["other.test", "127.0.0.1"]] {
        let other = issue(&authority, dir.path(), Role::Server, names);
        let client = client_of(serve(other).await, &of_client);
        let err = client.with_timeout(Duration::from_secs(4)).leader().await.unwrap_err();
        assert!(matches!(err, ControlError::Tls { .. }), "{err}");
    }
}

#[test]
fn a_token_goes_to_no_address_in_plain_text() {
    let options = crate::ClientOptions::default();
    let locators: &[&str] = if cfg!(feature = "kubernetes") {
        &["dns://control.test:1", "k8s://experts/control:http"]
    } else {
        &["dns://control.test:1"]
    };
    for locator in locators {
        let token = Some("secret".to_owned());
        let err = ControlClient::with_options(locator, token.clone(), options.clone());
        assert_eq!(err.unwrap_err(), ConfigError::Insecure { url: (*locator).to_owned() });
        ControlClient::new(locator, None).unwrap();
        let mut insecure = options.clone();
        insecure.security.insecure = true;
        ControlClient::with_options(locator, token, insecure).unwrap();
    }
    ControlClient::new("dns://localhost:1", Some("secret".to_owned())).unwrap();
}
