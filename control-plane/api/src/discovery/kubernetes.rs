//! Control planes by the EndpointSlices of a Service of Kubernetes.
//!
//! Slices are listed, then watched from the version of the list. A failed, closed or silent watch, and a request for a
//! new lookup, list them again. Every wait is bounded here, because an API server or a proxy in front of it may hold
//! connections that it no longer serves.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::discovery::v1::{EndpointPort, EndpointSlice};
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use tokio::time::Instant;
use tracing::debug;

use super::locator::{Port, Service};
use super::{Refreshes, Report};
use crate::backoff::Backoff;
use crate::error::causes;

/// Follows the endpoints of a Service until the task is dropped. `config` is `None` for the configuration of the pod
/// or of `KUBECONFIG`.
pub(super) async fn follow(
    service: Service,
    config: Option<kube::Config>,
    report: Report,
    mut refreshes: Refreshes,
) {
    let mut backoff = Backoff::new(MIN_INTERVAL, MAX_BACKOFF);
    loop {
        let began = refreshes.begin();
        match follow_once(&service, config.clone(), &report, &mut refreshes).await {
            Ended::Stale(reason) => {
                debug!(%service, reason, "endpoints are listed again");
                backoff.reset();
                tokio::time::sleep_until(began + MIN_INTERVAL).await;
            }
            Ended::Failed(reason) => {
                if began.elapsed() > MAX_BACKOFF {
                    backoff.reset();
                }
                report.failed(reason);
                refreshes.pause(backoff.next_delay(), began + MIN_INTERVAL).await;
            }
        }
    }
}

/// Reason why slices must be listed again.
enum Ended {
    /// The known slices may be old, or a request asks for new ones.
    Stale(&'static str),
    /// The API server does not answer, or refuses.
    Failed(String),
}

impl From<kube::Error> for Ended {
    fn from(err: kube::Error) -> Self {
        match err {
            kube::Error::Api(status) => (*status).into(),
            err => Self::Failed(format!("Kubernetes: {}", causes(&err))),
        }
    }
}

impl From<Status> for Ended {
    fn from(status: Status) -> Self {
        const GONE: u16 = 410;
        const FORBIDDEN: u16 = 403;
        // A foreign text: escaped, and only its beginning.
        let message: String = status.message.chars().take(200).collect();
        match status.code {
            GONE => Self::Stale("the watched version is gone"),
            FORBIDDEN => Self::Failed(format!(
                "the API server refuses ({FORBIDDEN}, {message:?}): the ServiceAccount needs the verbs get, list and \
                 watch on endpointslices of discovery.k8s.io in the namespace"
            )),
            code => Self::Failed(format!("the API server answers {code}, {message:?}")),
        }
    }
}

/// Lists and watches until something ends the watch.
async fn follow_once(
    service: &Service,
    config: Option<kube::Config>,
    report: &Report,
    refreshes: &mut Refreshes,
) -> Ended {
    let Err(ended) = try_follow(service, config, report, refreshes).await;
    ended
}

async fn try_follow(
    service: &Service,
    config: Option<kube::Config>,
    report: &Report,
    refreshes: &mut Refreshes,
) -> Result<std::convert::Infallible, Ended> {
    let client = connect(config).await?;
    let api: Api<EndpointSlice> = Api::namespaced(client, &service.namespace);
    let selector = format!("{SERVICE_LABEL}={}", service.name);
    let list = within("list", api.list(&ListParams::default().labels(&selector))).await?;
    let mut version = list.metadata.resource_version.unwrap_or_default();
    let mut slices: BTreeMap<String, EndpointSlice> =
        list.items.into_iter().filter_map(|slice| Some((name(&slice)?, slice))).collect();
    publish(service, &slices, report);
    let list_again_at = Instant::now() + LIST_PERIOD;
    loop {
        let opened_at = Instant::now();
        if opened_at >= list_again_at {
            return Err(Ended::Stale("its period is over"));
        }
        let params = WatchParams::default().labels(&selector).timeout(WATCH_SECONDS);
        let mut events = pin!(within("watch", api.watch(&params, &version)).await?);
        // The API server ends a watch after `WATCH_SECONDS`.
        let silent_at = opened_at + Duration::from_secs(WATCH_SECONDS.into()) + TIMEOUT;
        loop {
            let event = tokio::select! {
                event = tokio::time::timeout_at(silent_at, events.next()) => event,
                () = refreshes.next(opened_at) => return Err(Ended::Stale("no control plane answers")),
            };
            let event = event.map_err(|_| Ended::Stale("the watch does not end"))?;
            let Some(event) = event else { break };
            match event? {
                WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                    version = slice.metadata.resource_version.clone().unwrap_or(version);
                    slices.extend(name(&slice).map(|name| (name, slice)));
                    publish(service, &slices, report);
                }
                WatchEvent::Deleted(slice) => {
                    version = slice.metadata.resource_version.clone().unwrap_or(version);
                    if let Some(name) = name(&slice) {
                        slices.remove(&name);
                    }
                    publish(service, &slices, report);
                }
                WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                WatchEvent::Error(status) => return Err((*status).into()),
            }
        }
        // A server that ends every watch at once must not be asked without a pause.
        tokio::time::sleep_until(opened_at + MIN_INTERVAL).await;
    }
}

