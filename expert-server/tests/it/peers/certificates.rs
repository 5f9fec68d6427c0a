//! Servers without tickets that require certificates read weights of each other. Other holders of certificates do not.

use std::net::SocketAddr;

use message_engine::{ConnectError, ConnectOptions};
use trust::Role;
use trust::certs::{Authority, Request as CertificateRequest, validity_from_now};
use trust::tls::{ClientCertificates, Tls, TlsFiles};

use super::*;

/// Certificates of one authority.
struct Certificates {
    dir: TempDir,
    authority: Authority,
}

impl Certificates {
    /// TLS with a certificate of `role`.
    fn of(&self, role: Role) -> Tls {
        let (not_before, not_after) = validity_from_now(30);
        let addresses = vec!["127.0.0.1".to_owned()];
        let name = format!("my-{role}");
        let folder = self.dir.path().join(&name);
        let request = CertificateRequest { name, role, addresses, not_before, not_after };
        self.authority.issue_into(&folder, &request, false).expect("a certificate");
        let files = TlsFiles::in_folder(&folder).expect("a folder");
        Tls::open(files, ClientCertificates::Required).expect("TLS")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_tickets_only_certificates_of_servers_open_the_port_for_weights() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let dir = tempfile::tempdir().expect("a folder");
    let certificates = Certificates { dir, authority: Authority::generate().expect("one") };
    let of_server = certificates.of(Role::Server);
    let others = OTHERS.map(|role| (role, certificates.of(role)));
    for token in [None, Some("sesame")] {
        let mut control = ControlConfig::new("127.0.0.1:0", 4, 4);
        control.token = token.map(str::to_owned);
        let fleet = Fleet::start(control).await;
        let server = async |name, dir: &Path, from| {
            let mut config = fleet.config(name, dir, from);
            config.security.tls = Some(of_server.clone());
            start(config).await
        };
        let a = server("a", &folders.full, WeightsFrom::Disk).await;
        let b = server("b", &folders.bare, WeightsFrom::Peers).await;
        assert_eq!(b.holds(), a.holds());

        let member = fleet.members().await.remove(0);
        let addr: SocketAddr = member.weights_addr.expect("a source").parse().expect("one");
        for (role, tls) in others.clone() {
            // The holder knows the secret, if there is one: clients may have the same token.
            let ticket = token.map(|_| SECRET.to_owned());
            let config = EngineConfig { tls: Some(tls), ticket, ..EngineConfig::local() };
            let engine = Engine::start(config).expect("an engine");
            let limit = Instant::now() + PATIENCE;
            let outcome = engine.connect_with(addr, ConnectOptions::default(), limit);
            let Err(error @ ConnectError::Rejected { .. }) = outcome else {
                panic!("{role}: a refusal was expected, not {outcome:?}");
            };
            let text = error.to_string();
            assert!(text.contains("role server only"), "{text}");
            assert!(text.contains(&format!("my-{role} has the role {role}")), "{text}");
        }
        for server in [a, b] {
            server.shutdown().await;
        }
    }
}

const OTHERS: [Role; 3] = [Role::Client, Role::Operator, Role::Viewer];
/// The secret that servers derive from the token `sesame`.
const SECRET: &str = "2e52a438bf02c78a2f6e4427b23d570ca266846af6a9b2cc87641ad15b8a84ba";
