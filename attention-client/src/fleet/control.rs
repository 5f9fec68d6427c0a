//! The control task of a client: it follows the placement, runs a connector for every lane and server, and reports
//! suspect servers to the control plane. Nothing here is on the path of a call.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::{
    ControlClient, ModelDescriptor, PlacementTable, PlacementWatch, SuspectRequest, WatchOptions,
};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::{Id, JoinSet};
use tokio::time::timeout;

use super::command::{Command, Directive};
use super::connector::Connector;
use super::lane_port::LanePort;
use super::link::Server;
use super::placement::{Change, Registry, Routing};
use super::shared::Shared;
use crate::error::BuildError;
use crate::model::{difference, is_known};

/// The source of placement tables.
pub(crate) enum TableSource {
    Watch(watch::Receiver<Arc<PlacementTable>>),
    ControlPlane,
}

/// Ends the control side when dropped.
#[derive(Debug)]
pub(crate) struct Control {
    stop: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Control {
    pub fn start(
        shared: &Arc<Shared>,
        commands: mpsc::UnboundedReceiver<Command>,
        tables: TableSource,
        control: Option<ControlClient>,
        max_lanes: usize,
        runtime: Option<&Handle>,
    ) -> Result<Self, BuildError> {
        let (stop, stopped) = watch::channel(false);
        let task = Task {
            descriptor: shared.model.descriptor(),
            registry: Registry::new(max_lanes),
            shared: Arc::clone(shared),
            lanes: Vec::new(),
            members: HashMap::new(),
            connectors: JoinSet::new(),
            owners: HashMap::new(),
            control,
        };
        let thread = match runtime {
            Some(handle) => {
                let feed = task.follow(tables, handle)?;
                handle.spawn(task.run(commands, feed, stopped));
                None
            }
            None => {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .map_err(BuildError::Thread)?;
                let feed = task.follow(tables, runtime.handle())?;
                let thread = std::thread::Builder::new()
                    .name("sy-client-ctl".to_owned())
                    .spawn(move || {
                        runtime.block_on(task.run(commands, feed, stopped));
                        // Threads that free GPU memory wait for kernels. They go on after this wait.
                        runtime.shutdown_timeout(MAX_STOP);
                    })
                    .map_err(BuildError::Thread)?;
                Some(thread)
            }
        };
        Ok(Self { stop, thread })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            // The thread ends within twice MAX_STOP. Its panic, if any, was logged by the panic hook.
            let _ = thread.join();
        }
    }
}

/// A server and its connectors.
struct Member {
    server: Arc<Server>,
    directive: watch::Sender<Directive>,
    num_connectors: usize,
    suspected_at: Option<Instant>,
}

struct Task {
    shared: Arc<Shared>,
    descriptor: ModelDescriptor,
    registry: Registry,
    lanes: Vec<LanePort>,
    /// By uid: servers in the placement, and servers that left and still have connectors.
    members: HashMap<u64, Member>,
    connectors: JoinSet<()>,
    owners: HashMap<Id, u64>,
    control: Option<ControlClient>,
}

/// Placement tables, and the watch that fetches them if they come from the control plane.
struct PlacementFeed {
    tables: watch::Receiver<Arc<PlacementTable>>,
    watch: Option<PlacementWatch>,
}

impl Task {
    fn follow(&self, tables: TableSource, handle: &Handle) -> Result<PlacementFeed, BuildError> {
        match (tables, &self.control) {
            (TableSource::Watch(tables), _) => Ok(PlacementFeed { tables, watch: None }),
            (TableSource::ControlPlane, Some(control)) => {
                let mut options = WatchOptions::default();
                let fingerprint = &self.descriptor.fingerprint;
                options.fingerprint = is_known(fingerprint).then(|| fingerprint.clone());
                let watch = PlacementWatch::spawn(control, handle, options)?;
                Ok(PlacementFeed { tables: watch.tables(), watch: Some(watch) })
            }
            (TableSource::ControlPlane, None) => Err(BuildError::NoPlacement),
        }
    }

