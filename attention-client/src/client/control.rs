//! The control side of a client: follows the placement, keeps a connector for every lane and server,
//! and reports suspects. Nothing here is on the path of a call.

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

use super::connector::{Connector, LanePort};
use super::error::BuildError;
use super::shared::Shared;
use crate::placement::{Change, Registry, Routing, Server};

/// What lanes and connectors tell the control task.
#[derive(Debug)]
pub(crate) enum Command {
    /// A lane was made: connect it.
    AddLane(LanePort),
    /// A server failed somebody.
    Suspect { server: Arc<Server>, reason: String },
}

/// What a connector is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    Stay,
    /// The server left the placement.
    Gracefully,
    /// The client goes.
    Now,
}

/// Where placements come from.
pub(crate) enum Tables {
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
        tables: Tables,
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
                let followed = task.follow(tables, handle)?;
                handle.spawn(task.run(commands, followed, stopped));
                None
            }
            None => {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .map_err(BuildError::Thread)?;
                let followed = task.follow(tables, runtime.handle())?;
                let thread = std::thread::Builder::new()
                    .name("sy-client-ctl".to_owned())
                    .spawn(move || {
                        runtime.block_on(task.run(commands, followed, stopped));
                        // Memory that waits for kernels goes when they end, whether somebody waits or not.
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
            // It ends within twice MAX_STOP; a panic of it was logged by its hook.
            let _ = thread.join();
        }
    }
}

/// A server and the connectors that work for it.
struct Member {
    server: Arc<Server>,
    leave: watch::Sender<Leave>,
    num_connectors: usize,
    suspected_at: Option<Instant>,
}

struct Task {
    shared: Arc<Shared>,
    descriptor: ModelDescriptor,
    registry: Registry,
    lanes: Vec<LanePort>,
    /// By uid: those in the placement, and those that left and still have connectors.
    members: HashMap<u64, Member>,
    connectors: JoinSet<()>,
    owners: HashMap<Id, u64>,
    control: Option<ControlClient>,
}

/// Tables, and what keeps them coming.
struct Followed {
    tables: watch::Receiver<Arc<PlacementTable>>,
    watch: Option<PlacementWatch>,
}

impl Task {
    fn follow(&self, tables: Tables, handle: &Handle) -> Result<Followed, BuildError> {
        match (tables, &self.control) {
            (Tables::Watch(tables), _) => Ok(Followed { tables, watch: None }),
            (Tables::ControlPlane, Some(control)) => {
                let watch = PlacementWatch::spawn(control, handle, WatchOptions::default())?;
                Ok(Followed { tables: watch.tables(), watch: Some(watch) })
            }
            (Tables::ControlPlane, None) => Err(BuildError::NoPlacement),
        }
    }

    async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<Command>,
        Followed { mut tables, watch }: Followed,
        mut stopped: watch::Receiver<bool>,
    ) {
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
        for member in self.members.values() {
            member.leave.send_replace(Leave::Now);
        }
        let all_ended = async { while self.connectors.join_next().await.is_some() {} };
        let _ = timeout(MAX_STOP, all_ended).await;
        // Those that are left let go of what they hold while the runtime still has threads for that.
        self.connectors.shutdown().await;
    }

    fn apply(&mut self, table: &PlacementTable) {
        if let Some(model) = &table.model
            && model.fingerprint != self.descriptor.fingerprint
        {
            let problem = format!(
                "the placement is for model {}, expected {}",
                model.fingerprint, self.descriptor.fingerprint
            );
            tracing::error!(problem, "placement ignored");
            self.note_problem(Some(problem));
            return;
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
                leave: watch::channel(Leave::Stay).0,
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
                member.leave.send_replace(Leave::Gracefully);
                self.forget_if_idle(server.uid);
            }
        }
        for lane in &self.lanes {
            lane.news.announce();
        }
    }

    /// Says in error messages why there is no placement, as long as there is none.
    fn note_problem(&self, problem: Option<String>) {
        let current = self.shared.routing.load();
        if current.servers.is_empty() {
            let mut routing = Routing::empty(&self.descriptor);
            routing.epoch = current.epoch;
            routing.problem = problem;
            self.shared.routing.store(Arc::new(routing));
            self.lanes.iter().for_each(|lane| lane.news.announce());
        }
    }

    fn add_lane(&mut self, lane: LanePort) {
        let staying = |member: &&Member| *member.leave.borrow() == Leave::Stay;
        let uids: Vec<u64> =
            self.members.values().filter(staying).map(|member| member.server.uid).collect();
        lane.gate.expect(uids.len());
        lane.news.announce();
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
            leave: member.leave.subscribe(),
            fallback: member.server.fallback.of_one(),
            initial,
            given_up: None,
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
        if member.num_connectors == 0 && *member.leave.borrow() != Leave::Stay {
            self.registry.recycle(&member.server);
            self.members.remove(&uid);
        }
    }

    /// Reports a server, not more than once a second, unless it left by itself.
    fn suspect(&mut self, server: &Server, reason: String) {
        let Some(member) = self.members.get_mut(&server.uid) else { return };
        let recently = member.suspected_at.is_some_and(|at| at.elapsed() < SUSPECT_PAUSE);
        if recently || *member.leave.borrow() != Leave::Stay {
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
            // Bounded by the client's own limit. A control plane that is down finds out by itself.
            if let Err(error) = control.suspect(&member_id, &request).await {
                tracing::debug!(%member_id, %error, "the control plane did not take the report");
            }
        });
    }
}

/// Completes when the state changes; never without one, or when there will be no more.
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
