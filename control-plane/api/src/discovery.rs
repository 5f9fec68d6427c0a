//! The control planes that a client may ask: fixed URLs, all addresses of a DNS name, or the ready endpoints of a
//! Kubernetes Service.
//!
//! Fixed URLs never change. A thread looks up the others: at the first request, then at a bounded period, and whenever
//! no known control plane answers. Addresses stay in force while lookups fail. All clones of a client share one list
//! and one thread.

mod dns;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod locator;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use reqwest::Url;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, info, warn};
use trust::tls::ServerNames;

use crate::error::{ConfigError, ControlError};
use dns::{Resolver, SystemResolver};
use locator::Locator;

/// The control planes of one fleet. The list may change while requests run.
#[derive(Debug)]
pub(crate) struct ControlPlanes {
    known: Arc<watch::Sender<Known>>,
    backends: Backends,
    /// The thread that looks up addresses. The first request starts it, and the next one tries again after a failure.
    search: OnceLock<Search>,
    /// One start at a time.
    starting: Mutex<()>,
}

/// Answers of the lookups, replaced by tests.
#[derive(Clone, Debug)]
struct Backends {
    resolver: Arc<dyn Resolver>,
    /// `None` for the pod's or the user's own configuration.
    #[cfg(feature = "kubernetes")]
    kubernetes: Option<kube::Config>,
}

/// Control planes in the order in which a request asks them, beginning with the one that answered last.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) urls: Arc<[Url]>,
    /// Index of the one that answered last.
    pub(crate) first: usize,
}

/// A control plane, or a name of several, as it was given.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) text: String,
    pub(crate) scheme: &'static str,
    /// `None` for a Service of Kubernetes.
    pub(crate) host: Option<String>,
}

impl ControlPlanes {
    /// Parses one or several control planes with commas between them. `parse_url` parses URLs. The control
    /// planes of other forms are asked with `scheme`, `http` or `https`. Looks nothing up yet.
    ///
    /// # Errors
    /// [`ConfigError::Url`] when one of them is malformed.
    pub(crate) fn parse(
        text: &str,
        scheme: &'static str,
        parse_url: impl Fn(&str) -> Result<Url, ConfigError>,
    ) -> Result<Self, ConfigError> {
        let parse = |part: &str| Locator::parse(part.trim(), &parse_url);
        let locators = text.split(',').map(parse).collect::<Result<Vec<_>, _>>()?;
        let backends = Backends {
            resolver: Arc::new(SystemResolver),
            #[cfg(feature = "kubernetes")]
            kubernetes: None,
        };
        Ok(Self::new(locators, scheme, backends))
    }

    fn new(locators: Vec<Locator>, scheme: &'static str, backends: Backends) -> Self {
        let known = Arc::new(watch::Sender::new(Known::new(locators, scheme)));
        Self { known, backends, search: OnceLock::new(), starting: Mutex::default() }
    }

    /// Returns true if no control plane has to be looked up, so that the list never changes.
    pub(crate) fn is_fixed(&self) -> bool {
        self.known.borrow().is_fixed
    }

    /// The control planes as they were given.
    pub(crate) fn targets(&self) -> Vec<Target> {
        let known = self.known.borrow();
        let target = |part: &Part| {
            let (scheme, host) = match &part.locator {
                Locator::Url(url) if url.scheme() == "https" => ("https", url.host_str()),
                Locator::Url(url) => ("http", url.host_str()),
                Locator::Dns { host, .. } => (known.scheme, Some(host.as_str())),
                #[cfg(feature = "kubernetes")]
                Locator::Service(_) => (known.scheme, None),
            };
            Target { text: part.locator.to_string(), scheme, host: host.map(str::to_owned) }
        };
        known.parts.iter().map(target).collect()
    }

    /// The control plane that answered last, or all as they were given if none is known yet.
    pub(crate) fn current(&self) -> String {
        let known = self.known.borrow();
        known.urls.get(known.current).map_or_else(|| known.text(), |url| text_of(url).to_owned())
    }

    /// The control planes known now. Waits up to `bound` for the first lookup.
    ///
    /// # Errors
    /// [`ControlError::NoneFound`] when no control plane is known by then, or a lookup of each has failed.
    pub(crate) async fn list(&self, bound: Duration) -> Result<Snapshot, ControlError> {
        let known = self.known.borrow().clone();
        if !known.urls.is_empty() {
            // Addresses of other kinds may be known before the first lookup.
            let _ = self.start_search();
            return Ok(known.snapshot());
        }
        self.look_up(bound, &known).await
    }

    /// The control planes after a new lookup of each that is not fixed. Waits up to `bound` for them.
    ///
    /// # Errors
    /// As for [`list`](Self::list).
    pub(crate) async fn list_again(&self, bound: Duration) -> Result<Snapshot, ControlError> {
        let known = self.known.borrow().clone();
        if known.is_fixed {
            return Ok(known.snapshot());
        }
        self.look_up(bound, &known).await
    }

