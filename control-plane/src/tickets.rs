//! Issues tickets to clients, and has the keys with which servers check them. Sans-I/O: times are arguments.
//!
//! Each leader makes its own signing key, which stays in its memory. The store has the public keys only, so that
//! servers trust the tickets of an earlier leader until they expire. A new key signs nothing before the servers have had
//! the time to learn it with a heartbeat.

use std::cmp::Ordering;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use control_api::{TicketKey, TicketKeys, TicketRequest, TicketResponse, TicketRole};
use serde::{Deserialize, Serialize};
use trust::Role;
use trust::ticket::{Claims, MAX_CLIENT_BYTES, PublicKey, SecretKey, SignError, UnixTime};

/// The durable part: no secret is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketRecord {
    /// Public keys that have not ended, the newest last.
    pub keys: Vec<TicketKey>,
    /// Servers refuse tickets of lower epochs.
    pub least_epoch: u64,
}

impl TicketRecord {
    /// Returns true for the record of a new cluster.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Signs the tickets of one term.
pub(crate) struct TicketOffice {
    fleet: String,
    settings: TicketSettings,
    state: Mutex<State>,
}

struct State {
    signer: SecretKey,
    /// The next signer, and the time from which on it may sign.
    next: Option<(SecretKey, Duration)>,
    /// Time from which on `signer` may sign.
    signs_from: Duration,
    /// Time at which the next signer is made.
    renew_at: Duration,
    record: TicketRecord,
    /// Highest epoch of a ticket. The placement's epoch is lower after a switch to another model.
    highest_epoch: u64,
}

/// No ticket can be issued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum IssueError {
    #[error(
        "the client's name has {found} characters or others than visible ASCII, expected 1 to {MAX_CLIENT_BYTES}"
    )]
    Name { found: usize },
    #[error("the client's key is malformed: {0}")]
    Key(#[from] trust::ticket::InvalidKey),
    #[error("the ticket cannot be signed: {0}")]
    Sign(#[from] SignError),
    #[error(
        "servers do not know the key of this control plane yet, which has just begun to lead: ask again in {seconds} s"
    )]
    NotYet { seconds: u64 },
}

impl TicketOffice {
    /// Opens the office of a term with a key of its own, which [`record`](Self::record) has. With `has_servers` the key
    /// signs nothing until servers have had the time to renew their leases.
    pub(crate) fn open(
        fleet: &str,
        mut record: TicketRecord,
        settings: TicketSettings,
        has_servers: bool,
        now: Duration,
        wall: UnixTime,
    ) -> Result<Self, SignError> {
        let signer = SecretKey::generate()?;
        record.publish(signer.public(), wall);
        let signs_from = if has_servers { now + settings.spread() } else { now };
        let renew_at = now + KEY_LIFE / 2;
        let state = State { signer, next: None, signs_from, renew_at, record, highest_epoch: 0 };
        Ok(Self { fleet: fleet.to_owned(), settings, state: Mutex::new(state) })
    }

    /// The durable part.
    pub(crate) fn record(&self) -> TicketRecord {
        self.lock().record.clone()
    }

    /// The keys for a server.
    pub(crate) fn keys(&self) -> TicketKeys {
        let state = self.lock();
        let TicketRecord { keys, least_epoch } = state.record.clone();
        let refresh_ms = self.settings.refresh.as_millis() as u64;
        TicketKeys { fleet: self.fleet.clone(), keys, least_epoch, refresh_ms }
    }

    /// Time until the signer may sign.
    pub(crate) fn wait(&self, now: Duration) -> Duration {
        self.lock().signs_from.saturating_sub(now)
    }

    /// Issues a ticket to `holder`, an identity that has the role of the request. `epoch` is that of the placement.
    pub(crate) fn issue(
        &self,
        request: &TicketRequest,
        holder: &str,
        epoch: u64,
        wall: UnixTime,
    ) -> Result<TicketResponse, IssueError> {
        let TicketRequest { client, key, role } = request;
        let is_printable = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
        if !(1..=MAX_CLIENT_BYTES).contains(&client.len()) || !client.bytes().all(is_printable) {
            return Err(IssueError::Name { found: client.chars().count() });
        }
        let key: PublicKey = key.parse()?;
        let mut state = self.lock();
        let epoch = epoch.max(state.record.least_epoch).max(state.highest_epoch);
        state.highest_epoch = epoch;
        let claims = Claims {
            holder: holder.to_owned(),
            role: role_of(*role),
            ..Claims::new(self.fleet.clone(), client.clone(), key, epoch, wall, self.settings.life)
        };
        let ticket = claims.sign(&state.signer)?;
        Ok(TicketResponse { ticket, epoch, expires_in_ms: self.settings.life.as_millis() as u64 })
    }

