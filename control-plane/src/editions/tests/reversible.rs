//! Changes of the goals and resumes that cannot be stored.

use control_api::{FleetGoals, MemberState};

use super::*;

fn goals(replicas: u32) -> FleetGoals {
    FleetGoals { replicas, spare: 0.25 }
}

impl World {
    /// The goals in force in each edition, and the goals that were set while the control plane ran.
    fn all_goals(&self) -> Vec<(FleetGoals, Option<FleetGoals>)> {
        let editions = self.editions.all().into_iter();
        let of = |edition: Edition| {
            let coordinator = edition.coordinator;
            (coordinator.goals().unwrap(), coordinator.changed_goals())
        };
        editions.map(of).collect()
    }

    fn state(&self, name: &str) -> MemberState {
        let members = self.editions.members();
        members.iter().find(|member| member.name == name).unwrap().state
    }

    /// Makes room on the disk, and waits until everything is written.
    async fn recover(&self) {
        *lock(&self.disk.full_after) = None;
        self.disk.is_full.store(false, Ordering::Relaxed);
        let is_written = async {
            while self.editions.all().iter().any(|edition| edition.coordinator.needs_save()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(BOUND, is_written).await.expect("the disk has room");
    }
}

/// A caller that leaves while the store writes leaves nothing in force that is not stored.
#[tokio::test]
async fn a_change_is_taken_back_without_its_caller() {
    let mut world = World::elastic();
    world.serve_all("old", OLD).await;
    let id = world.servers[0].id.clone();
    world.editions.drain(&id, None).await.unwrap();
    world.editions.set_goals(goals(1)).await.unwrap();
    let before = world.all_goals();
    world.disk.is_full.store(true, Ordering::Relaxed);
    world.interrupt(world.editions.set_goals(goals(2))).await;
    assert_eq!(world.all_goals(), before);
    world.recover().await;
    world.disk.is_full.store(true, Ordering::Relaxed);
    world.interrupt(world.editions.resume(&id)).await;
    assert_eq!(world.state("old-0"), MemberState::Draining);
    world.recover().await;
    world = world.restart().await;
    assert_eq!(world.all_goals(), before);
    assert_eq!(world.state("old-0"), MemberState::Draining);
    // A change that is stored stays, and needs no caller either.
    world.interrupt(world.editions.set_goals(goals(2))).await;
    world.interrupt(world.editions.resume(&id)).await;
    world = world.restart().await;
    assert_eq!(world.all_goals(), [(goals(2), Some(goals(2)))]);
    assert_eq!(world.state("old-0"), MemberState::Serving);
}

/// Callers that wait for their turn leave no tasks behind.
#[tokio::test]
async fn callers_that_leave_before_their_turn_change_nothing() {
    let mut world = World::elastic();
    world.serve_all("old", OLD).await;
    let changing = world.editions.changing.lock().await;
    let before = world.all_goals();
    let num_users = Arc::strong_count(&world.editions);
    for replicas in [2, 3] {
        let change = world.editions.set_goals(goals(replicas));
        tokio::time::timeout(Duration::from_millis(1), change).await.unwrap_err();
    }
    assert_eq!(Arc::strong_count(&world.editions), num_users);
    drop(changing);
    drop(world.editions.changing.lock().await);
    assert_eq!(world.all_goals(), before);
}

/// Of several changes that fail at once, none is in force.
#[tokio::test]
async fn changes_at_once_are_all_taken_back() {
    let mut world = World::elastic();
    world.serve_all("old", OLD).await;
    world.editions.set_goals(goals(1)).await.unwrap();
    let before = world.all_goals();
    world.disk.is_full.store(true, Ordering::Relaxed);
    let changes = [2, 3, 4].map(|replicas| world.editions.set_goals(goals(replicas)));
    for outcome in futures_util::future::join_all(changes).await {
        let err = outcome.unwrap_err();
        assert!(matches!(err, OperationError::NotStored { .. }), "{err}");
    }
    assert_eq!(world.all_goals(), before);
    world.recover().await;
    world = world.restart().await;
    assert_eq!(world.all_goals(), before);
}

/// If one of two editions cannot store its goals, the other one does not keep them.
#[tokio::test]
async fn goals_change_in_all_editions_or_in_none() {
    let mut world = World::elastic();
    world.serve_all("old", OLD).await;
    world.editions.set_goals(goals(1)).await.unwrap();
    world.add(NEW).await.unwrap();
    let before = world.all_goals();
    assert_eq!(before.len(), 2);
    for num_writes in [0, 1] {
        *lock(&world.disk.full_after) = Some(num_writes);
        refused(world.editions.set_goals(goals(2)), &["not in force"]).await;
        assert_eq!(world.all_goals(), before, "{num_writes}");
        world.recover().await;
        world = world.restart().await;
        assert_eq!(world.all_goals(), before, "{num_writes}");
    }
    world.editions.set_goals(goals(2)).await.unwrap();
    world = world.restart().await;
    assert_eq!(world.all_goals(), [(goals(2), Some(goals(2))); 2]);
}

/// The process ends after one of two editions has stored new goals, before the other one has, and before they are taken
/// back. The next process finds the same goals in both.
#[tokio::test]
async fn goals_of_all_editions_are_the_same_after_an_end_in_between() {
    let mut world = World::elastic();
    world.serve_all("old", OLD).await;
    world.editions.set_goals(goals(1)).await.unwrap();
    world.add(NEW).await.unwrap();
    *lock(&world.disk.full_after) = Some(1);
    refused(world.editions.set_goals(goals(2)), &["not in force"]).await;
    // Nothing more reaches the disk before the end. One write of the two has.
    world = world.restart().await;
    assert_eq!(world.all_goals(), [(goals(2), Some(goals(2))); 2]);
    world.recover().await;
    world = world.restart().await;
    assert_eq!(world.all_goals(), [(goals(2), Some(goals(2))); 2]);
}

/// A member that serves stays, whatever change of others cannot be stored meanwhile.
#[tokio::test]
async fn a_resume_of_a_serving_member_never_drains_it() {
    let mut world = World::elastic();
    world.serve_all("old", OLD).await;
    let id = world.servers[0].id.clone();
    world.disk.is_full.store(true, Ordering::Relaxed);
    world.disk.gate.shut();
    let resume = async {
        // The write of the registration is under way.
        while !world.disk.gate.has_waiter.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let resume = world.editions.resume(&id);
        tokio::pin!(resume);
        let early = tokio::time::timeout(Duration::from_millis(100), &mut resume).await;
        world.disk.gate.open();
        match early {
            Ok(ended) => ended,
            Err(_) => resume.await,
        }
    };
    let (registered, resumed) = tokio::join!(world.register("new", OLD), resume);
    registered.err().expect("the disk is full");
    assert_eq!(resumed.unwrap().state, MemberState::Serving);
    assert_eq!(world.state("old-0"), MemberState::Serving);
}