    /// Makes the next request begin with this control plane.
    pub(crate) fn remember(&self, url: &Url) {
        self.change_current(|known| known.position(url));
    }

    /// Makes the next request begin with another control plane than this one.
    pub(crate) fn turn_away_from(&self, url: &Url) {
        self.change_current(|known| {
            let is_current = known.urls.get(known.current) == Some(url);
            is_current.then(|| (known.current + 1) % known.urls.len())
        });
    }

    fn change_current(&self, change: impl FnOnce(&Known) -> Option<usize>) {
        self.known.send_if_modified(|known| {
            if let Some(current) = change(known) {
                known.current = current;
            }
            // Waiting requests wait for lookups only.
            false
        });
    }

    async fn look_up(&self, bound: Duration, before: &Known) -> Result<Snapshot, ControlError> {
        let search = self.start_search().map_err(|err| none_found(before, err.to_string()))?;
        search.refresh.send_modify(|number| *number += 1);
        let mut receiver = self.known.subscribe();
        let all_done = receiver.wait_for(|known| known.has_looked_up_since(before));
        let is_timeout = tokio::time::timeout(bound, all_done).await.is_err();
        let known = self.known.borrow().clone();
        if !known.urls.is_empty() {
            return Ok(known.snapshot());
        }
        let reason = known.reason().unwrap_or_else(|| {
            let verdict = if is_timeout { "no answer" } else { "no address" };
            format!("{verdict} within {} ms", bound.as_millis())
        });
        Err(none_found(&known, reason))
    }

    fn start_search(&self) -> std::io::Result<&Search> {
        if let Some(search) = self.search.get() {
            return Ok(search);
        }
        let _one = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(search) = self.search.get() {
            return Ok(search);
        }
        let search = Search::start(&self.known, &self.backends)?;
        Ok(self.search.get_or_init(|| search))
    }
}

/// The certificate of a pod names the Service, not the address of the pod.
impl ServerNames for ControlPlanes {
    fn name_of(&self, address: IpAddr) -> Option<String> {
        let known = self.known.borrow();
        let has_it = |part: &&Part| part.addresses.iter().any(|found| found.ip() == address);
        known.parts.iter().find(has_it)?.locator.certificate_name()
    }
}

fn none_found(known: &Known, reason: String) -> ControlError {
    ControlError::NoneFound { locators: known.text(), reason }
}

/// Results of all lookups.
#[derive(Clone, Debug)]
struct Known {
    parts: Vec<Part>,
    /// URLs of all parts, each once.
    urls: Arc<[Url]>,
    /// Index of the control plane that answered last.
    current: usize,
    is_fixed: bool,
    /// Scheme of the URLs of addresses that are looked up.
    scheme: &'static str,
}

/// Result of the lookups of one locator.
#[derive(Clone, Debug)]
struct Part {
    locator: Locator,
    addresses: Vec<SocketAddr>,
    num_lookups: u64,
    /// Reason why the last lookup found nothing.
    reason: Option<String>,
}

impl Known {
    fn new(locators: Vec<Locator>, scheme: &'static str) -> Self {
        let is_fixed = locators.iter().all(|locator| matches!(locator, Locator::Url(_)));
        let parts = locators.into_iter().map(|locator| Part {
            locator,
            addresses: Vec::new(),
            num_lookups: 0,
            reason: None,
        });
        let mut known =
            Self { parts: parts.collect(), urls: Arc::from([]), current: 0, is_fixed, scheme };
        known.collect_urls();
        known
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { urls: self.urls.clone(), first: self.current }
    }

    fn position(&self, url: &Url) -> Option<usize> {
        self.urls.iter().position(|known| known == url)
    }

    fn collect_urls(&mut self) {
        let current = self.urls.get(self.current).cloned();
        let mut urls: Vec<Url> = Vec::new();
        for url in self.parts.iter().flat_map(|part| part.urls(self.scheme)) {
            if !urls.contains(&url) {
                urls.push(url);
            }
        }
        let is_looked_up = self.parts.iter().all(|part| !matches!(part.locator, Locator::Url(_)));
        self.urls = urls.into();
        let kept = current.and_then(|url| self.position(&url));
        // The order of addresses means nothing, so clients spread over them.
        self.current = kept.unwrap_or_else(|| match self.urls.len() {
            0 | 1 => 0,
            len if is_looked_up => rand::random_range(0..len),
            _ => 0,
        });
    }

    fn has_looked_up_since(&self, before: &Self) -> bool {
        let mut pairs = self.parts.iter().zip(&before.parts);
        pairs.all(|(now, then)| {
            matches!(now.locator, Locator::Url(_)) || now.num_lookups > then.num_lookups
        })
    }

    fn text(&self) -> String {
        let texts: Vec<String> = self.parts.iter().map(|part| part.locator.to_string()).collect();
        texts.join(",")
    }

