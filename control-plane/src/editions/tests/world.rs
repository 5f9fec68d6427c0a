//! A control plane in virtual time, on a disk that can be full or slow.

use std::future::Future;
use std::sync::Condvar;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{io, mem};

use control_api::{
    Assignment, LeaseRequest, MemberId, ModelDescriptor, ReadyRequest, RegisterRequest,
};
use tokio::task::JoinSet;

use super::*;
use crate::balance::BalanceSettings;
use crate::boards::{Boards, CountedClient};
use crate::clock::ManualClock;
use crate::metrics::Metrics;
use crate::planner::BalancedPlanner;
use crate::store::MemoryStore;

const PERIOD: Duration = Duration::from_millis(100);

/// A store in memory that can be full or slow.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    pub(super) inner: MemoryStore,
    pub(super) is_full: Arc<AtomicBool>,
    /// The disk is full after so many more writes.
    pub(super) full_after: Arc<Mutex<Option<u32>>>,
    pub(super) gate: Arc<Gate>,
}

/// Makes writes wait.
#[derive(Debug, Default)]
pub(super) struct Gate {
    pub(super) is_shut: Mutex<bool>,
    pub(super) opened: Condvar,
    pub(super) has_waiter: AtomicBool,
}

impl Gate {
    pub(super) fn shut(&self) {
        self.has_waiter.store(false, Ordering::Relaxed);
        *lock(&self.is_shut) = true;
    }

    pub(super) fn open(&self) {
        *lock(&self.is_shut) = false;
        self.opened.notify_all();
    }

    /// Waits until the gate is open.
    pub(super) fn pass(&self) {
        let is_shut = lock(&self.is_shut);
        self.has_waiter.fetch_or(*is_shut, Ordering::Relaxed);
        let (is_shut, _) =
            self.opened.wait_timeout_while(is_shut, BOUND, |is_shut| *is_shut).unwrap();
        assert!(!*is_shut, "the gate stays shut");
    }
}

impl Store for Disk {
    fn kind(&self) -> &'static str {
        "disk"
    }

    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError> {
        self.inner.load()
    }

    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError> {
        self.gate.pass();
        match lock(&self.full_after).as_mut() {
            Some(0) => self.is_full.store(true, Ordering::Relaxed),
            Some(left) => *left -= 1,
            None => {}
        }
        if self.is_full.load(Ordering::Relaxed) {
            let source = io::ErrorKind::StorageFull.into();
            return Err(StoreError::Full { path: "disk".into(), source });
        }
        self.inner.save(snapshot, expected)
    }

    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
        self.inner.reserve_epoch(epoch)
    }
}

/// A server that renews its lease until it ends.
pub(super) struct Server {
    pub(super) name: String,
    pub(super) incarnation: u64,
    pub(super) id: MemberId,
    pub(super) holds: Assignment,
}

pub(super) fn settings(
    lease_ttl: Duration,
    clock: &Arc<ManualClock>,
    boards: &Arc<Boards>,
) -> TermSettings {
    let fleet = FleetSettings {
        lease_ttl,
        suspect_grace: Duration::from_millis(300),
        expired_retention: Duration::from_secs(60),
        max_members: 16,
        pinned_fingerprint: None,
        balance: None,
        target_share: 0.6,
    };
    TermSettings {
        fleet,
        planner: Arc::new(BalancedPlanner::new(2, 1).unwrap()),
        lease_ttl,
        ticket_life: Duration::from_secs(600),
        clock: Arc::clone(clock) as Arc<dyn Clock>,
        metrics: Metrics::new(0).unwrap(),
        boards: Arc::clone(boards),
    }
}

/// A control plane on a disk that survives it.
pub(super) struct World {
    pub(super) disk: Disk,
    pub(super) clock: Arc<ManualClock>,
    pub(super) boards: Arc<Boards>,
    pub(super) editions: Arc<Editions>,
    /// Writers of the store.
    pub(super) tasks: JoinSet<()>,
    pub(super) servers: Vec<Server>,
}

