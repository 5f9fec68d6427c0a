//! The coordinator with a clock that only the test moves.

use control_api::LayerAssignment;

use super::*;
use crate::balance::PlanJob;
use crate::clock::ManualClock;
use crate::fleet::FleetSettings;
use crate::planner::BalancedPlanner;
use crate::store::MemoryStore;
use crate::tickets::TicketSettings;

const TTL: Duration = Duration::from_secs(3);
const NUM_MEMBERS: u32 = 200;

fn model() -> control_api::ModelDescriptor {
    control_api::ModelDescriptor {
        fingerprint: "00aabbccddeeff11".to_owned(),
        architecture: "qwen3_moe".to_owned(),
        hidden: 256,
        moe_layers: (0..8).collect(),
        num_experts: 64,
        top_k: 2,
    }
}

fn request(nth: u32) -> RegisterRequest {
    let mut request = RegisterRequest::new(format!("m{nth:03}"), "127.0.0.1:7000", model());
    request.incarnation = 1;
    // Registered as a member that returns with its experts.
    let experts = vec![nth % 64];
    request.holds.layers = vec![LayerAssignment { layer: nth % 8, experts }];
    request
}

/// A control plane whose clock stands still, without a writer of its store.
pub(super) fn start() -> (Coordinator, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let settings = FleetSettings {
        lease_ttl: TTL,
        suspect_grace: Duration::from_millis(300),
        expired_retention: Duration::from_secs(60),
        max_members: 1000,
        pinned_fingerprint: None,
        balance: None,
        target_share: 0.6,
    };
    let planner = Box::new(BalancedPlanner::new(4, 2).unwrap());
    let fleet = Fleet::new(settings, planner, None, clock.now());
    let (metrics, board) = (Metrics::new(2).unwrap(), Arc::new(Board::new()));
    let now: Arc<dyn Clock> = clock.clone();
    let (mut store, revision) = (MemoryStore::new(), Revision::default());
    let (wall, cluster) = (std::time::SystemTime::now().into(), fleet.cluster_id().to_owned());
    let settings = TicketSettings::new(Duration::from_secs(600), Duration::from_secs(2));
    let record = crate::tickets::TicketRecord::default();
    let tickets = TicketOffice::open(&cluster, record, settings, false, now.now(), wall).unwrap();
    let context = Context {
        clock: now,
        lease_ttl: TTL,
        metrics,
        board,
        events: EventLog::default(),
        tickets: Arc::new(tickets),
    };
    let started = Coordinator::start(fleet, &mut store, revision, context);
    (started.unwrap().0, clock)
}

/// Registers a member that serves at once.
pub(super) fn join(coordinator: &Coordinator, nth: u32) {
    let request = request(nth);
    let ready = ReadyRequest { incarnation: 1, holds: request.holds.clone() };
    let member = coordinator.with_fleet(|fleet, now| fleet.register(request, now)).unwrap();
    coordinator.ready(&member.member_id, ready).unwrap();
}

fn tick(coordinator: &Coordinator) -> Option<PlanJob> {
    let mut advise_at = Duration::ZERO;
    coordinator.tick(Duration::from_millis(100), &mut advise_at)
}

/// A fleet of 200 servers changes while the last table is being sent: all changes are in the next one.
#[test]
fn changes_within_a_pause_share_one_table() {
    let (coordinator, clock) = start();
    join(&coordinator, 0);
    let epoch = coordinator.status().epoch;
    let num_tables = coordinator.metrics.placement_changes.get();
    // Costly enough for the longest pause.
    lock(&coordinator.pace).note(clock.now(), Duration::from_secs(1), 0);
    for nth in 1..NUM_MEMBERS {
        join(&coordinator, nth);
    }
    clock.advance(Duration::from_millis(400));
    assert!(tick(&coordinator).is_none());
    assert_eq!(coordinator.status().epoch, epoch);
    assert_eq!(coordinator.status().members.serving, NUM_MEMBERS);
    clock.advance(Duration::from_millis(100));
    tick(&coordinator);
    assert_eq!(coordinator.status().epoch, epoch + 1);
    assert_eq!(coordinator.metrics.placement_changes.get(), num_tables + 1);
    let table = coordinator.with_fleet(|fleet, _| fleet.table().clone());
    assert_eq!(table.servers.len(), NUM_MEMBERS as usize);
    let published = coordinator.board.latest().unwrap();
    let published: control_api::PlacementTable = serde_json::from_slice(&published.json).unwrap();
    assert_eq!(published, *table);
}

/// Clients learn of each change of a small fleet at once, whatever else the machine does.
#[test]
fn every_change_of_a_small_fleet_has_its_own_table() {
    let (coordinator, _clock) = start();
    for nth in 0..8 {
        let epoch = coordinator.status().epoch;
        join(&coordinator, nth);
        // The first one also names the model.
        let expected = epoch + if nth == 0 { 2 } else { 1 };
        assert_eq!(coordinator.status().epoch, expected);
    }
}