    /// The reasons of all lookups that found nothing.
    fn reason(&self) -> Option<String> {
        let reasons: Vec<&str> =
            self.parts.iter().filter_map(|part| part.reason.as_deref()).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

impl Part {
    fn urls(&self, scheme: &str) -> Vec<Url> {
        match &self.locator {
            Locator::Url(url) => vec![url.clone()],
            _ => self.addresses.iter().filter_map(|address| url_of(scheme, *address)).collect(),
        }
    }
}

/// Takes the results of one locator's lookups.
#[derive(Clone, Debug)]
struct Report {
    known: Arc<watch::Sender<Known>>,
    part_idx: usize,
}

impl Report {
    /// Replaces the addresses.
    fn found(&self, addresses: Vec<SocketAddr>) {
        self.change(Some(addresses), None);
    }

    /// Removes all addresses: there is no control plane at present.
    #[cfg(feature = "kubernetes")]
    fn found_none(&self, reason: String) {
        self.change(Some(Vec::new()), Some(reason));
    }

    /// Keeps the addresses: the lookup failed.
    fn failed(&self, reason: String) {
        self.change(None, Some(reason));
    }

    fn change(&self, addresses: Option<Vec<SocketAddr>>, reason: Option<String>) {
        self.known.send_modify(|known| {
            let part = &mut known.parts[self.part_idx];
            part.num_lookups += 1;
            let locator = part.locator.to_string();
            match &reason {
                Some(reason) if part.reason.as_ref() != Some(reason) => {
                    warn!(%locator, reason, "control planes cannot be looked up");
                }
                Some(reason) => debug!(%locator, reason, "control planes cannot be looked up"),
                None => {}
            }
            part.reason = reason;
            let Some(mut addresses) = addresses else { return };
            addresses.sort_unstable();
            addresses.dedup();
            if part.addresses != addresses {
                info!(%locator, ?addresses, "control planes found");
                part.addresses = addresses;
                known.collect_urls();
            }
        });
    }
}

/// A running search. Dropping it ends the thread.
#[derive(Debug)]
struct Search {
    /// Number of requested lookups.
    refresh: watch::Sender<u64>,
    _stop: oneshot::Sender<()>,
}

impl Search {
    fn start(known: &Arc<watch::Sender<Known>>, backends: &Backends) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (refresh, refreshes) = watch::channel(0);
        let (stop_tx, stop) = oneshot::channel::<()>();
        let locators: Vec<Locator> =
            known.borrow().parts.iter().map(|part| part.locator.clone()).collect();
        let (known, backends) = (known.clone(), backends.clone());
        let body = move || {
            runtime.block_on(async {
                let mut tasks = JoinSet::new();
                for (part_idx, locator) in locators.into_iter().enumerate() {
                    let report = Report { known: known.clone(), part_idx };
                    spawn_lookups(&mut tasks, locator, report, &refreshes, &backends);
                }
                // Ends when the last client is dropped.
                let _ = stop.await;
            });
            // Do not wait for a lookup that hangs.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("switchyard-discovery".to_owned());
        thread.spawn(body)?;
        Ok(Self { refresh, _stop: stop_tx })
    }
}

fn spawn_lookups(
    tasks: &mut JoinSet<()>,
    locator: Locator,
    report: Report,
    refreshes: &watch::Receiver<u64>,
    backends: &Backends,
) {
    let refreshes = Refreshes(refreshes.clone());
    match locator {
        Locator::Url(_) => {}
        Locator::Dns { host, port } => {
            let resolver = backends.resolver.clone();
            tasks.spawn(dns::follow(host, port, resolver, report, refreshes));
        }
        #[cfg(feature = "kubernetes")]
        Locator::Service(service) => {
            let config = backends.kubernetes.clone();
            tasks.spawn(kubernetes::follow(service, config, report, refreshes));
        }
    }
}

/// Requests for a new lookup.
#[derive(Clone, Debug)]
struct Refreshes(watch::Receiver<u64>);

impl Refreshes {
    /// Says that a lookup begins, which answers all requests until now.
    fn begin(&mut self) -> Instant {
        self.0.mark_unchanged();
        Instant::now()
    }

    /// Waits for a request since the last call, and then until `earliest`, which bounds the rate of lookups.
    async fn next(&mut self, earliest: Instant) {
        if self.0.changed().await.is_err() {
            // The thread ends: nothing asks any more.
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until(earliest).await;
    }

    /// Waits up to `bound` for the next request, as [`next`](Self::next) does.
    async fn pause(&mut self, bound: Duration, earliest: Instant) {
        // A request that arrives late in the pause waits no longer than the pause itself.
        let _ = tokio::time::timeout(bound, self.next(earliest)).await;
    }
}

/// The text of a URL without the slash at its end.
pub(crate) fn text_of(url: &Url) -> &str {
    url.as_str().trim_end_matches('/')
}

/// `None` for an address that no URL can have, such as one with an IPv6 zone.
fn url_of(scheme: &str, address: SocketAddr) -> Option<Url> {
    Url::parse(&format!("{scheme}://{address}")).ok()
}
