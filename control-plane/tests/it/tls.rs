//! HTTPS: certificates of clients, plain text and TLS at the wrong port, and silent handshakes.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use control_api::{ClientOptions, ControlClient, Security};
use switchyard_control_plane::ServerConfig;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use trust::Role;
use trust::certs::{Authority, Request, validity_from_now};
use trust::tls::{ClientCertificates, Tls, TlsFiles};

use super::{BOUND, Plane, TOKEN, config, serve};

/// The folders of a server and a client of a fresh authority.
pub(super) struct Fleet {
    dir: TempDir,
    authority: Authority,
}

impl Fleet {
    pub(super) fn new() -> Self {
        let fleet =
            Self { dir: TempDir::new().unwrap(), authority: Authority::generate().unwrap() };
        fleet.issue(Role::Server, &["127.0.0.1"]);
        fleet.issue(Role::Operator, &[]);
        fleet
    }

    pub(super) fn issue(&self, role: Role, addresses: &[&str]) {
        let (not_before, not_after) = validity_from_now(2);
        let addresses = addresses.iter().map(|&address| address.to_owned()).collect();
        let request = Request { name: "n".to_owned(), role, addresses, not_before, not_after };
        self.authority.issue_into(&self.folder(role), &request, true).unwrap();
    }

    pub(super) fn folder(&self, role: Role) -> std::path::PathBuf {
        self.dir.path().join(role.name())
    }

    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(super) fn files(&self, role: Role) -> TlsFiles {
        TlsFiles::in_folder(&self.folder(role)).unwrap()
    }

    pub(super) fn config(&self, clients: ClientCertificates) -> ServerConfig {
        let mut config = config();
        config.security = security(&self.folder(Role::Server), clients);
        config
    }

    fn client(&self, addr: SocketAddr, security: Security) -> ControlClient {
        client(&format!("https://{addr}"), security)
    }
}

pub(super) fn security(dir: &Path, clients: ClientCertificates) -> Security {
    let tls = Tls::open(TlsFiles::in_folder(dir).unwrap(), clients).unwrap();
    Security { tls: Some(tls), insecure: false }
}

fn client(url: &str, security: Security) -> ControlClient {
    let mut options = ClientOptions::default();
    (options.security, options.timeout) = (security, BOUND);
    ControlClient::with_options(url, Some(TOKEN.to_owned()), options).unwrap()
}

#[tokio::test]
async fn members_and_watches_work_over_https() {
    let fleet = Fleet::new();
    let plane = Plane::start(fleet.config(ClientCertificates::Required)).await;
    let client = fleet
        .client(plane.addr, security(&fleet.folder(Role::Server), ClientCertificates::Optional));
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        serve(&client, name, incarnation).await;
    }
    let mut watch = client.watch_placement().await.unwrap();
    assert_eq!(watch.next().await.unwrap().epoch, client.status().await.unwrap().epoch);
    plane.stop().await;
}

#[tokio::test]
async fn a_refused_certificate_is_explained_to_the_client() {
    let fleet = Fleet::new();
    let plane = Plane::start(fleet.config(ClientCertificates::Required)).await;
    let ca_only =
        TlsFiles { ca: Some(fleet.folder(Role::Server).join("ca.pem")), ..TlsFiles::default() };
    let tls = Tls::open(ca_only, ClientCertificates::Optional).unwrap();
    let anonymous = fleet.client(plane.addr, Security { tls: Some(tls), insecure: false });
    let err = anonymous.status().await.unwrap_err().to_string();
    assert!(err.contains("requires a client certificate: give --tls DIR"), "{err}");

    let stranger = Fleet::new();
    let foreign = fleet.client(
        plane.addr,
        security(&stranger.folder(Role::Operator), ClientCertificates::Optional),
    );
    let err = foreign.status().await.unwrap_err();
    assert!(err.to_string().contains("not signed by an authority that this side trusts"), "{err}");
    assert!(err.is_transient(), "a renewed certificate ends the outage");

    let err = client(
        &format!("https://localhost:{}", plane.addr.port()),
        security(&fleet.folder(Role::Operator), ClientCertificates::Optional),
    );
    let err = err.status().await.unwrap_err().to_string();
    assert!(err.contains("is for 127.0.0.1, not for localhost"), "{err}");
    plane.stop().await;
}

