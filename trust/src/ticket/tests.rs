use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const NOW: UnixTime = UnixTime(1_800_000_000);

/// A control plane, a client and the handshake with one server.
struct Case {
    signer: SecretKey,
    client: SecretKey,
    claims: Claims,
    keys: Vec<TrustedKey>,
    gate: Gate,
}

const HANDSHAKE: Handshake<'static> =
    Handshake { server: "server-0", incarnation: 7, channel: Some([9; 32]), hello: b"hello" };

impl Case {
    fn new() -> Self {
        let (signer, client) = (SecretKey::generate().unwrap(), SecretKey::generate().unwrap());
        let key = client.public().clone();
        let claims =
            Claims::new("fleet-a".to_owned(), "client-1".to_owned(), key, 5, NOW, DEFAULT_LIFE);
        let expires_at = NOW.plus(Duration::from_secs(86_400));
        let fleet = "fleet-a".to_owned();
        let keys = vec![TrustedKey { key: signer.public().clone(), fleet, expires_at }];
        Self { signer, client, claims, keys, gate: Gate::default() }
    }

    fn ticket(&self) -> String {
        self.claims.sign(&self.signer).unwrap()
    }

    fn check(&self, ticket: &str, proof: &str, now: UnixTime) -> Result<Claims, TicketError> {
        self.gate.check(ticket, proof, &HANDSHAKE, Role::Client, &self.keys, 0, now)
    }

    fn proof(&self, ticket: &str) -> String {
        prove(ticket, &HANDSHAKE, &self.client).unwrap()
    }
}

#[test]
fn a_ticket_with_its_proof_is_admitted_once() {
    let case = Case::new();
    let ticket = case.ticket();
    let proof = case.proof(&ticket);
    assert!(ticket.len() < MAX_TICKET_BYTES && proof.len() < MAX_PROOF_BYTES);
    assert_eq!(case.check(&ticket, &proof, NOW), Ok(case.claims.clone()));
    assert_eq!(case.check(&ticket, &proof, NOW), Err(UseError::Replayed.into()));
    // The ticket serves for further handshakes, each with a proof of its own.
    let next = case.proof(&ticket);
    assert_ne!(proof, next);
    assert!(case.check(&ticket, &next, NOW).is_ok());
    assert_eq!(case.gate.num_used(), 2);
}

#[test]
fn the_longest_texts_fit_a_ticket() {
    let mut case = Case::new();
    case.claims.client = "c".repeat(MAX_CLIENT_BYTES);
    case.claims.fleet = "f".repeat(MAX_FLEET_BYTES);
    case.claims.holder = "h".repeat(MAX_HOLDER_BYTES);
    case.claims.epoch = u64::MAX;
    case.keys[0].fleet.clone_from(&case.claims.fleet);
    let ticket = case.ticket();
    assert!(ticket.len() <= MAX_TICKET_BYTES, "{}", ticket.len());
    assert!(case.check(&ticket, &case.proof(&ticket), NOW).is_ok());
    case.claims.client.push('c');
    assert!(matches!(case.claims.sign(&case.signer), Err(SignError::TooLong { .. })));
}

#[test]
fn tickets_of_other_signers_and_fleets_are_refused() {
    let mut case = Case::new();
    let other = Case::new();
    let ticket = other.ticket();
    let proof = prove(&ticket, &HANDSHAKE, &other.client).unwrap();
    assert_eq!(case.check(&ticket, &proof, NOW), Err(TicketError::UnknownKey));
    // The footer names the known key, the signature is another's.
    let stolen = case.ticket();
    let (body, _) = ticket.rsplit_once('.').unwrap();
    let (_, footer) = stolen.rsplit_once('.').unwrap();
    let forged = format!("{body}.{footer}");
    let proof = prove(&forged, &HANDSHAKE, &other.client).unwrap();
    assert_eq!(case.check(&forged, &proof, NOW), Err(TicketError::Forged));
    case.claims.fleet = "fleet-b".to_owned();
    let ticket = case.ticket();
    assert_eq!(case.check(&ticket, &case.proof(&ticket), NOW), Err(TicketError::OtherFleet));
    case.keys[0].expires_at = UnixTime(NOW.0 - 1);
    assert!(matches!(
        case.check(&ticket, &case.proof(&ticket), NOW),
        Err(TicketError::KeyEnded { .. })
    ));
    assert_eq!(case.gate.num_used(), 0);
}