    /// Revokes all tickets issued so far. `epoch` is that of the placement. Returns the least epoch in force.
    pub(crate) fn revoke(&self, epoch: u64) -> u64 {
        let mut state = self.lock();
        let State { signer, next, record, highest_epoch, .. } = &mut *state;
        // This leader does not know the epochs of tickets that other keys have signed, so servers forget those keys.
        let next = next.as_ref().map(|(key, _)| key);
        let own: Vec<_> =
            next.into_iter().chain([&*signer]).map(|k| k.public().to_string()).collect();
        record.keys.retain(|key| own.contains(&key.key));
        record.least_epoch = record.least_epoch.max(*highest_epoch).max(epoch) + 1;
        record.least_epoch
    }

    /// Makes the next key in time, and signs with it once servers know it. Returns true if the record has changed.
    pub(crate) fn tick(&self, now: Duration, wall: UnixTime) -> Result<bool, SignError> {
        let mut state = self.lock();
        if state.next.as_ref().is_some_and(|(_, from)| now >= *from)
            && let Some((signer, _)) = state.next.take()
        {
            state.signer = signer;
        }
        if now < state.renew_at {
            return Ok(false);
        }
        let signer = SecretKey::generate()?;
        state.record.publish(signer.public(), wall);
        state.next = Some((signer, now + self.settings.spread()));
        state.renew_at = now + KEY_LIFE / 2;
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that holds the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) const fn role_of(role: TicketRole) -> Role {
    match role {
        TicketRole::Client => Role::Client,
        TicketRole::Server => Role::Server,
    }
}

impl fmt::Debug for TicketOffice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TicketOffice").field("fleet", &self.fleet).finish_non_exhaustive()
    }
}

impl TicketRecord {
    /// The keys of both records, which are those of one office at two times. With different least epochs the higher
    /// record stays alone: the revocation between them has removed the other keys.
    pub(crate) fn join(&mut self, other: &Self) {
        match self.least_epoch.cmp(&other.least_epoch) {
            Ordering::Less => return self.clone_from(other),
            Ordering::Greater => return,
            Ordering::Equal => {}
        }
        let is_new = |key: &&TicketKey| !self.keys.iter().any(|known| known.key == key.key);
        let older: Vec<TicketKey> = other.keys.iter().filter(is_new).cloned().collect();
        self.keys.splice(0..0, older);
        self.keys.sort_by_key(|key| key.expires_at);
    }

    /// Adds a key, and removes the ones that have ended and those beyond the limit.
    fn publish(&mut self, key: &PublicKey, wall: UnixTime) {
        self.keys.retain(|key| key.expires_at >= wall.0);
        let expires_at = wall.plus(KEY_LIFE).0;
        self.keys.push(TicketKey { key: key.to_string(), expires_at });
        let surplus = self.keys.len().saturating_sub(MAX_KEYS);
        self.keys.drain(..surplus);
    }
}

/// Times of tickets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TicketSettings {
    /// Life of a ticket.
    life: Duration,
    /// Longest time between two heartbeats of a server.
    refresh: Duration,
}

impl TicketSettings {
    /// Clients renew after half of a life, so their tickets last for another half when a leader fails. The servers learn
    /// the next leader's key within a quarter, however long their leases are.
    pub(crate) fn new(life: Duration, lease_ttl: Duration) -> Self {
        Self { life, refresh: (lease_ttl / 3).min(life / 6) }
    }

    /// Servers have learned a published key after this time: they have sent a heartbeat, and had time for another one.
    fn spread(self) -> Duration {
        self.refresh * 3 / 2
    }
}

/// Life of a signing key. A new one is made after half of it.
pub(crate) const KEY_LIFE: Duration = Duration::from_secs(24 * 3600);
/// Most keys that servers know.
const MAX_KEYS: usize = 8;

#[cfg(test)]
mod tests {
    use trust::ticket::{Gate, Handshake, TicketError, TrustedKey, prove};

    use super::*;

    const SETTINGS: TicketSettings =
        TicketSettings { life: Duration::from_secs(600), refresh: Duration::from_secs(1) };
    const WALL: UnixTime = UnixTime(1_800_000_000);

    fn office(record: TicketRecord, has_servers: bool, wall: UnixTime) -> TicketOffice {
        TicketOffice::open("fleet", record, SETTINGS, has_servers, Duration::ZERO, wall).unwrap()
    }