    async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Command>,
        PlacementFeed { mut tables, watch }: PlacementFeed,
        mut stopped: watch::Receiver<bool>,
    ) {
        // Before the first connection asks for one.
        let tickets = self.control.clone().map(|control| {
            let shared = Arc::clone(&self.shared);
            tokio::spawn(async move {
                if let Some(tickets) = &shared.tickets {
                    tickets.run(control, shared.settings.name.clone()).await;
                }
            })
        });
        let mut state = watch.as_ref().map(PlacementWatch::state);
        self.apply(&tables.borrow_and_update().clone());
        let mut tables_open = true;
        loop {
            tokio::select! {
                _ = stopped.wait_for(|stopped| *stopped) => break,
                changed = tables.changed(), if tables_open => match changed {
                    Ok(()) => self.apply(&tables.borrow_and_update().clone()),
                    Err(_) => tables_open = false,
                },
                () = changed(&mut state) => {
                    let error = state.as_ref().and_then(|s| s.borrow().last_error.clone());
                    self.note_problem(error.map(|error| format!("no placement yet: {error}")));
                }
                Some(command) = commands.recv() => match command {
                    Command::AddLane(lane) => self.add_lane(lane),
                    Command::Suspect { server, reason } => self.suspect(&server, reason),
                },
                Some(ended) = self.connectors.join_next_with_id() => {
                    let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                    self.connector_ended(id);
                }
            }
        }
        if let Some(tickets) = tickets {
            tickets.abort();
        }
        for member in self.members.values() {
            member.directive.send_replace(Directive::Stop);
        }
        let all_ended = async { while self.connectors.join_next().await.is_some() {} };
        let _ = timeout(MAX_STOP, all_ended).await;
        // Connectors that are left free their memory while the runtime still has threads for it.
        self.connectors.shutdown().await;
    }

    fn apply(&mut self, table: &PlacementTable) {
        if let Some(model) = &table.model {
            if let Some(difference) = difference(model, &self.descriptor) {
                let problem = format!("the placement is for another model: {difference}");
                tracing::error!(problem, "placement ignored");
                self.note_problem(Some(problem));
                return;
            }
            // A client that does not know its fingerprint stays with the first one that it sees.
            self.descriptor.fingerprint.clone_from(&model.fingerprint);
        }
        let Change { routing, joined, left } = self.registry.apply(table, &self.descriptor);
        tracing::debug!(
            epoch = routing.epoch,
            servers = routing.servers.len(),
            joined = joined.len(),
            left = left.len(),
            "placement in force"
        );
        self.shared.metrics.placement_epoch.set(routing.epoch.cast_signed());
        self.shared.routing.store(Arc::new(routing));
        for server in joined {
            let member = Member {
                directive: watch::channel(Directive::Serve).0,
                server,
                num_connectors: 0,
                suspected_at: None,
            };
            let uid = member.server.uid;
            self.members.insert(uid, member);
            for lane in 0..self.lanes.len() {
                self.spawn(uid, lane, false);
            }
        }
        for server in left {
            if let Some(member) = self.members.get(&server.uid) {
                member.directive.send_replace(Directive::Drain);
                self.forget_if_idle(server.uid);
            }
        }
        for lane in &self.lanes {
            lane.events.notify();
        }
    }

    /// Puts the reason why there is no placement into error messages, as long as there is none.
    fn note_problem(&self, problem: Option<String>) {
        let current = self.shared.routing.load();
        if current.servers.is_empty() {
            let mut routing = Routing::empty(&self.descriptor);
            routing.epoch = current.epoch;
            routing.problem = problem;
            self.shared.routing.store(Arc::new(routing));
            self.lanes.iter().for_each(|lane| lane.events.notify());
        }
    }

    fn add_lane(&mut self, lane: LanePort) {
        let serving = |member: &&Member| *member.directive.borrow() == Directive::Serve;
        let uids: Vec<u64> =
            self.members.values().filter(serving).map(|member| member.server.uid).collect();
        lane.gate.expect(uids.len());
        lane.events.notify();
        self.lanes.push(lane);
        for uid in uids {
            self.spawn(uid, self.lanes.len() - 1, true);
        }
    }

    fn spawn(&mut self, uid: u64, lane: usize, initial: bool) {
        let Some(member) = self.members.get_mut(&uid) else { return };
        member.num_connectors += 1;
        let connector = Connector {
            shared: Arc::clone(&self.shared),
            server: Arc::clone(&member.server),
            lane: self.lanes[lane].clone(),
            directive: member.directive.subscribe(),
            fallback: member.server.fallback.of_one(),
            initial,
            suspect_transport: None,
        };
        let task = self.connectors.spawn(connector.run());
        self.owners.insert(task.id(), uid);
    }

    fn connector_ended(&mut self, id: Id) {
        let Some(uid) = self.owners.remove(&id) else { return };
        if let Some(member) = self.members.get_mut(&uid) {
            member.num_connectors -= 1;
            self.forget_if_idle(uid);
        }
    }

    fn forget_if_idle(&mut self, uid: u64) {
        let Some(member) = self.members.get(&uid) else { return };
        if member.num_connectors == 0 && *member.directive.borrow() != Directive::Serve {
            self.registry.recycle(&member.server);
            self.members.remove(&uid);
        }
    }

    /// Reports a server to the control plane, at most once a second. A server that left the placement is not
    /// reported.
    fn suspect(&mut self, server: &Server, reason: String) {
        let Some(member) = self.members.get_mut(&server.uid) else { return };
        let recently = member.suspected_at.is_some_and(|at| at.elapsed() < SUSPECT_PAUSE);
        if recently || *member.directive.borrow() != Directive::Serve {
            return;
        }
        member.suspected_at = Some(Instant::now());
        tracing::info!(server = server.name(), reason, "suspect");
        let Some(control) = self.control.clone() else { return };
        self.shared.metrics.suspects.inc();
        let request = SuspectRequest {
            reporter: self.shared.settings.name.clone(),
            reason,
            incarnation: Some(server.entry.incarnation),
        };
        let member_id = server.entry.member_id.clone();
        tokio::spawn(async move {
            // The client's own timeout bounds the request. A report that is lost is no loss: a dead server's lease
            // expires anyway.
            if let Err(error) = control.suspect(&member_id, &request).await {
                tracing::debug!(%member_id, %error, "the control plane did not accept the report");
            }
        });
    }
}

/// Completes when the state changes. Never completes without a state, or once its sender is gone.
async fn changed<T>(state: &mut Option<watch::Receiver<T>>) {
    if let Some(receiver) = state {
        if receiver.changed().await.is_ok() {
            return;
        }
        *state = None;
    }
    std::future::pending().await
}

const MAX_STOP: Duration = Duration::from_secs(1);
const SUSPECT_PAUSE: Duration = Duration::from_secs(1);