#[test]
fn a_ticket_without_its_key_and_a_proof_for_another_handshake_are_refused() {
    let case = Case::new();
    let ticket = case.ticket();
    let thief = SecretKey::generate().unwrap();
    let proof = prove(&ticket, &HANDSHAKE, &thief).unwrap();
    assert_eq!(case.check(&ticket, &proof, NOW), Err(TicketError::WrongProof));
    let others = [
        Handshake { server: "server-1", ..HANDSHAKE },
        Handshake { server: "server-", ..HANDSHAKE },
        Handshake { incarnation: 8, ..HANDSHAKE },
        Handshake { channel: Some([8; 32]), ..HANDSHAKE },
        Handshake { channel: None, ..HANDSHAKE },
        Handshake { hello: b"hello!", ..HANDSHAKE },
        Handshake { hello: b"", ..HANDSHAKE },
    ];
    for other in others {
        let proof = prove(&ticket, &other, &case.client).unwrap();
        assert_eq!(case.check(&ticket, &proof, NOW), Err(TicketError::WrongProof), "{other:?}");
    }
    // A proof belongs to one ticket of its key.
    let second = Case { claims: Claims { id: TicketId::random(), ..case.claims.clone() }, ..case };
    let proof = prove(&ticket, &HANDSHAKE, &second.client).unwrap();
    assert_eq!(second.check(&second.ticket(), &proof, NOW), Err(TicketError::WrongProof));
    assert_eq!(second.gate.num_used(), 0, "a refused proof is not remembered");
}

#[test]
fn revoked_epochs_are_refused() {
    let case = Case::new();
    let ticket = case.ticket();
    let check = |least| {
        let proof = case.proof(&ticket);
        case.gate.check(&ticket, &proof, &HANDSHAKE, Role::Client, &case.keys, least, NOW)
    };
    assert!(check(5).is_ok());
    assert_eq!(check(6), Err(TicketError::Revoked { found: 5, least: 6 }));
}

#[test]
fn a_ticket_serves_for_its_role_alone() {
    let mut case = Case::new();
    let check = |case: &Case, role| {
        let ticket = case.ticket();
        let proof = case.proof(&ticket);
        case.gate.check(&ticket, &proof, &HANDSHAKE, role, &case.keys, 0, NOW).map(drop)
    };
    let refused = |found, expected| Err(TicketError::OtherRole { found, expected });
    assert_eq!(check(&case, Role::Server), refused(Role::Client, Role::Server));
    case.claims.role = Role::Server;
    assert_eq!(check(&case, Role::Client), refused(Role::Server, Role::Client));
    assert_eq!(check(&case, Role::Server), Ok(()));
    assert_eq!(case.gate.num_used(), 1, "a refused proof is not remembered");
}

#[test]
fn a_holder_that_fills_the_memory_displaces_itself_alone() {
    let mut used = UsedProofs::new(6, 4);
    let [a, b, c] = [TicketId::random(), TicketId::random(), TicketId::random()];
    let end = NOW.plus(DEFAULT_LIFE);
    let evicted = Err(UseError::Evicted { max: 6 });
    assert_eq!(used.spend("modest", b, end, [1; 16], NOW), Ok(()));
    for nonce in 1..=4 {
        assert_eq!(used.spend("greedy", a, end, [nonce; 16], NOW), Ok(()));
    }
    assert_eq!(used.spend("greedy", a, end, [5; 16], NOW), Err(UseError::TooOften { max: 4 }));
    assert_eq!(used.spend("greedy", c, end, [1; 16], NOW), Ok(()));
    // The memory is full. The greedy holder gets nothing more for its tickets.
    assert_eq!(used.spend("greedy", c, end, [2; 16], NOW), evicted);
    assert_eq!(used.len(), 1);
    // No eviction opens the way for a recorded proof, or for another ticket from before.
    for (ticket, nonce) in [(a, 1), (a, 9), (c, 1), (TicketId::random(), 1)] {
        assert_eq!(used.spend("greedy", ticket, end, [nonce; 16], NOW), evicted);
    }
    assert_eq!(used.spend("modest", b, end, [1; 16], NOW), Err(UseError::Replayed));
    assert_eq!(used.spend("modest", b, end, [2; 16], NOW), Ok(()));
    // A new ticket serves.
    let newer = end.plus(Duration::from_secs(1));
    for nonce in 1..=4 {
        assert_eq!(used.spend("greedy", TicketId([9; 16]), newer, [nonce; 16], NOW), Ok(()));
    }
    // A full memory has room for others all the same.
    assert_eq!(used.spend("modest", b, end, [3; 16], NOW), Ok(()));
    assert_eq!(used.len(), 3);
    assert_eq!(used.spend("modest", b, end, [1; 16], NOW), Err(UseError::Replayed));
    let again = used.spend("greedy", TicketId([9; 16]), newer, [1; 16], NOW);
    assert_eq!(again, evicted);

    // Room comes back once the tickets can no longer be admitted.
    let later = newer.plus(CLOCK_SKEW).plus(Duration::from_secs(1));
    assert_eq!(used.spend("greedy", TicketId::random(), later, [4; 16], later), Ok(()));
    assert_eq!(used.len(), 1);
    // The clock is set back: a forgotten ticket may have been used, so it stays refused.
    for (holder, ticket) in [("greedy", a), ("modest", b), ("third", c)] {
        assert_eq!(used.spend(holder, ticket, end, [1; 16], NOW), Err(UseError::Replayed));
    }
}