async fn connect(config: Option<kube::Config>) -> Result<kube::Client, Ended> {
    let mut config = match config {
        Some(config) => config,
        None => {
            let config = tokio::time::timeout(TIMEOUT, kube::Config::infer()).await;
            let config =
                config.map_err(|_| Ended::Failed("the kubeconfig cannot be read".into()))?;
            config.map_err(|err| {
                let reason = format!("neither in a pod nor with a kubeconfig: {err}");
                Ended::Failed(reason)
            })?
        }
    };
    config.connect_timeout = Some(TIMEOUT);
    config.read_timeout = None;
    // Retries and their delays are those of `follow`.
    config.default_retry = false;
    // The client of control planes ignores the environment's proxies, too.
    let is_of_environment = |uri: &str| {
        let variables = ["HTTPS_PROXY", "https_proxy"];
        variables.iter().any(|name| std::env::var(name).is_ok_and(|value| same(&value, uri)))
    };
    if config.proxy_url.as_ref().is_some_and(|url| is_of_environment(&url.to_string())) {
        config.proxy_url = None;
    }
    Ok(kube::Client::try_from(config)?)
}

/// Compares a URL of the environment with its normal form.
fn same(given: &str, normal: &str) -> bool {
    given.trim_end_matches('/') == normal.trim_end_matches('/')
}

async fn within<T>(what: &str, request: impl Future<Output = kube::Result<T>>) -> Result<T, Ended> {
    match tokio::time::timeout(TIMEOUT, request).await {
        Ok(outcome) => Ok(outcome?),
        Err(_) => {
            let seconds = TIMEOUT.as_secs();
            Err(Ended::Failed(format!(
                "the API server does not answer a {what} within {seconds} s"
            )))
        }
    }
}

fn name(slice: &EndpointSlice) -> Option<String> {
    slice.metadata.name.clone()
}

fn publish(service: &Service, slices: &BTreeMap<String, EndpointSlice>, report: &Report) {
    match ready_addresses(service, slices) {
        Ok(addresses) => report.found(addresses),
        Err(reason) => report.found_none(reason),
    }
}

/// The addresses of all ready endpoints, or the reason why there is none.
pub(super) fn ready_addresses(
    service: &Service,
    slices: &BTreeMap<String, EndpointSlice>,
) -> Result<Vec<SocketAddr>, String> {
    if slices.is_empty() {
        return Err(format!(
            "no EndpointSlice of the Service {} in the namespace {}: does it exist?",
            service.name, service.namespace
        ));
    }
    let mut addresses = Vec::new();
    let mut num_endpoints = 0;
    let mut mismatch = None;
    for slice in slices.values() {
        if !matches!(slice.address_type.as_str(), "IPv4" | "IPv6") || slice.endpoints.is_empty() {
            continue;
        }
        num_endpoints += slice.endpoints.len();
        let port = match port_of(service, slice.ports.as_deref().unwrap_or_default()) {
            Ok(port) => port,
            Err(reason) => {
                mismatch = Some(reason);
                continue;
            }
        };
        for endpoint in &slice.endpoints {
            // No statement means ready.
            let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready);
            // The addresses of one endpoint are the same pod.
            let address = endpoint.addresses.first().and_then(|text| text.parse::<IpAddr>().ok());
            if let (true, Some(address)) = (ready.unwrap_or(true), address) {
                addresses.push(SocketAddr::new(address, port));
            }
        }
    }
    match (addresses.is_empty(), mismatch) {
        (false, _) => Ok(addresses),
        (true, Some(reason)) => Err(reason),
        (true, None) => Err(format!(
            "the Service {} has {num_endpoints} endpoints, none of them ready",
            service.name
        )),
    }
}

fn port_of(service: &Service, ports: &[EndpointPort]) -> Result<u16, String> {
    let tcp = |port: &&EndpointPort| port.protocol.as_deref().unwrap_or("TCP") == "TCP";
    let known: Vec<(&str, u16)> = ports
        .iter()
        .filter(tcp)
        .filter_map(|port| {
            Some((port.name.as_deref().unwrap_or(""), u16::try_from(port.port?).ok()?))
        })
        .collect();
    let wanted = match &service.port {
        None if known.len() == 1 => return Ok(known[0].1),
        None => "none was given".to_owned(),
        Some(Port::Name(wanted)) => match known.iter().find(|(name, _)| name == wanted) {
            Some((_, number)) => return Ok(*number),
            None => format!("{wanted:?} is none of them"),
        },
        Some(Port::Number(wanted)) if known.iter().any(|(_, number)| number == wanted) => {
            return Ok(*wanted);
        }
        Some(Port::Number(wanted)) => format!("{wanted} is none of them"),
    };
    let texts: Vec<String> =
        known.iter().map(|(name, number)| format!("{number} ({name:?})")).collect();
    let texts = if texts.is_empty() { "none".to_owned() } else { texts.join(", ") };
    Err(format!(
        "the pods of the Service {} have the TCP ports {texts}, and {wanted}",
        service.name
    ))
}

/// Label of a slice: the name of its Service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Length of a watch, as the API server is asked for it.
const WATCH_SECONDS: u32 = 60;
/// Least time between two lists, and between two watches.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Time after which slices are listed again though no watch has failed.
const LIST_PERIOD: Duration = Duration::from_secs(600);