impl World {
    pub(super) fn new() -> Self {
        Self::start(Disk::default(), Arc::new(ManualClock::new()), Vec::new(), None)
    }

    /// A control plane whose placement follows the load.
    pub(super) fn elastic() -> Self {
        let balance = Some(BalanceSettings::default());
        Self::start(Disk::default(), Arc::new(ManualClock::new()), Vec::new(), balance)
    }

    pub(super) fn start(
        disk: Disk,
        clock: Arc<ManualClock>,
        servers: Vec<Server>,
        balance: Option<BalanceSettings>,
    ) -> Self {
        let boards = Arc::new(Boards::new());
        let mut settings = settings(TTL, &clock, &boards);
        settings.fleet.balance = balance;
        let term = Editions::restore(settings.clone(), Box::new(disk.clone())).unwrap();
        boards.set_fresh(true);
        let Term { editions, workers, mut added } = term;
        let mut tasks = JoinSet::new();
        workers.into_iter().for_each(|worker| drop(tasks.spawn(write(worker))));
        tasks.spawn(async move {
            let mut writers = JoinSet::new();
            while let Some(worker) = added.recv().await {
                writers.spawn(write(worker));
            }
        });
        Self { disk, clock, boards, editions, tasks, servers }
    }

    /// Kills the control plane and starts another one on the same disk.
    pub(super) async fn restart(self) -> Self {
        let Self { disk, clock, boards, editions, mut tasks, servers } = self;
        let balance = editions.settings.fleet.balance;
        tasks.shutdown().await;
        drop((editions, boards));
        // Writes that the end has cut off hold the disk until they are done.
        let is_still = async {
            while Arc::strong_count(&disk.gate) > 1 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(BOUND, is_still).await.expect("the last process has ended");
        let world = Self::start(disk, clock, servers, balance);
        world.servers.iter().for_each(|server| world.renew(server).unwrap());
        world
    }

    /// Ends the process in the middle of a step of the update, while the store writes, and starts another one.
    pub(super) async fn cut_off(self) -> Self {
        self.disk.gate.shut();
        let (_running, stopping) = watch::channel(false);
        tokio::select! {
            () = self.editions.run_update(stopping) => {}
            blocked = tokio::time::timeout(BOUND, self.is_blocked()) => blocked.unwrap(),
        }
        self.disk.gate.open();
        self.restart().await
    }

    pub(super) async fn register(
        &self,
        name: &str,
        fingerprint: &str,
    ) -> Result<Server, OperationError> {
        let mut request = RegisterRequest::new(name, "127.0.0.1:1", model(fingerprint));
        request.incarnation = rand::random();
        self.register_as(request).await
    }

    pub(super) async fn register_as(
        &self,
        request: RegisterRequest,
    ) -> Result<Server, OperationError> {
        let (name, incarnation) = (request.name.clone(), request.incarnation);
        let response = self.editions.register(request, None).await?;
        let (id, holds) = (response.member_id, response.assignment);
        let ready = ReadyRequest { incarnation, holds: holds.clone() };
        self.editions.ready(&id, ready).unwrap();
        Ok(Server { name, incarnation, id, holds })
    }

    pub(super) async fn serve(&mut self, name: &str, fingerprint: &str) {
        let server = self.register(name, fingerprint).await.unwrap();
        self.servers.retain(|old| old.name != name);
        self.servers.push(server);
    }

    pub(super) async fn serve_all(&mut self, prefix: &str, fingerprint: &str) {
        for idx in 0..2 {
            self.serve(&format!("{prefix}-{idx}"), fingerprint).await;
        }
    }

    pub(super) fn renew(&self, server: &Server) -> Result<(), OperationError> {
        let request =
            LeaseRequest { incarnation: server.incarnation, assignment_version: 1, load: None };
        let response = self.editions.renew(&server.id, request)?;
        if response.state == control_api::MemberState::Loading {
            // The report was lost with an earlier control plane.
            let (incarnation, holds) = (server.incarnation, server.holds.clone());
            self.editions.ready(&server.id, ReadyRequest { incarnation, holds })?;
        }
        Ok(())
    }

    /// Lets time pass. Servers that are alive renew.
    pub(super) async fn pass(&self, time: Duration) {
        for _ in 0..time.as_millis() / PERIOD.as_millis() {
            self.wait(PERIOD);
            // A full disk delays a step.
            drop(self.editions.step().await);
        }
    }

    /// As [`pass`](Self::pass), without a step of the update.
    pub(super) fn wait(&self, time: Duration) {
        let end = self.clock.now() + time;
        while self.clock.now() < end {
            self.servers.iter().for_each(|server| self.renew(server).unwrap());
            self.clock.advance(PERIOD);
            self.editions.all().iter().for_each(|edition| edition.coordinator.tick_once(PERIOD));
        }
    }

    pub(super) fn leave(&mut self, prefix: &str) {
        let (gone, kept) = mem::take(&mut self.servers)
            .into_iter()
            .partition::<Vec<_>, _>(|server| server.name.starts_with(prefix));
        self.servers = kept;
        gone.iter().for_each(|server| self.editions.leave(&server.id).unwrap());
    }

    pub(super) async fn add(&self, fingerprint: &str) -> Result<EditionList, OperationError> {
        self.editions.add(&AddModelRequest { fingerprint: fingerprint.to_owned() }).await
    }

    pub(super) async fn switch(&self) -> Result<EditionList, OperationError> {
        self.editions.switch(&SwitchRequest::default()).await
    }

    /// Drops the future of a change while the store writes, and waits until no change runs any more.
    pub(super) async fn interrupt<T>(
        &self,
        change: impl Future<Output = Result<T, OperationError>>,
    ) {
        self.disk.gate.shut();
        tokio::select! {
            ended = change => panic!("the store does not block: {:?}", ended.map(|_| ())),
            blocked = tokio::time::timeout(BOUND, self.is_blocked()) => blocked.unwrap(),
        }
        self.disk.gate.open();
        drop(self.editions.changing.lock().await);
    }

    /// Waits until a change waits for the store.
    pub(super) async fn is_blocked(&self) {
        while !self.disk.gate.has_waiter.load(Ordering::Relaxed)
            || self.editions.changing.try_lock().is_ok()
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(super) fn follow(&self, fingerprint: Option<&str>) -> Option<CountedClient> {
        self.boards.of(fingerprint).map(|edition| edition.count_client())
    }

    pub(super) fn states(&self) -> Vec<(String, EditionState)> {
        let list = self.editions.list().editions.into_iter();
        list.map(|info| (info.fingerprint.unwrap_or_default(), info.state)).collect()
    }

    pub(super) fn expect(&self, expected: &[(&str, EditionState)]) {
        let expected: Vec<_> =
            expected.iter().map(|&(text, state)| (text.to_owned(), state)).collect();
        assert_eq!(self.states(), expected);
    }

    pub(super) fn names(&self) -> Vec<(String, String)> {
        let members = self.editions.members().into_iter();
        members.map(|info| (info.name, info.fingerprint.unwrap_or_default())).collect()
    }
}

/// Writes the store until the task is aborted.
pub(super) async fn write(worker: Worker) {
    let Worker { coordinator, store, revision, mut is_over } = worker;
    let (_running, stopping) = watch::channel(false);
    tokio::select! {
        outcome = coordinator.run_writer(store, revision, stopping) => outcome.unwrap(),
        _ = is_over.wait_for(|&is_over| is_over) => {}
    }
}

pub(super) fn model(fingerprint: &str) -> ModelDescriptor {
    ModelDescriptor {
        fingerprint: fingerprint.to_owned(),
        architecture: "qwen3_moe".to_owned(),
        hidden: 256,
        moe_layers: vec![0, 1, 3],
        num_experts: 8,
        top_k: 2,
    }
}

pub(super) async fn refused<T>(
    request: impl Future<Output = Result<T, OperationError>>,
    words: &[&str],
) {
    let Err(err) = request.await else { panic!("{words:?} was not refused") };
    let text = err.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert!(!text.contains('\n'), "{text}");
}