    fn check(office: &TicketOffice, ticket: &str, client: &SecretKey) -> Result<(), TicketError> {
        check_at(&office.keys(), ticket, client, WALL)
    }

    fn check_at(
        keys: &TicketKeys,
        ticket: &str,
        client: &SecretKey,
        now: UnixTime,
    ) -> Result<(), TicketError> {
        let TicketKeys { fleet, keys, least_epoch, .. } = keys.clone();
        let keys: Vec<TrustedKey> = keys
            .iter()
            .map(|found| TrustedKey {
                key: found.key.parse().unwrap(),
                fleet: fleet.clone(),
                expires_at: UnixTime(found.expires_at),
            })
            .collect();
        let handshake = Handshake { server: "s", incarnation: 1, channel: None, hello: b"h" };
        let proof = prove(ticket, &handshake, client).unwrap();
        let gate = Gate::default();
        gate.check(ticket, &proof, &handshake, Role::Client, &keys, least_epoch, now).map(drop)
    }

    fn request(client: &SecretKey) -> TicketRequest {
        TicketRequest::new("c".to_owned(), client.public().to_string())
    }

    #[test]
    fn tickets_outlive_their_leader_and_revocations_too() {
        let client = SecretKey::generate().unwrap();
        let first = office(TicketRecord::default(), false, WALL);
        assert_eq!(first.wait(Duration::ZERO), Duration::ZERO);
        let old = first.issue(&request(&client), "tester", 3, WALL).unwrap();
        assert_eq!(check(&first, &old.ticket, &client), Ok(()));
        let second = office(first.record(), true, WALL);
        assert_eq!(second.wait(Duration::ZERO), SETTINGS.spread());
        assert_eq!(check(&second, &old.ticket, &client), Ok(()));
        let new = second.issue(&request(&client), "tester", 4, WALL).unwrap();
        assert_eq!(check(&first, &new.ticket, &client), Err(TicketError::UnknownKey));

        assert_eq!(second.revoke(4), 5);
        let third = office(second.record(), true, WALL);
        for office in [&second, &third] {
            assert_eq!(check(office, &old.ticket, &client), Err(TicketError::UnknownKey));
            let found = check(office, &new.ticket, &client);
            assert!(matches!(found, Err(TicketError::Revoked { least: 5, .. })), "{found:?}");
        }
        // The placement's epoch is still lower, and new tickets count all the same.
        let fresh = third.issue(&request(&client), "tester", 4, WALL).unwrap();
        assert_eq!((fresh.epoch, check(&third, &fresh.ticket, &client)), (5, Ok(())));
    }

    /// After a switch to another model the placement has lower epochs.
    #[test]
    fn a_lower_epoch_of_the_placement_revokes_all_the_same() {
        let client = SecretKey::generate().unwrap();
        let office = office(TicketRecord::default(), false, WALL);
        let old = office.issue(&request(&client), "tester", 500, WALL).unwrap();
        assert_eq!(office.revoke(7), 501);
        assert!(matches!(check(&office, &old.ticket, &client), Err(TicketError::Revoked { .. })));
        let new = office.issue(&request(&client), "tester", 8, WALL).unwrap();
        assert_eq!((new.epoch, check(&office, &new.ticket, &client)), (501, Ok(())));
    }

    /// Neither the placement nor a new leader knows the epoch of the old tickets.
    #[test]
    fn a_revocation_after_a_switch_and_a_restart_covers_the_tickets_of_earlier_leaders() {
        let client = SecretKey::generate().unwrap();
        let first = office(TicketRecord::default(), false, WALL);
        let old = first.issue(&request(&client), "tester", 500, WALL).unwrap();
        let before = first.record();
        let second = office(before.clone(), true, WALL);
        assert_eq!(second.tick(KEY_LIFE / 2, WALL), Ok(true));
        assert_eq!(check(&second, &old.ticket, &client), Ok(()));
        assert_eq!(second.revoke(7), 8);
        assert_eq!(check(&second, &old.ticket, &client), Err(TicketError::UnknownKey));
        assert_eq!(second.keys().keys.len(), 2, "its signer and the next one");
        let new = second.issue(&request(&client), "tester", 7, WALL).unwrap();
        assert_eq!(check(&second, &new.ticket, &client), Ok(()));

        // The store of another edition still has the keys from before the revocation.
        for (mut kept, other) in [(second.record(), before.clone()), (before, second.record())] {
            kept.join(&other);
            let third = office(kept, true, WALL);
            assert_eq!(check(&third, &old.ticket, &client), Err(TicketError::UnknownKey));
            assert_eq!(check(&third, &new.ticket, &client), Ok(()));
        }
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]