#[test]
fn secret_keys_are_not_shown() {
    let key = SecretKey::generate().unwrap();
    let shown = format!("{key:?}");
    assert!(shown.contains(&key.public().to_string()) && !shown.contains("k4.secret"), "{shown}");
    let text = key.public().to_string();
    assert_eq!(text.parse().as_ref(), Ok(key.public()));
    assert!("k4.public.AAAA".parse::<PublicKey>().is_err());
    assert!(text.replace("public", "secret").parse::<PublicKey>().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_ticket_counts_within_its_time_and_the_skew(offset in -2000i64..2000) {
        let case = Case::new();
        let now = UnixTime(NOW.0.checked_add_signed(offset).unwrap());
        let ticket = case.ticket();
        let found = case.check(&ticket, &case.proof(&ticket), now);
        let (skew, life) = (CLOCK_SKEW.as_secs() as i64, DEFAULT_LIFE.as_secs() as i64);
        match offset {
            _ if offset < -skew => {
                prop_assert!(matches!(found, Err(TicketError::NotYet { .. })), "{found:?}");
            }
            _ if offset > life + skew => {
                prop_assert!(matches!(found, Err(TicketError::Expired { .. })), "{found:?}");
            }
            _ => prop_assert!(found.is_ok(), "{found:?}"),
        }
    }

    #[test]
    fn a_changed_byte_is_refused(at in 0usize..2000, with in 0u8..127, in_proof in any::<bool>()) {
        let case = Case::new();
        let ticket = case.ticket();
        let proof = case.proof(&ticket);
        let changed = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            let at = at % bytes.len();
            bytes[at] = if bytes[at] == with { bytes[at] ^ 1 } else { with };
            String::from_utf8(bytes).unwrap()
        };
        // A proof for the changed ticket, as a thief of the client's key could make it.
        let (ticket, proof) = match in_proof {
            true => (ticket.clone(), changed(&proof)),
            false => (changed(&ticket), case.proof(&changed(&ticket))),
        };
        prop_assert!(case.check(&ticket, &proof, NOW).is_err());
        prop_assert_eq!(case.gate.num_used(), 0);
    }

    #[test]
    fn any_text_is_refused_without_a_panic(ticket in "\\PC{0,300}", tail in "[A-Za-z0-9_.-]{0,300}") {
        let case = Case::new();
        prop_assert!(case.check(&ticket, &tail, NOW).is_err());
        let token = format!("v4.public.{tail}");
        prop_assert!(case.check(&token, &tail, NOW).is_err());
        prop_assert!(case.check(&case.ticket(), &token, NOW).is_err());
    }

    #[test]
    fn each_nonce_is_used_once(
        steps in proptest::collection::vec((0u8..8, 0u8..16, -30i64..400), 1..300),
    ) {
        // The reference remembers everything.
        let mut known = HashSet::new();
        let mut used = UsedProofs::new(30, 12);
        let mut now = NOW;
        for (ticket, nonce, step) in steps {
            now = UnixTime(now.0.checked_add_signed(step).unwrap());
            let expires_at = UnixTime(NOW.0 + 1000 * (1 + u64::from(ticket)));
            let holder = ["a", "b", "c"][usize::from(ticket) % 3];
            // The gate asks only about tickets that have not expired.
            if expires_at < now.minus(CLOCK_SKEW) {
                continue;
            }
            let outcome = used.spend(holder, TicketId([ticket; 16]), expires_at, [nonce; 16], now);
            if outcome.is_ok() {
                prop_assert!(known.insert((ticket, nonce)), "used twice");
            }
            prop_assert!(used.len() <= 30);
        }
    }

    /// A holder with fewer proofs than its share is never refused, whatever another one does.
    #[test]
    fn no_holder_displaces_a_smaller_one(
        steps in proptest::collection::vec((0u8..10, any::<bool>()), 1..300),
    ) {
        let (mut used, end) = (UsedProofs::new(40, 16), NOW.plus(DEFAULT_LIFE));
        let mut num_small = 0u8;
        for (idx, (ticket, is_small)) in steps.into_iter().enumerate() {
            let nonce = (idx as u128).to_le_bytes();
            if is_small && num_small < 16 {
                num_small += 1;
                prop_assert_eq!(used.spend("small", TicketId([99; 16]), end, nonce, NOW), Ok(()));
            } else {
                // It gets new tickets all the time.
                let end = end.plus(Duration::from_secs(idx as u64));
                let _ = used.spend("large", TicketId([ticket; 16]), end, nonce, NOW);
            }
        }
    }
}
