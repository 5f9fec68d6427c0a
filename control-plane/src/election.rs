//! Control planes that share one etcd: one of them leads, the others follow it and take over.
//!
//! The election is etcd's. A leader holds a lease of etcd and the key of its candidacy; every write of the store
//! compares that key. A candidate waits in etcd's call, and lists the candidates again after a time of its own, because
//! a watch may hang.
//!
//! A leader whose lease cannot be renewed goes on with what it knows, without writes: as long as etcd has no quorum no
//! other control plane can be elected. It steps down as soon as etcd or another control plane says that one was.

mod follow;
mod session;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use control_api::{ClientOptions, ConfigError as ClientError, ControlClient};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};
use trust::tls::Security;

use crate::editions::Editions;
use crate::role::{Following, Role, Roles};
use crate::store::StoreError;
use crate::store::etcd::{ELECTION, EtcdClient, EtcdError, EtcdStore, Fence};
use crate::term::TermSettings;
use session::Session;

/// Takes part in the election until shutdown.
#[derive(Debug)]
pub(crate) struct Election {
    pub(crate) client: Arc<EtcdClient>,
    /// Prefix of all keys; ends with a slash.
    pub(crate) prefix: String,
    /// Time to live of the leader's lease.
    pub(crate) lease_ttl: Duration,
    /// URL at which other control planes reach this one.
    pub(crate) own_url: String,
    /// Token of the cluster.
    pub(crate) token: Option<String>,
    /// For control planes that know no newer one.
    pub(crate) previous_token: Option<String>,
    pub(crate) security: Security,
    pub(crate) settings: TermSettings,
    pub(crate) roles: Roles,
}

/// Reason why a term ended before shutdown.
enum Loss {
    /// etcd has ended the lease.
    Lease,
    /// Another control plane leads.
    Successor { url: String, term: u64 },
}

impl Election {
    /// Follows, and leads when elected. Once `stopping` turns true no member expires any more. Returns after
    /// `writer_stopping` has turned true, the last change was written, and the leadership was given up.
    ///
    /// # Errors
    /// [`StoreError`] when the stored state cannot be used at the start. A store that does not answer is no error, and
    /// neither is one that turns bad later: its state may come back.
    pub(crate) async fn run(
        self,
        stopping: watch::Receiver<bool>,
        writer_stopping: watch::Receiver<bool>,
    ) -> Result<(), StoreError> {
        let mut session = Session::default();
        // True once this process has led or followed: then the store was good, and it waits for a good one again.
        let mut has_served = false;
        loop {
            let mut stopped = stopping.clone();
            let fence = tokio::select! {
                fence = self.campaign(&mut session) => fence,
                never = self.follow() => match never {},
                () = httpd::stopped(&mut stopped) => {
                    self.give_up(&session).await;
                    return Ok(());
                }
            };
            has_served |= matches!(
                self.roles.current(),
                Role::Follower(Following { leader_url: Some(_), .. })
            );
            let led = self.lead(&mut session, fence, &mut has_served, &stopping, &writer_stopping);
            let outcome = led.await;
            self.step_down();
            match outcome {
                Ok(None) => {
                    self.give_up(&session).await;
                    info!("the leadership was given up");
                    return Ok(());
                }
                Ok(Some(Loss::Lease)) => warn!("the lease has ended: this control plane follows"),
                Ok(Some(Loss::Successor { url, term })) => {
                    warn!(url, "another control plane leads: this one follows");
                    let leader_url = Some(url);
                    self.roles.set(Role::Follower(Following { leader_url, term, problem: None }));
                }
                Err(StoreError::Deposed | StoreError::Conflict { .. }) => {
                    warn!("another control plane writes the store: this one follows");
                    // The key of this session would otherwise stand before the next campaign's.
                    self.give_up(&session).await;
                }
                Err(StoreError::Etcd(err)) => {
                    self.note_problem(&err);
                    self.give_up(&session).await;
                    sleep(RETRY).await;
                }
                Err(err) => {
                    self.give_up(&session).await;
                    if !has_served {
                        return Err(err);
                    }
                    self.note_problem(&err);
                    sleep(STORE_RETRY).await;
                }
            }
            session = Session::default();
        }
    }

