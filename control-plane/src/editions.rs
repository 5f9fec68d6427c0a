//! The editions of the model that a fleet serves: one, and during an update a second one beside it.
//!
//! Each edition is a fleet of its own, with members, epochs, placement table and plans. A client is pinned to one
//! fingerprint and never compares the epochs of two editions. Requests of members go to the edition that knows the
//! member. A name belongs to one member of all editions: a server that restarts with the other model takes its name
//! along.
//!
//! ```text
//!   add ──▶ next ──switch──▶ current ──switch to another──▶ retiring ──no client left──▶ draining ──▶ forgotten
//!             └───────────────────────────abort─────────────────────────────────────────────▲
//! ```

mod book;
mod names;
mod requests;
mod run;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control_api::{
    AddModelRequest, ClientsReport, EditionInfo, EditionList, EditionState, MemberId, ModelClients,
    Severity, SwitchRequest,
};
use tokio::sync::{mpsc, watch};
use tracing::info;

use crate::boards::EditionBoard;
use crate::coordinator::{Context, Coordinator, OperationError};
use crate::events::EventLog;
use crate::fleet::{Fleet, FleetSettings};
use crate::store::editions::{EditionStore, EditionStores, Found};
use crate::store::{EditionRecord, Revision, Snapshot, Store, StoreError};
use crate::term::TermSettings;
use crate::tickets::{TicketOffice, TicketRecord, TicketSettings};
use book::{Book, Entry};
use names::Names;
pub(crate) use run::Term;
use run::Worker;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Editions {
    settings: TermSettings,
    stores: EditionStores,
    events: EventLog,
    /// Tickets are for the servers of all editions.
    tickets: Arc<TicketOffice>,
    /// The current edition first.
    editions: Mutex<Vec<Edition>>,
    /// One change of the editions, of the goals or of a drain at a time.
    changing: Arc<tokio::sync::Mutex<()>>,
    /// One registration of a name at a time.
    names: Names,
    /// Reports of control planes that follow, by reporter, with the time of each.
    followers: Mutex<HashMap<String, (Duration, Vec<ModelClients>)>>,
    /// Editions that were added, for the task that runs them.
    added: mpsc::UnboundedSender<Worker>,
}

/// One edition.
#[derive(Clone, Debug)]
struct Edition {
    entry: Entry,
    coordinator: Arc<Coordinator>,
    board: Arc<EditionBoard>,
    events: EventLog,
    /// Watches of clients at the last look.
    num_opened: u64,
    /// Ends the tasks of a forgotten edition.
    over: watch::Sender<bool>,
}

impl Edition {
    fn fingerprint(&self) -> Option<String> {
        self.coordinator.fingerprint().or_else(|| self.entry.record.fingerprint.clone())
    }
}

impl Editions {
    /// Restores the editions from the store. Blocks on the store.
    pub(crate) fn restore(
        settings: TermSettings,
        store: Box<dyn Store>,
    ) -> Result<Term, StoreError> {
        let (stores, mut found) = EditionStores::load(store)?;
        let events = EventLog::default();
        let tickets = Arc::new(open_tickets(&settings, &mut found)?);
        let declared: Vec<_> = found.iter().map(|found| found.record.fingerprint.clone()).collect();
        let boards = settings.boards.set(&declared);
        let (now, unix_ms) = (settings.clock.now(), unix_ms());
        let (added, new) = mpsc::unbounded_channel();
        let (mut editions, mut workers) = (Vec::new(), Vec::new());
        for (Found { record, snapshot, store, revision }, board) in found.into_iter().zip(boards) {
            let entry = Entry::restored(store.id(), record, now, unix_ms);
            let (settings, events, tickets) = (&settings, &events, &tickets);
            let start = Start { settings, events, tickets, snapshot, revision, board };
            let (edition, worker) = start.run(entry, store)?;
            editions.push(edition);
            workers.push(worker);
        }
        let editions = Self {
            settings,
            stores,
            events,
            tickets,
            editions: Mutex::new(editions),
            changing: Arc::default(),
            names: Names::default(),
            followers: Mutex::default(),
            added,
        };
        editions.label_events();
        Ok(Term::new(Arc::new(editions), workers, new))
    }

    /// The editions, the current one first.
    pub(crate) fn list(&self) -> EditionList {
        EditionList { editions: self.all().iter().map(|edition| self.info(edition)).collect() }
    }

    /// Accepts servers of another model. Durable when it returns. Goes on if the caller drops the future.
    pub(crate) async fn add(
        self: &Arc<Self>,
        request: &AddModelRequest,
    ) -> Result<EditionList, OperationError> {
        let request = request.clone();
        self.in_turn(move |editions| async move { editions.add_now(&request).await }).await
    }