        /// On a clock of its own: a leader fails at any moment of a ticket's first half and of a server's heartbeat.
        #[test]
        fn a_takeover_leaves_no_client_without_a_ticket(
            lease_ms in 100u64..=3_600_000,
            life_s in 10u64..=43_200,
            age in 0.0f64..=1.0,
            phase in 0.0f64..=1.0,
        ) {
            let life = Duration::from_secs(life_s);
            let settings = TicketSettings::new(life, Duration::from_millis(lease_ms));
            let open = |record, has_servers, now| {
                TicketOffice::open("fleet", record, settings, has_servers, now, WALL).unwrap()
            };
            let client = SecretKey::generate().unwrap();
            let first = open(TicketRecord::default(), false, Duration::ZERO);
            let old = first.issue(&request(&client), "tester", 1, WALL).unwrap();
            let known = first.keys();
            // The client renews after half of the life at the latest, and the leader fails just before that.
            let taken_over = (life / 2).mul_f64(age);
            let second = open(first.record(), true, taken_over);
            let heartbeat = taken_over + Duration::from_millis(known.refresh_ms).mul_f64(phase);
            let issued = taken_over + second.wait(taken_over);
            proptest::prop_assert!(heartbeat < issued, "a key signs before the servers know it");
            let learned = second.keys();
            let new = second.issue(&request(&client), "tester", 1, WALL.plus(issued)).unwrap();
            // The old ticket serves without the tolerance for clocks until the new one is there.
            proptest::prop_assert!(issued < life);
            for keys in [&known, &learned] {
                proptest::prop_assert_eq!(check_at(keys, &old.ticket, &client, WALL.plus(issued)), Ok(()));
            }
            proptest::prop_assert_eq!(check_at(&learned, &new.ticket, &client, WALL.plus(issued)), Ok(()));
        }
    }

    #[test]
    fn two_records_become_one() {
        let first = office(TicketRecord::default(), false, WALL).record();
        let mut second = office(first.clone(), false, UnixTime(WALL.0 + 5)).record();
        let other = office(first.clone(), false, UnixTime(WALL.0 + 1)).record();
        let expected = [first.keys[0].clone(), other.keys[1].clone(), second.keys[1].clone()];
        second.join(&other);
        assert_eq!(second, TicketRecord { keys: expected.to_vec(), least_epoch: 0 });
    }

    #[test]
    fn a_new_key_is_published_before_it_signs() {
        let office = office(TicketRecord::default(), false, WALL);
        let signer = || office.lock().signer.public().to_string();
        let first = signer();
        assert_eq!(office.tick(KEY_LIFE / 2 - Duration::from_secs(1), WALL), Ok(false));
        assert_eq!(office.tick(KEY_LIFE / 2, WALL), Ok(true));
        assert_eq!(office.keys().keys.len(), 2);
        assert_eq!(signer(), first, "servers do not know the new key yet");
        assert_eq!(office.tick(KEY_LIFE / 2 + SETTINGS.spread(), WALL), Ok(false));
        assert_eq!(signer(), office.keys().keys[1].key);
    }

    #[test]
    fn the_list_of_keys_is_bounded_and_loses_ended_ones() {
        let mut record = TicketRecord::default();
        for restart in 0..20 {
            record = office(record, true, UnixTime(WALL.0 + restart)).record();
        }
        assert_eq!(record.keys.len(), MAX_KEYS);
        let late = UnixTime(WALL.0 + 21).plus(KEY_LIFE);
        assert_eq!(office(record, true, late).record().keys.len(), 1);
    }

    #[test]
    fn malformed_requests_are_refused() {
        let office = office(TicketRecord::default(), false, WALL);
        let good = request(&SecretKey::generate().unwrap());
        for client in ["", "a\u{1b}[2J", "\u{e9}", &"c".repeat(MAX_CLIENT_BYTES + 1)] {
            let bad = TicketRequest { client: client.to_owned(), ..good.clone() };
            assert!(matches!(office.issue(&bad, "tester", 1, WALL), Err(IssueError::Name { .. })));
        }
        let bad = TicketRequest { key: "k4.public.x".to_owned(), ..good };
        assert!(matches!(office.issue(&bad, "tester", 1, WALL), Err(IssueError::Key(_))));
    }
}
