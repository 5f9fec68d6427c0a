//! One client and one server: `p2p_one_to_one [tcp|cma|libfabric[:PROVIDER]|verbs[:DEVICE]]`.
//!
//! The client puts 2048 bytes into the server's memory and tells it; the server doubles every value; the
//! client gets them back into a buffer that holds something else, and checks that each is twice what it
//! sent. Client and server are processes of their own.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use message_engine::engine::{Access, Descriptor, Engine, EngineConfig, open_fabric};
use rand::RngExt;
use switchyard_bench_harness::engine::fabrics;

const NUM_VALUES: usize = 512;
const BYTES: u64 = 4 * NUM_VALUES as u64;
const SERVER: &str = "P2P_ONE_TO_ONE_SERVER";

fn main() -> ExitCode {
    let transport = std::env::args().nth(1).unwrap_or_else(|| "tcp".to_owned());
    let done = match std::env::var(SERVER) {
        Ok(client) => serve(&transport, &client),
        Err(_) => run_client(&transport),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn start(transport: &str) -> Result<Engine, Box<dyn Error>> {
    let local = EngineConfig::local();
    let fabric = open_fabric(transport, Some(local.bind.ip()), &fabrics())?;
    Ok(Engine::start(EngineConfig { fabrics: vec![fabric], ..local })?)
}

fn run_client(transport: &str) -> Result<bool, Box<dyn Error>> {
    let engine = start(transport)?;
    let hex: String = engine.metadata().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut server = Command::new(std::env::current_exe()?)
        .arg(transport)
        .env(SERVER, hex)
        .stdout(Stdio::piped())
        .spawn()?;
    let checked = put_and_get(&engine);
    // Without its client the server ends by itself; it is not waited for without end.
    drop(engine);
    for line in server.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        println!("{}", line?);
    }
    let is_ended = server.wait()?.success();
    Ok(checked? && is_ended)
}

fn put_and_get(engine: &Engine) -> Result<bool, Box<dyn Error>> {
    let connection = engine.accept(soon())?;
    let memory = engine.alloc(BYTES as usize, Access::RemoteReadWrite)?;
    let mut rng = rand::rng();
    let values: Vec<f32> = (0..NUM_VALUES).map(|_| rng.random_range(-1000.0..1000.0)).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    memory.copy_in(0, &bytes)?;
    let there = Descriptor::from_bytes(&engine.next_notification(soon())?.bytes)?;
    connection.write(&memory.whole(), &there, soon())?;
    println!("client: put {BYTES} bytes by {}", connection.transport());
    memory.copy_in(0, &[0xa5; BYTES as usize])?;
    connection.notify(b"put", soon())?;
    engine.next_notification(soon())?;
    connection.read(&memory.whole(), &there, soon())?;
    let mut found = [0; BYTES as usize];
    memory.copy_out(0, &mut found)?;
    let (words, _) = found.as_chunks::<4>();
    let is_twice = |(word, value): &(&[u8; 4], &f32)| f32::from_le_bytes(**word) == 2.0 * **value;
    let num_errors = NUM_VALUES - words.iter().zip(&values).filter(is_twice).count();
    if num_errors == 0 {
        println!("client: got {BYTES} bytes, every value twice what was put ✓ PASS");
    } else {
        println!("client: got {BYTES} bytes ✗ FAIL ({num_errors} errors)");
    }
    Ok(num_errors == 0)
}

fn serve(transport: &str, client: &str) -> Result<bool, Box<dyn Error>> {
    let digits = |at: usize| u8::from_str_radix(client.get(at..at + 2)?, 16).ok();
    let metadata: Option<Vec<u8>> = (0..client.len()).step_by(2).map(digits).collect();
    let engine = start(transport)?;
    let connection = engine.add_remote_endpoint(&metadata.ok_or("no client")?, soon())?;
    let memory = engine.alloc(BYTES as usize, Access::RemoteReadWrite)?;
    connection.notify(&connection.advertise(&memory.whole())?.to_bytes(), soon())?;
    engine.next_notification(soon())?;
    let mut bytes = [0; BYTES as usize];
    memory.copy_out(0, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<4>();
    let twice = |word: &[u8; 4]| (2.0 * f32::from_le_bytes(*word)).to_le_bytes();
    memory.copy_in(0, words.iter().map(twice).collect::<Vec<_>>().as_flattened())?;
    println!("server: doubled {NUM_VALUES} values");
    connection.notify(b"doubled", soon())?;
    // The client leaves first: whoever does could take the other's last acknowledgement with it.
    let deadline = soon();
    while connection.closed().is_none() {
        if Instant::now() >= deadline {
            return Err("the client does not leave".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(true)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}
