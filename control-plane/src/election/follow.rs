//! A control plane that does not lead: finds the leader, and shows the leader's placement.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use control_api::{
    ClientsReport, ControlClient, ControlError, EditionList, ModelClients, PlacementWatch,
    WatchOptions, WatchStatus, code,
};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::{error, info};

use super::{Election, RETRY};
use crate::boards::{Boards, EditionBoard};
use crate::config::check_plane_url;
use crate::metrics::Metrics;
use crate::role::{Following, Role};
use crate::store::etcd::{ELECTION, encoded, end_of};

impl Election {
    /// Follows the leader until the caller drops the future.
    pub(super) async fn follow(&self) -> Infallible {
        let leader = watch::Sender::new(None);
        let receiver = leader.subscribe();
        tokio::select! {
            never = self.find_leader(leader) => never,
            never = self.relay(receiver) => never,
        }
    }

    /// Keeps the URL of the leader up to date.
    async fn find_leader(&self, leader: watch::Sender<Option<String>>) -> Infallible {
        loop {
            match self.candidates(LIST_BOUND).await {
                Ok(candidates) => {
                    let mut following = Following::default();
                    if let Some(first) = candidates.first() {
                        following.term = first.term;
                        if first.url == self.own_url {
                            following.problem = Some(self.own_url_leads());
                        } else {
                            // Requests go there with tokens of callers and the cluster's own.
                            match check_plane_url(&first.url, self.token.as_deref(), &self.security)
                            {
                                Ok(()) => following.leader_url = Some(first.url.clone()),
                                Err(reason) => {
                                    let text =
                                        format!("the leader's URL in etcd is not used: {reason}");
                                    following.problem = Some(text);
                                }
                            }
                        }
                    }
                    self.set_following(following);
                    let url = self.leader_url();
                    leader.send_if_modified(|known| {
                        let is_news = *known != url;
                        *known = url;
                        is_news
                    });
                    self.await_change().await;
                }
                // The last leader may still lead.
                Err(err) => {
                    self.note_problem(&err);
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn leader_url(&self) -> Option<String> {
        match self.roles.current() {
            Role::Leader { .. } => None,
            Role::Follower(following) => following.leader_url,
        }
    }

    fn set_following(&self, following: Following) {
        let Role::Follower(known) = self.roles.current() else { return };
        if known == following {
            return;
        }
        if let (Some(problem), true) = (&following.problem, known.problem != following.problem) {
            error!(problem, "no leader is known");
        }
        if let (Some(url), true) = (&following.leader_url, known.leader_url != following.leader_url)
        {
            info!(url, "following the leader");
        }
        self.roles.set(Role::Follower(following));
    }

    fn own_url_leads(&self) -> String {
        let url = &self.own_url;
        format!(
            "{url} leads, which is the URL of this control plane, too: either an earlier process at this address, \
             whose lease ends soon, or another control plane that advertises the same URL"
        )
    }

    /// Waits for a change of the candidates, and not longer than [`RELIST`]: a watch may hang.
    async fn await_change(&self) {
        let until = Instant::now() + RELIST;
        let key = format!("{}{ELECTION}", self.prefix);
        let body = json!({
            "create_request": { "key": encoded(&key), "range_end": encoded(end_of(&key)) }
        });
        let Ok(mut stream) = self.client.stream("watch", &body, LIST_BOUND).await else {
            sleep(RETRY).await;
            return;
        };
        // The first piece confirms the watch. A change before it is found by the next list.
        let mut is_confirmed = false;
        while let Ok(Ok(Some(_))) = timeout_at(until, stream.chunk()).await {
            if std::mem::replace(&mut is_confirmed, true) {
                return;
            }
        }
        // The stream may end at once, again and again.
        if Instant::now() < until {
            sleep(RETRY).await;
        }
    }

    /// Publishes the tables of the leader on the board of this process.
    async fn relay(&self, mut leader: watch::Receiver<Option<String>>) -> Infallible {
        loop {
            let url = leader.borrow_and_update().clone();
            tokio::select! {
                never = self.relay_from(url) => match never {},
                changed = leader.changed() => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                }
            }
        }
    }

    /// Publishes the tables of all editions of the leader at `url`, and reports this process's clients to it.
    async fn relay_from(&self, url: Option<String>) -> Infallible {
        let boards = &self.settings.boards;
        let Some(leader) = url.and_then(|url| self.client_of(&url).ok()) else {
            sleep(STALE_AFTER).await;
            boards.set_fresh(false);
            return std::future::pending().await;
        };
        // Dropping the set ends its tasks.
        let mut tasks = JoinSet::new();
        let mut relays: Vec<(Arc<EditionBoard>, AbortHandle)> = Vec::new();
        loop {
            let answer = leader.report_clients(&self.clients_report()).await;
            let has_ended = relays.iter().any(|(_, relay)| relay.is_finished());
            let editions = boards.set(&fingerprints(answer, boards, has_ended));
            relays.retain(|(board, relay)| {
                let is_in_list = editions.iter().any(|edition| Arc::ptr_eq(edition, board));
                let is_kept = is_in_list && !relay.is_finished();
                if !is_kept {
                    relay.abort();
                }
                is_kept
            });
            for edition in editions {
                if relays.iter().any(|(board, _)| Arc::ptr_eq(board, &edition)) {
                    continue;
                }
                let relay = Relay {
                    leader: leader.clone(),
                    edition: Arc::clone(&edition),
                    boards: Arc::clone(boards),
                    metrics: self.settings.metrics.clone(),
                };
                relays.push((edition, tasks.spawn(relay.run())));
            }
            if let Some(latest) = boards.current().board.latest() {
                self.settings.metrics.set_epoch(latest.epoch);
            }
            while tasks.try_join_next().is_some() {}
            sleep(REPORT_PERIOD).await;
        }
    }

    fn clients_report(&self) -> ClientsReport {
        let clients = self.settings.boards.all().into_iter().filter_map(|edition| {
            let num_clients = edition.num_clients();
            edition.fingerprint().map(|fingerprint| ModelClients { fingerprint, num_clients })
        });
        ClientsReport { reporter: self.own_url.clone(), clients: clients.collect() }
    }
}

/// The fingerprints of the leader's editions, from its answer to a report. Those of `boards` if it gives none. `has_ended`
/// says that a relay has ended, because the leader has replaced its model.
fn fingerprints(
    answer: Result<EditionList, ControlError>,
    boards: &Boards,
    has_ended: bool,
) -> Vec<Option<String>> {
    match answer {
        Ok(list) => list.editions.into_iter().map(|edition| edition.fingerprint).collect(),
        // A leader of an earlier version has one model. Its table may have named that meanwhile.
        Err(err) if err.code() == Some(code::NOT_FOUND) => {
            vec![boards.current().fingerprint().filter(|_| !has_ended)]
        }
        Err(_) => boards.all().iter().map(|edition| edition.fingerprint()).collect(),
    }
}

/// Publishes the tables of one edition of the leader on its board. Ends when the leader sends another model there.
struct Relay {
    leader: ControlClient,
    edition: Arc<EditionBoard>,
    boards: Arc<Boards>,
    metrics: Metrics,
}

impl Relay {
    async fn run(self) {
        let mut options = WatchOptions::default();
        options.fingerprint = self.edition.fingerprint();
        options.is_observer = true;
        let board = &self.edition.board;
        let watch = PlacementWatch::spawn(&self.leader, &Handle::current(), options);
        let Ok(watch) = watch else {
            sleep(STALE_AFTER).await;
            board.set_fresh(false);
            return std::future::pending().await;
        };
        let (mut tables, mut state) = (watch.tables(), watch.state());
        let mut stale_at = Some(Instant::now() + STALE_AFTER);
        loop {
            let (is_connected, has_other_model) = {
                let state = state.borrow_and_update();
                (state.status == WatchStatus::Connected, state.num_other_models > 0)
            };
            if has_other_model {
                return;
            }
            stale_at = match is_connected {
                true => None,
                false => Some(stale_at.unwrap_or_else(|| Instant::now() + STALE_AFTER)),
            };
            if is_connected {
                board.set_fresh(true);
            }
            let stale = async {
                match stale_at {
                    Some(at) if *board.freshness().borrow() => sleep_until(at).await,
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = tables.changed() => {
                    if changed.is_err() {
                        return std::future::pending().await;
                    }
                    let table = tables.borrow_and_update().clone();
                    board.publish(&table);
                    if Arc::ptr_eq(&self.boards.current(), &self.edition) {
                        self.metrics.set_epoch(table.epoch);
                    }
                }
                // The sender of both lives as long as the watch.
                _ = state.changed() => {}
                () = stale => board.set_fresh(false),
            }
        }
    }
}

/// For so long the last placement counts as confirmed without a leader. An election takes less.
const STALE_AFTER: Duration = Duration::from_secs(10);
/// The candidates are listed again after this time without a change.
const RELIST: Duration = Duration::from_secs(5);
/// Clients are reported to the leader at this rate.
const REPORT_PERIOD: Duration = Duration::from_millis(500);
const LIST_BOUND: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use control_api::{ModelDescriptor, PlacementTable};

    use super::*;

    fn table(fingerprint: &str) -> PlacementTable {
        let model = ModelDescriptor {
            fingerprint: fingerprint.to_owned(),
            architecture: "test".to_owned(),
            hidden: 8,
            moe_layers: vec![3],
            num_experts: 4,
            top_k: 2,
        };
        let cluster_id = "c".repeat(32);
        PlacementTable { cluster_id, epoch: 1, model: Some(model), ..PlacementTable::default() }
    }

    /// Answer of a leader of an earlier version, which does not have the route.
    fn no_such_route() -> Result<EditionList, ControlError> {
        let (code, message) = (code::NOT_FOUND.to_owned(), "no such route".to_owned());
        Err(ControlError::Rejected { status: 404, code, message })
    }

    #[test]
    fn watches_stay_open_under_a_leader_of_an_earlier_version() {
        let boards = Boards::new();
        let first = boards.current();
        first.board.set_fresh(true);
        for round in 0..4 {
            let kept = boards.set(&fingerprints(no_such_route(), &boards, false));
            assert_eq!(kept.len(), 1);
            assert!(Arc::ptr_eq(&kept[0], &first), "another board in round {round}");
            assert!(*first.board.freshness().borrow(), "watches end in round {round}");
            // The table names the model after the first rounds.
            if round == 1 {
                first.board.publish(&table("00aabbccddeeff11"));
                assert_eq!(first.fingerprint().as_deref(), Some("00aabbccddeeff11"));
            }
        }
        // The leader has replaced the model: its clients start again with another board.
        let next = boards.set(&fingerprints(no_such_route(), &boards, true));
        assert!(!Arc::ptr_eq(&next[0], &first) && next[0].fingerprint().is_none());
        assert!(!*first.board.freshness().borrow());
    }
}