#[tokio::test]
async fn plain_text_and_tls_at_the_wrong_port_are_named() {
    let fleet = Fleet::new();
    let secure = Plane::start(fleet.config(ClientCertificates::Optional)).await;
    let err = secure.client().status().await.unwrap_err().to_string();
    assert!(err.contains("speaks HTTPS only: use https://"), "{err}");

    let plain = Plane::start(config()).await;
    let with = security(&fleet.folder(Role::Operator), ClientCertificates::Optional);
    let err = fleet.client(plain.addr, with).status().await.unwrap_err().to_string();
    assert!(err.contains("does not speak TLS: start it with --tls DIR"), "{err}");
    plain.client().status().await.unwrap();

    let metrics = plain.client();
    metrics.status().await.unwrap();
    secure.stop().await;
    plain.stop().await;
}

#[tokio::test]
async fn secrets_and_ports_stay_off_the_network_without_tls() {
    let token = || Some("t".to_owned());
    let err = ControlClient::new("http://10.0.0.5:7070", token()).unwrap_err().to_string();
    assert!(err.contains("https://") && err.contains("--insecure"), "{err}");
    ControlClient::new("http://10.0.0.5:7070", None).unwrap();
    let mut options = ClientOptions::default();
    options.security.insecure = true;
    ControlClient::with_options("http://10.0.0.5:7070", token(), options).unwrap();
    let err = ControlClient::new("https://10.0.0.5:7070", token()).unwrap_err().to_string();
    assert!(err.contains("--tls DIR"), "{err}");

    let mut open = config();
    open.listen = "0.0.0.0:0".to_owned();
    let err = switchyard_control_plane::Server::bind(open.clone()).await.unwrap_err().to_string();
    assert!(err.contains("--tls DIR") && err.contains("--insecure"), "{err}");
    open.security.insecure = true;
    for has_token in [true, false] {
        open.token = has_token.then(|| TOKEN.to_owned());
        let plane = Plane::start(open.clone()).await;
        let url = format!("http://127.0.0.1:{}", plane.addr.port());
        let client = ControlClient::new(&url, open.token.clone()).unwrap();
        let text = client.status().await.unwrap().insecure.expect("named");
        assert!(text.starts_with("INSECURE: 0.0.0.0"), "{text}");
        assert_eq!(text.contains("no identity"), !has_token, "{text}");
        plane.stop().await;
    }
}

#[tokio::test]
async fn insecure_servers_are_named_and_counted() {
    let plane = Plane::start(super::patient_config()).await;
    let client = plane.client();
    // Five without tickets, one in plain text, and one that only this host reaches.
    for nth in 0..7 {
        let mut request = super::request(&format!("gpu-{nth}"), nth);
        request.plain_text = nth > 4;
        request.needs_tickets = nth == 5;
        if nth < 6 {
            request.data_addr = "10.255.255.1:7171".to_owned();
        }
        client.register(&request).await.unwrap();
    }
    let status = client.status().await.unwrap();
    let expected = [
        "INSECURE: gpu-5: plain text to other hosts (--insecure): give --tls DIR",
        "INSECURE: gpu-0, gpu-1, gpu-2 and 2 others: admits clients without a ticket (--tickets off): start it without \
         that option",
    ];
    let insecure = |problem: &&String| problem.starts_with("INSECURE");
    assert_eq!(status.problems.iter().filter(insecure).collect::<Vec<_>>(), expected);
    let members = client.members().await.unwrap();
    let insecure: Vec<bool> = members.iter().map(|member| member.insecure.is_some()).collect();
    assert_eq!(insecure, [true, true, true, true, true, true, false]);
    let counted = async {
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        while !super::raw(plane.addr, request)
            .await
            .contains("switchyard_control_members_insecure 6")
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(BOUND, counted).await.expect("the gauge counts them");
    plane.stop().await;
}

#[tokio::test]
async fn a_thousand_silent_handshakes_delay_no_client() {
    let fleet = Fleet::new();
    let mut config = fleet.config(ClientCertificates::Optional);
    config.limits.max_connections = 256;
    let plane = Plane::start(config).await;
    let mut crowd = Vec::new();
    for idx in 0..1000 {
        let mut stream = TcpStream::connect(plane.addr).await.unwrap();
        if idx % 2 == 0 {
            // The beginning of a handshake.
            stream.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
        }
        crowd.push(stream);
    }
    let client = fleet
        .client(plane.addr, security(&fleet.folder(Role::Operator), ClientCertificates::Optional));
    client.status().await.unwrap();
    // Every one is closed by the limit or by the timeout of a head.
    let closed = async {
        for mut stream in crowd {
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        }
    };
    tokio::time::timeout(BOUND + Duration::from_secs(10), closed).await.unwrap();
    plane.stop().await;
}
