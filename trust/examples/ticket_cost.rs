//! Prints the cost of a ticket, of a proof and of their check: the median of 2,000 each.
//!
//! ```sh
//! cargo run -p switchyard-trust --example ticket_cost
//! ```

use std::error::Error;
use std::time::{Duration, Instant, SystemTime};

use switchyard_trust::Role;
use switchyard_trust::ticket::{
    Claims, DEFAULT_LIFE, Gate, Handshake, SecretKey, TrustedKey, UnixTime, prove,
};

const ROUNDS: usize = 2000;

fn main() -> Result<(), Box<dyn Error>> {
    let (signer, client) = (SecretKey::generate()?, SecretKey::generate()?);
    let now = UnixTime::from(SystemTime::now());
    let fleet = "f".repeat(32);
    let keys = [TrustedKey {
        key: signer.public().clone(),
        fleet: fleet.clone(),
        expires_at: now.plus(DEFAULT_LIFE),
    }];
    // A hello with a client's payload has about as many bytes.
    let hello = [7; 320];
    let handshake =
        Handshake { server: "server-0", incarnation: 1, channel: Some([1; 32]), hello: &hello };
    let gate = Gate::default();
    let (mut signs, mut proves, mut checks) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let key = client.public().clone();
        let claims = Claims::new(fleet.clone(), "client-1".into(), key, 1, now, DEFAULT_LIFE);
        let (ticket, took) = timed(|| claims.sign(&signer));
        signs.push(took);
        let ticket = ticket?;
        let (proof, took) = timed(|| prove(&ticket, &handshake, &client));
        proves.push(took);
        let proof = proof?;
        let (claims, took) =
            timed(|| gate.check(&ticket, &proof, &handshake, Role::Client, &keys, 0, now));
        checks.push(took);
        claims?;
    }
    for (what, times) in [("ticket", signs), ("proof", proves), ("check", checks)] {
        println!("{what}: {:.1} us", median(times).as_secs_f64() * 1e6);
    }
    Ok(())
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let result = work();
    (result, begin.elapsed())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