    /// Waits until this process is elected.
    async fn campaign(&self, session: &mut Session) -> Fence {
        loop {
            match self.attempt(session).await {
                Ok(Some(fence)) => return fence,
                Ok(None) => {}
                Err(err) => {
                    self.note_problem(&err);
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// Leads until shutdown (`None`) or the loss of the leadership. Sets `has_led` once it has taken the state over.
    async fn lead(
        &self,
        session: &mut Session,
        fence: Fence,
        has_led: &mut bool,
        stopping: &watch::Receiver<bool>,
        writer_stopping: &watch::Receiver<bool>,
    ) -> Result<Option<Loss>, StoreError> {
        let term = fence.create_revision as u64;
        let client = Arc::clone(&self.client);
        let store = EtcdStore::new(client, &self.prefix, Handle::current(), Some(fence));
        let settings = self.settings.clone();
        let work = async {
            let begin =
                tokio::task::spawn_blocking(move || Editions::restore(settings, Box::new(store)));
            // A panic, or the runtime shuts down.
            let begun = begin.await.map_err(|_| StoreError::Deposed)??;
            *has_led = true;
            let editions = Arc::clone(&begun.editions);
            let metrics = &self.settings.metrics;
            metrics.leader.set(1);
            metrics.terms.inc();
            self.roles.set(Role::Leader { editions: Arc::clone(&editions), term });
            self.settings.boards.set_fresh(true);
            info!(term, epoch = editions.status().epoch, "this control plane leads");
            begun.run(stopping.clone(), writer_stopping.clone()).await
        };
        tokio::select! {
            outcome = work => outcome.map(|()| None),
            loss = self.keep(session, term) => Ok(Some(loss)),
        }
    }

    /// Renews the lease of the leader. Returns when the leadership is lost.
    async fn keep(&self, session: &mut Session, term: u64) -> Loss {
        let period = self.lease_ttl / 3;
        // The first look at the others comes before etcd can be lost.
        let mut pause = Duration::ZERO;
        let mut seen: HashMap<String, Instant> = HashMap::new();
        loop {
            sleep(pause).await;
            match self.renew(session, period).await {
                Ok(()) => {
                    pause = period;
                    self.note_outage(None);
                    // An error only means that the list stays as it is.
                    if let Ok(candidates) = self.candidates(period).await {
                        // A follower is missing for a moment whenever it campaigns anew.
                        let now = Instant::now();
                        seen.extend(candidates.into_iter().map(|candidate| (candidate.url, now)));
                        seen.retain(|url, at| {
                            *url != self.own_url && now - *at < REMEMBERED_LEASES * self.lease_ttl
                        });
                        let mut others: Vec<String> = seen.keys().cloned().collect();
                        others.sort_unstable();
                        self.roles.set_others(others);
                    }
                }
                Err(EtcdError::LeaseNotFound) => return Loss::Lease,
                Err(err) => {
                    pause = RETRY;
                    self.settings.metrics.election_errors.inc();
                    if session.confirmed_until() > Instant::now() + period {
                        continue;
                    }
                    self.note_outage(Some(&err.to_string()));
                    if let Some(loss) = self.find_successor(term).await {
                        return loss;
                    }
                }
            }
        }
    }

    /// Asks the other control planes whether one of them leads in a later term.
    async fn find_successor(&self, term: u64) -> Option<Loss> {
        let others = self.roles.group().others;
        let mut answers: FuturesUnordered<_> = others
            .into_iter()
            .filter_map(|url| self.client_of(&url).ok().map(|client| (url, client)))
            .map(|(url, client)| async move { (url, client.leader().await) })
            .collect();
        while let Some((url, answer)) = answers.next().await {
            if let Ok(info) = answer
                && info.leads
                && info.term > term
            {
                return Some(Loss::Successor { url, term: info.term });
            }
        }
        None
    }

    fn client_of(&self, url: &str) -> Result<ControlClient, ClientError> {
        let mut options = ClientOptions::default();
        (options.timeout, options.security) = (PEER_TIMEOUT, self.security.clone());
        let client = ControlClient::with_options(url, self.token.clone(), options)?;
        match &self.previous_token {
            Some(token) => client.with_fallback_token(token),
            None => Ok(client),
        }
    }

    fn step_down(&self) {
        if let Role::Leader { editions, .. } = self.roles.current() {
            editions.end();
        }
        let metrics = &self.settings.metrics;
        metrics.leader.set(0);
        metrics.forget_fleet();
        self.roles.set(Role::Follower(Following::default()));
    }

    fn note_outage(&self, reason: Option<&str>) {
        if let Role::Leader { editions, .. } = self.roles.current() {
            editions.note_outage(reason);
        }
    }

    /// Notes why no leader can be elected or found.
    fn note_problem(&self, err: &impl std::fmt::Display) {
        self.settings.metrics.election_errors.inc();
        let Role::Follower(mut following) = self.roles.current() else { return };
        let problem = Some(err.to_string());
        if following.problem != problem {
            error!(error = %err, "cannot lead or follow");
            following.problem = problem;
            self.roles.set(Role::Follower(following));
        }
    }

    /// Name of the election in etcd.
    fn name(&self) -> String {
        format!("{}{}", self.prefix, ELECTION.trim_end_matches('/'))
    }
}

const RETRY: Duration = Duration::from_millis(300);
/// Time between two attempts to lead with a store whose contents cannot be used.
const STORE_RETRY: Duration = Duration::from_secs(2);
/// Leases for which another control plane is remembered that is on no list any more.
const REMEMBERED_LEASES: u32 = 10;
const PEER_TIMEOUT: Duration = Duration::from_millis(500);