    async fn add_now(&self, request: &AddModelRequest) -> Result<EditionList, OperationError> {
        let book = self.book();
        let pinned = self.settings.fleet.pinned_fingerprint.as_deref();
        match book.add(&request.fingerprint, pinned)? {
            book::Addition::Known => return Ok(self.list()),
            book::Addition::Revived(book) => self.change(book).await?,
            book::Addition::New(record) => self.start_edition(record).await?,
        }
        info!(fingerprint = request.fingerprint, "servers of another model may join");
        self.events.note(
            Severity::Info,
            format!("servers of the model {} may join beside the current one", request.fingerprint),
        );
        Ok(self.list())
    }

    /// Makes the next edition the current one, or plans that. Durable when it returns. Goes on if the caller drops the
    /// future.
    pub(crate) async fn switch(
        self: &Arc<Self>,
        request: &SwitchRequest,
    ) -> Result<EditionList, OperationError> {
        let request = request.clone();
        self.in_turn(move |editions| async move { editions.switch_or_plan(&request).await }).await
    }

    async fn switch_or_plan(&self, request: &SwitchRequest) -> Result<EditionList, OperationError> {
        let book = self.book();
        let planned = book.plan_switch(request)?;
        let next = self.next_edition().ok_or_else(book::no_next)?;
        let coverage = next.coordinator.coverage(planned.replicas);
        match (coverage.is_complete(), request.when_complete) {
            (true, _) => self.switch_now(&book, planned).await?,
            (false, true) => {
                self.change(book.with_planned_switch(planned)).await?;
                self.events.note(
                    Severity::Info,
                    "the model switches as soon as the next one is complete".to_owned(),
                );
            }
            (false, false) => {
                return Err(book::incomplete(&next.coordinator, coverage, planned).into());
            }
        }
        Ok(self.list())
    }

    /// Ends an update before its switch. Goes on if the caller drops the future.
    pub(crate) async fn abort(self: &Arc<Self>) -> Result<EditionList, OperationError> {
        self.in_turn(move |editions| async move { editions.abort_now().await }).await
    }

    async fn abort_now(&self) -> Result<EditionList, OperationError> {
        let book = self.book().abort()?;
        self.change(book).await?;
        let text = "the update of the model was aborted: its servers are drained";
        info!("{text}");
        self.events.note(Severity::Warn, text.to_owned());
        Ok(self.list())
    }

    /// Runs a change to its end as soon as no other one runs. A caller that goes away before that changes nothing, and
    /// leaves no task behind.
    async fn in_turn<T, F>(
        self: &Arc<Self>,
        change: impl FnOnce(Arc<Self>) -> F,
    ) -> Result<T, OperationError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, OperationError>> + Send + 'static,
    {
        let one = Arc::clone(&self.changing).lock_owned().await;
        let change = change(Arc::clone(self));
        to_end(async move {
            let _one = one;
            change.await
        })
        .await
    }

    /// Notes the clients of a control plane that follows.
    pub(crate) fn note_clients(&self, report: ClientsReport) -> EditionList {
        let now = self.now();
        let mut followers = lock(&self.followers);
        followers.retain(|_, (at, _)| now < *at + REPORT_LIFE);
        if followers.len() < MAX_FOLLOWERS || followers.contains_key(&report.reporter) {
            followers.insert(report.reporter, (now, report.clients));
        }
        drop(followers);
        self.list()
    }

    /// Starts an edition beside the current one.
    async fn start_edition(&self, record: EditionRecord) -> Result<(), OperationError> {
        let fingerprint = record.fingerprint.clone();
        let current = self.current();
        let mut snapshot = Snapshot::fresh(current.cluster_id());
        snapshot.goals = current.changed_goals();
        let (settings, events) = (self.settings.clone(), self.events.clone());
        let (stores, tickets) = (self.stores.clone(), Arc::clone(&self.tickets));
        let board = Arc::new(EditionBoard::new(fingerprint));
        let now = self.now();
        let start = tokio::task::spawn_blocking(move || {
            let (store, floor) = stores.add(record.clone());
            let entry = Entry::new(store.id(), record, now);
            let id = entry.id;
            let snapshot = Some(Snapshot { reserved_epoch: floor, ..snapshot });
            let (settings, events, tickets) = (&settings, &events, &tickets);
            let revision = Revision::default();
            let start = Start { settings, events, tickets, snapshot, revision, board };
            start.run(entry, store).inspect_err(|_| stores.take_back(id))
        });
        let started = start.await.map_err(|_| OperationError::ShuttingDown)?;
        let (edition, worker) =
            started.map_err(|err| OperationError::ReadOnly { reason: err.to_string() })?;
        edition.board.board.set_fresh(true);
        self.settings.boards.push(Arc::clone(&edition.board));
        lock(&self.editions).push(edition);
        self.label_events();
        // An error means that the term has ended.
        drop(self.added.send(worker));
        Ok(())
    }

