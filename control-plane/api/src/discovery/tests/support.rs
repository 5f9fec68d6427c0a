//! Control planes that say their own address, and a resolver that answers as a test says.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::routing::get;
use axum::{Json, Router};
use reqwest::header::CONNECTION;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use trust::tls::Security;

use super::super::dns::{Lookup, Resolver};
use super::super::{Backends, ControlPlanes, Known, Locator};
use crate::client::{ClientOptions, ControlClient};
use crate::types::LeaderInfo;

pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// A control plane that answers `GET /v1/leader` with its own URL.
pub(super) struct Plane {
    pub(super) addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Plane {
    /// Two control planes on one port and two addresses, as the pods of a Service.
    pub(super) async fn start_pair() -> [Self; 2] {
        for _ in 0..100 {
            let first = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 2), 0)).await.unwrap();
            let port = first.local_addr().unwrap().port();
            let second = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 3), port)).await;
            if let Ok(second) = second {
                return [Self::serve(first), Self::serve(second)];
            }
        }
        panic!("no port is free on 127.0.0.2 and 127.0.0.3");
    }

    fn serve(listener: TcpListener) -> Self {
        let addr = listener.local_addr().unwrap();
        let info = LeaderInfo { leads: true, url: Some(format!("http://{addr}")), term: 1 };
        // Without connections that outlive a stopped control plane.
        let answer = move || async move { ([(CONNECTION.as_str(), "close")], Json(info)) };
        let router = Router::new().route("/v1/leader", get(answer));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { addr, task }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub(super) fn stop(&self) {
        self.task.abort();
    }

    /// Replaces the control plane by a socket that accepts and never answers.
    pub(super) async fn silence(self) -> SocketAddr {
        let addr = self.addr;
        self.task.abort();
        // The port is free as soon as the task has ended.
        let _ = self.task.await;
        let listener = TcpListener::bind(addr).await.unwrap();
        tokio::spawn(async move {
            let mut sockets = Vec::new();
            loop {
                sockets.push(listener.accept().await);
            }
        });
        addr
    }
}

/// A resolver with one answer for every name.
#[derive(Clone, Debug)]
pub(super) struct ScriptedResolver(Arc<Mutex<Answer>>);

#[derive(Debug)]
enum Answer {
    Is(io::Result<Vec<IpAddr>>),
    Hangs,
}

impl ScriptedResolver {
    pub(super) fn new(addresses: Vec<IpAddr>) -> Self {
        Self(Arc::new(Mutex::new(Answer::Is(Ok(addresses)))))
    }

    pub(super) fn answer(&self, answer: io::Result<Vec<IpAddr>>) {
        self.set(Answer::Is(answer));
    }

    pub(super) fn hang(&self) {
        self.set(Answer::Hangs);
    }

    fn set(&self, answer: Answer) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }

    /// Number of copies of this resolver.
    pub(super) fn num_users(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

impl Resolver for ScriptedResolver {
    fn look_up<'a>(&'a self, _: &'a str, port: u16) -> Lookup<'a> {
        let answer = match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Answer::Hangs => None,
            Answer::Is(Ok(addresses)) => Some(Ok(addresses.clone())),
            Answer::Is(Err(err)) => Some(Err(io::Error::new(err.kind(), err.to_string()))),
        };
        Box::pin(async move {
            let Some(answer) = answer else { return std::future::pending().await };
            Ok(answer?.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
        })
    }
}

/// A client that looks names up with a resolver of the test's own.
pub(super) fn client_of(urls: &str, resolver: &ScriptedResolver) -> ControlClient {
    let backends = Backends {
        resolver: Arc::new(resolver.clone()),
        #[cfg(feature = "kubernetes")]
        kubernetes: None,
    };
    client_with(urls, backends)
}

pub(super) fn client_with(urls: &str, backends: Backends) -> ControlClient {
    secure_client_with(urls, backends, Security::default())
}

pub(super) fn secure_client_with(
    urls: &str,
    backends: Backends,
    security: Security,
) -> ControlClient {
    let scheme = if security.for_client().is_some() { "https" } else { "http" };
    let parse = |text: &str| Locator::parse(text, |url| Ok(reqwest::Url::parse(url).unwrap()));
    let locators: Vec<Locator> = urls.split(',').map(|text| parse(text).unwrap()).collect();
    let planes = ControlPlanes::new(locators, scheme, backends);
    let options = ClientOptions { timeout: TIMEOUT, security, ..ClientOptions::default() };
    ControlClient::of_planes(planes, options).unwrap()
}

/// Waits until the list of control planes is as wanted, and panics with the list after a timeout.
#[cfg(feature = "kubernetes")]
pub(super) async fn wait_for(client: &ControlClient, wanted: impl Fn(&Known) -> bool) {
    let mut known = client.planes().known.subscribe();
    let found = tokio::time::timeout(TIMEOUT, known.wait_for(wanted)).await.is_ok();
    assert!(found, "{:?}", client.planes().known.borrow());
}

/// Waits for a condition that nothing announces.
pub(super) async fn eventually(condition: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !condition() {
        assert!(begin.elapsed() < TIMEOUT, "still not so after {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
