//! The rules for addresses that other hosts can reach.

use std::sync::atomic::{AtomicUsize, Ordering};

use httpd::trust::Role;
use httpd::trust::certs::{Authority, Request, validity_from_now};
use httpd::trust::tls::TlsFiles;
use httpd::trust::tls::{ClientCertificates, Tls};
use tempfile::TempDir;

use super::*;
use crate::config::{ExpertSelection, Secret, TicketMode};

fn member() -> ServerConfig {
    let placement = Placement::ControlPlane { url: "http://127.0.0.1:1".to_owned(), token: None };
    ServerConfig::new("no-model", "s", placement)
}

fn tls(dir: &TempDir, clients: ClientCertificates) -> Tls {
    let (not_before, not_after) = validity_from_now(30);
    let addresses = vec!["192.0.2.7".to_owned()];
    let request =
        Request { name: "s".to_owned(), role: Role::Server, addresses, not_before, not_after };
    let authority = Authority::generate().expect("an authority");
    authority.issue_into(dir.path(), &request, true).expect("a certificate");
    Tls::open(TlsFiles::in_folder(dir.path()).expect("a folder"), clients).expect("TLS")
}

#[test]
fn a_server_that_would_admit_every_client_of_other_hosts_is_refused() {
    let dir = TempDir::new().expect("a folder");
    let mut config = member();
    config.data_addr = "192.0.2.7:0".parse().expect("an address");
    config.security.tls = Some(tls(&dir, ClientCertificates::Optional));
    assert!(check_admission(&config).is_ok(), "clients need a ticket");
    config.tickets = TicketMode::Off;
    let text = check_admission(&config).expect_err("refused").to_string();
    assert!(text.contains("192.0.2.7:0") && !text.contains('\n'), "{text}");

    let changes: [fn(&mut ServerConfig); 3] = [
        |config| config.data_addr = "127.0.0.1:0".parse().expect("an address"),
        |config| config.secret = Some(Secret::new("sesame")),
        |config| config.security.insecure = true,
    ];
    for change in changes {
        let mut allowed = config.clone();
        change(&mut allowed);
        assert!(check_admission(&allowed).is_ok(), "{allowed:?}");
    }
    config.security.tls = Some(tls(&dir, ClientCertificates::Required));
    assert!(check_admission(&config).is_ok(), "clients need a certificate");

    config.security.tls = Some(tls(&dir, ClientCertificates::Optional));
    config.tickets = TicketMode::Required;
    config.placement = Placement::Static(ExpertSelection::All);
    assert!(check_admission(&config).is_err(), "there are no tickets without a control plane");
}

#[test]
fn a_server_without_tickets_and_secrets_offers_no_weights_to_other_hosts() {
    let dir = TempDir::new().expect("a folder");
    let mut config = member();
    config.security.tls = Some(tls(&dir, ClientCertificates::Optional));
    config.tickets = TicketMode::Off;
    for exposed in ["192.0.2.7:0", "0.0.0.0:0", "[::]:0"] {
        config.data_addr = exposed.parse().expect("an address");
        let bind = weights::source_addr(&config).expect("it offers weights");
        assert!(weights::admits_all(&config, bind), "{exposed}");
        let with_token = ServerConfig { secret: Some(Secret::new("sesame")), ..config.clone() };
        assert!(!weights::admits_all(&with_token, bind), "{exposed}");
        let with_tickets = ServerConfig { tickets: TicketMode::Required, ..config.clone() };
        assert!(!weights::admits_all(&with_tickets, bind), "{exposed}");
        let mut with_certificates = config.clone();
        with_certificates.security.tls = Some(tls(&dir, ClientCertificates::Required));
        assert!(!weights::admits_all(&with_certificates, bind), "{exposed}");
    }
    config.weights.listen = Some("127.0.0.1:0".parse().expect("an address"));
    let bind = weights::source_addr(&config).expect("it offers weights");
    assert!(!weights::admits_all(&config, bind));
}

#[tokio::test]
async fn the_port_for_weights_is_not_opened_to_other_hosts_in_plain_text() {
    let mut config = member();
    config.weights.listen = Some("192.0.2.7:0".parse().expect("an address"));
    let started = start(config.clone(), prometheus::Registry::new(), |_| {}).await;
    let error = started.expect_err("refused");
    assert!(matches!(error, StartError::Insecure(_)), "{error}");
    // Other servers may read nothing, so there is no such port.
    config.weights.read_limit = 0;
    let started = start(config, prometheus::Registry::new(), |_| {}).await;
    let error = started.expect_err("there is no model");
    assert!(matches!(error, StartError::Open(_)), "{error}");
}

#[tokio::test]
async fn an_advertised_name_that_comes_late_is_waited_for() {
    let pause = Duration::from_millis(1);
    let lookups = AtomicUsize::new(0);
    let missing = || std::io::Error::other("name or service not known");
    let late = || async {
        match lookups.fetch_add(1, Ordering::Relaxed) {
            0 => Err(missing()),
            1 => Ok(false),
            _ => Ok(true),
        }
    };
    assert_eq!(resolve("pod-0:7171", late, pause, Duration::from_secs(60)).await, Ok(()));
    assert_eq!(lookups.load(Ordering::Relaxed), 3);

    let never = || async { Err(missing()) };
    let found = resolve("pod-0:7171", never, pause, Duration::from_millis(20)).await;
    assert_eq!(found, Err("name or service not known".to_owned()));

    // Without a port it is no address, and stays none.
    let malformed = || async { tokio::net::lookup_host("pod-0").await.map(|_| true) };
    let found = resolve("pod-0", malformed, Duration::from_secs(60), Duration::from_secs(600));
    let found = tokio::time::timeout(Duration::from_secs(30), found).await.expect("at once");
    assert!(found.is_err());
}