    async fn switch_now(
        &self,
        book: &Book,
        planned: crate::store::PlannedSwitch,
    ) -> Result<(), OperationError> {
        let switched = book.switch(planned, self.now(), unix_ms())?;
        self.change(switched).await?;
        let [current, old] = &self.all()[..] else { return Ok(()) };
        // Like the first model of a fleet, the new one may be replaced once all of its members have gone.
        current.coordinator.pin_model(self.settings.fleet.pinned_fingerprint.clone());
        old.coordinator.pin_model(old.fingerprint());
        old.coordinator.show_in_gauges(false);
        current.coordinator.show_in_gauges(true);
        let (new, old) = (current.fingerprint(), old.fingerprint());
        info!(?new, ?old, "the current model has changed");
        let text = format!(
            "clients that start get the model {}; {} retires",
            new.as_deref().unwrap_or("?"),
            old.as_deref().unwrap_or("?")
        );
        self.events.note(Severity::Info, text);
        Ok(())
    }

    /// Makes the states of `book` durable, and then those of this process. Forgets editions that are not in the book.
    async fn change(&self, book: Book) -> Result<(), OperationError> {
        let records = book.records();
        let stores = self.stores.clone();
        let write = tokio::task::spawn_blocking(move || stores.change(&records)).await;
        let written = write.map_err(|_| OperationError::ShuttingDown)?;
        written.map_err(|err| OperationError::ReadOnly { reason: err.to_string() })?;
        let mut editions = lock(&self.editions);
        let mut old = std::mem::take(&mut *editions);
        for entry in book.entries {
            if let Some(at) = old.iter().position(|edition| edition.entry.id == entry.id) {
                editions.push(Edition { entry, ..old.remove(at) });
            }
        }
        let boards: Vec<_> = editions.iter().map(|edition| Arc::clone(&edition.board)).collect();
        drop(editions);
        self.settings.boards.replace(boards);
        self.label_events();
        for forgotten in old {
            forgotten.coordinator.end();
            forgotten.over.send_replace(true);
            self.current().keep_tickets();
        }
        self.show_metrics();
        Ok(())
    }

    fn info(&self, edition: &Edition) -> EditionInfo {
        let Entry { record, retire_by, .. } = &edition.entry;
        let is_retiring = record.state == EditionState::Retiring;
        let left = retire_by.filter(|_| is_retiring).map(|by| by.saturating_sub(self.now()));
        let mut info = edition.coordinator.edition_info(record.state);
        info.fingerprint = edition.fingerprint();
        info.num_clients = self.num_clients(edition);
        info.switches_when_complete = record.planned_switch.is_some();
        info.retires_within_ms = left.map(|left| left.as_millis() as u64);
        info
    }

    /// Clients that follow an edition, through this process or another one.
    fn num_clients(&self, edition: &Edition) -> u64 {
        let now = self.now();
        let fingerprint = edition.fingerprint();
        let followers = lock(&self.followers);
        let reports = followers.values().filter(|(at, _)| now < *at + REPORT_LIFE);
        let counts = reports.flat_map(|(_, clients)| clients);
        let counts = counts.filter(|clients| Some(&clients.fingerprint) == fingerprint.as_ref());
        let elsewhere = counts.fold(0u64, |sum, clients| sum.saturating_add(clients.num_clients));
        elsewhere.saturating_add(edition.board.num_clients())
    }

    /// True if a client follows the edition, or may be between two watches.
    fn may_have_clients(&self, edition: &Edition) -> bool {
        self.num_clients(edition) > 0
            || edition.board.num_opened() != edition.num_opened
            || self.now() < edition.entry.client_seen_at + self.client_grace()
    }

    /// A client between two watches counts for so long.
    fn client_grace(&self) -> Duration {
        (self.settings.lease_ttl * GRACE_LEASES).max(MIN_GRACE)
    }

    fn all(&self) -> Vec<Edition> {
        lock(&self.editions).clone()
    }

    fn book(&self) -> Book {
        let entries = self.all().into_iter().map(|edition| Entry {
            record: EditionRecord { fingerprint: edition.fingerprint(), ..edition.entry.record },
            ..edition.entry
        });
        Book { entries: entries.collect() }
    }

    /// The coordinator of the current edition.
    pub(crate) fn current(&self) -> Arc<Coordinator> {
        Arc::clone(&lock(&self.editions)[0].coordinator)
    }

    fn next_edition(&self) -> Option<Edition> {
        self.all().into_iter().find(|edition| edition.entry.record.state == EditionState::Next)
    }

    fn now(&self) -> Duration {
        self.settings.clock.now()
    }

    /// Puts the model in front of the texts of events while there are two.
    fn label_events(&self) {
        let editions = self.all();
        for edition in &editions {
            let fingerprint = edition.fingerprint().unwrap_or_default();
            let label = (editions.len() > 1).then(|| format!("model {fingerprint:.12}"));
            edition.events.set_label(label);
        }
    }

    fn show_metrics(&self) {
        let list = self.list().editions;
        let shown = if list.len() > 1 { &list[..] } else { &[] };
        self.settings.metrics.set_editions(shown);
    }
}

/// Everything that a new edition starts with.
struct Start<'a> {
    settings: &'a TermSettings,
    events: &'a EventLog,
    tickets: &'a Arc<TicketOffice>,
    snapshot: Option<Snapshot>,
    revision: Revision,
    board: Arc<EditionBoard>,
}

impl Start<'_> {
    /// Restores the fleet of an edition and starts its coordinator. Blocks on the store.
    fn run(self, entry: Entry, mut store: EditionStore) -> Result<(Edition, Worker), StoreError> {
        let TermSettings { fleet, planner, lease_ttl, clock, metrics, .. } = self.settings.clone();
        let is_current = entry.record.state == EditionState::Current;
        let pinned_fingerprint = match is_current {
            true => fleet.pinned_fingerprint,
            false => entry.record.fingerprint.clone(),
        };
        let settings = FleetSettings { pinned_fingerprint, ..fleet };
        let fleet = Fleet::new(settings, Box::new(planner), self.snapshot, clock.now());
        let (metrics, events) = (metrics.of_edition(is_current), self.events.of_edition());
        let context = Context {
            clock,
            lease_ttl,
            metrics,
            board: Arc::clone(&self.board.board),
            events: events.clone(),
            tickets: Arc::clone(self.tickets),
        };
        let (coordinator, revision) =
            Coordinator::start(fleet, &mut store, self.revision, context)?;
        let coordinator = Arc::new(coordinator);
        let (over, is_over) = watch::channel(false);
        let worker = Worker {
            coordinator: Arc::clone(&coordinator),
            store: Box::new(store),
            revision,
            is_over,
        };
        let num_opened = self.board.num_opened();
        Ok((Edition { entry, coordinator, board: self.board, events, num_opened, over }, worker))
    }
}

/// Opens the office of tickets with the keys of all editions. Names the cluster of an empty store.
fn open_tickets(settings: &TermSettings, found: &mut [Found]) -> Result<TicketOffice, StoreError> {
    let mut record = TicketRecord::default();
    let mut has_servers = false;
    let mut cluster_id = String::new();
    for Found { snapshot, .. } in found.iter_mut().rev() {
        let fresh = || Snapshot::fresh(MemberId::random().to_string());
        let snapshot = snapshot.get_or_insert_with(fresh);
        snapshot.tickets.join(&record);
        record = snapshot.tickets.clone();
        has_servers |= !snapshot.members.is_empty();
        cluster_id.clone_from(&snapshot.cluster_id);
    }
    let ticket_settings = TicketSettings::new(settings.ticket_life, settings.lease_ttl);
    let (now, wall) = (settings.clock.now(), SystemTime::now().into());
    let office = TicketOffice::open(&cluster_id, record, ticket_settings, has_servers, now, wall);
    office.map_err(|err| StoreError::Io {
        operation: "make a key for tickets of",
        path: cluster_id.into(),
        source: std::io::Error::other(err),
    })
}

/// Runs a change to its end, also when the caller goes away: the store and this process must not differ.
async fn to_end<T: Send + 'static>(
    change: impl Future<Output = Result<T, OperationError>> + Send + 'static,
) -> Result<T, OperationError> {
    tokio::spawn(change).await.map_err(|_| OperationError::ShuttingDown)?
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

impl From<book::UpdateRefusal> for OperationError {
    fn from(refusal: book::UpdateRefusal) -> Self {
        Self::Update(refusal.0)
    }
}

const GRACE_LEASES: u32 = 5;
/// A client reconnects within 2 s, and a control plane that restarts needs some time itself.
const MIN_GRACE: Duration = Duration::from_secs(5);
/// A control plane that lost the leader serves its clients for 10 s, and they reconnect within a few more.
const REPORT_LIFE: Duration = Duration::from_secs(15);
/// Control planes whose reports of clients are kept.
const MAX_FOLLOWERS: usize = 64;
