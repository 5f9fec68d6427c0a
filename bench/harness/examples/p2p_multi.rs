//! M clients and N servers: `p2p_multi M N [TRANSPORT [MAX_BYTES [ITERATIONS]]]`, each a process.
//!
//! In every iteration each client puts a message into its slot at every server at once, tells the
//! servers, waits for their acknowledgements, and gets the messages back. Timed is all of that. The data
//! is new in every iteration and what it is got back into holds something else before, so that nothing
//! passes that has not moved twice. One line per size: the mean time of the slowest client, and whether
//! every byte of every iteration was right. By default 8 MiB and 200 iterations, after 10 that are not timed.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use message_engine::engine::{Access, Connection, Descriptor, Engine, EngineConfig, open_fabric};
use rand::Rng;
use switchyard_bench_harness::engine::fabrics;

const ROLE: &str = "P2P_MULTI_ROLE";
const MIN_BYTES: u64 = 8;

struct Args {
    num_clients: usize,
    num_servers: usize,
    transport: String,
    max_bytes: u64,
    iterations: u64,
}

fn main() -> ExitCode {
    let done = Args::read().and_then(|args| match std::env::var(ROLE) {
        Err(_) => orchestrate(&args),
        Ok(role) if role == "server" => serve(&args).map(|()| true),
        Ok(servers) => put_and_get(&args, &servers).map(|()| true),
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

impl Args {
    fn read() -> Result<Self, Box<dyn Error>> {
        let mut args = std::env::args().skip(1);
        let mut number = |default: u64| args.next().map_or(Ok(default), |text| text.parse());
        let (num_clients, num_servers) = (number(1)? as usize, number(1)? as usize);
        let mut args = std::env::args().skip(3);
        let transport = args.next().unwrap_or_else(|| "tcp".to_owned());
        let max_bytes = args.next().map_or(Ok(8 << 20), |text| text.parse())?;
        let iterations = args.next().map_or(Ok(200), |text| text.parse())?;
        if num_clients == 0 || num_servers == 0 || iterations == 0 || max_bytes < MIN_BYTES {
            return Err("usage: p2p_multi M N [TRANSPORT [MAX_BYTES [ITERATIONS]]]".into());
        }
        Ok(Self { num_clients, num_servers, transport, max_bytes, iterations })
    }

    fn sizes(&self) -> impl Iterator<Item = u64> + use<> {
        let most = self.max_bytes;
        std::iter::successors(Some(MIN_BYTES), |bytes| Some(bytes * 2))
            .take_while(move |bytes| *bytes <= most)
    }
}

/// A process of this program, ended when dropped.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(role: &str) -> Result<Self, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(std::env::args().skip(1))
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().ok_or("no output")?;
        Ok(Self { child, lines: BufReader::new(stdout).lines() })
    }

    fn line(&mut self) -> Result<String, Box<dyn Error>> {
        Ok(self.lines.next().ok_or("a process has ended; its message says why")??)
    }

    fn go(&mut self) -> Result<(), Box<dyn Error>> {
        Ok(self.child.stdin.as_mut().ok_or("no input")?.write_all(b"go\n")?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn orchestrate(args: &Args) -> Result<bool, Box<dyn Error>> {
    let mut servers = Vec::new();
    let mut metadata = Vec::new();
    for _ in 0..args.num_servers {
        let mut server = Process::start("server")?;
        metadata.push(server.line()?);
        servers.push(server);
    }
    let start = |_| Process::start(&metadata.join(","));
    let mut clients = (0..args.num_clients).map(start).collect::<Result<Vec<_>, _>>()?;
    let mut all_right = true;
    println!("size\t\tavg_ms");
    for bytes in args.sizes() {
        for client in &mut clients {
            client.go()?;
        }
        let (mut slowest, mut num_errors) = (0f64, 0u64);
        for client in &mut clients {
            let line = client.line()?;
            let (ms, errors) = line.split_once(' ').ok_or("a client said something else")?;
            slowest = slowest.max(ms.parse()?);
            num_errors += errors.parse::<u64>()?;
        }
        all_right &= num_errors == 0;
        let verdict = match num_errors {
            0 => "✓ PASS".to_owned(),
            some => format!("✗ FAIL ({some} errors)"),
        };
        println!("{bytes}\t\t{slowest:.3}\t\t{verdict}");
    }
    Ok(all_right)
}

fn start(args: &Args) -> Result<Engine, Box<dyn Error>> {
    let local = EngineConfig::local();
    let fabric = open_fabric(&args.transport, Some(local.bind.ip()), &fabrics())?;
    Ok(Engine::start(EngineConfig { fabrics: vec![fabric], ..local })?)
}

/// Gives every client a slot, and answers every notification with one.
fn serve(args: &Args) -> Result<(), Box<dyn Error>> {
    let engine = start(args)?;
    let hex: String = engine.metadata().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{hex}");
    let mut peers: Vec<(Connection, message_engine::engine::MemoryRegion)> = Vec::new();
    for _ in 0..args.num_clients {
        let connection = engine.accept(soon())?;
        let slot = engine.alloc(args.max_bytes as usize, Access::RemoteReadWrite)?;
        connection.notify(&connection.advertise(&slot.whole())?.to_bytes(), soon())?;
        peers.push((connection, slot));
    }
    loop {
        // Ended by the parent.
        let from = engine.next_notification(soon())?.connection;
        if let Some((connection, _)) = peers.iter().find(|(connection, _)| connection.id() == from)
        {
            connection.notify(b"ack", soon())?;
        }
    }
}

fn put_and_get(args: &Args, servers: &str) -> Result<(), Box<dyn Error>> {
    let engine = start(args)?;
    let mut peers: Vec<(Connection, Descriptor)> = Vec::new();
    for hex in servers.split(',') {
        let digits = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
        let metadata: Option<Vec<u8>> = (0..hex.len()).step_by(2).map(digits).collect();
        let connection = engine.add_remote_endpoint(&metadata.ok_or("no metadata")?, soon())?;
        let slot = Descriptor::from_bytes(&engine.next_notification(soon())?.bytes)?;
        peers.push((connection, slot));
    }
    let room = args.max_bytes * peers.len() as u64;
    let source = engine.alloc(room as usize, Access::Local)?;
    let target = engine.alloc(room as usize, Access::Local)?;
    let mut rng = rand::rng();
    let mut go = std::io::stdin().lines();
    for bytes in args.sizes() {
        go.next().ok_or("the parent has ended")??;
        let (mut elapsed, mut num_errors) = (Duration::ZERO, 0u64);
        let mut data = vec![0; bytes as usize * peers.len()];
        let mut found = data.clone();
        let warm_up = args.iterations.div_ceil(10).min(10);
        for iteration in 0..warm_up + args.iterations {
            rng.fill_bytes(&mut data);
            source.copy_in(0, &data)?;
            let opposite: Vec<u8> = data.iter().map(|byte| !byte).collect();
            target.copy_in(0, &opposite)?;
            let begin = Instant::now();
            let mut transfers = Vec::with_capacity(peers.len());
            for (idx, (connection, slot)) in peers.iter().enumerate() {
                let span = source.span(idx as u64 * bytes, bytes)?;
                transfers.push(connection.start_write(&span, &slot.sub(0, bytes)?, soon())?);
            }
            for ((connection, _), transfer) in peers.iter().zip(transfers.drain(..)) {
                transfer.wait()?;
                connection.notify(b"put", soon())?;
            }
            for _ in &peers {
                engine.next_notification(soon())?;
            }
            for (idx, (connection, slot)) in peers.iter().enumerate() {
                let span = target.span(idx as u64 * bytes, bytes)?;
                transfers.push(connection.start_read(&span, &slot.sub(0, bytes)?, soon())?);
            }
            for transfer in transfers {
                transfer.wait()?;
            }
            if iteration >= warm_up {
                elapsed += begin.elapsed();
            }
            target.copy_out(0, &mut found)?;
            num_errors +=
                found.iter().zip(&data).filter(|(found, sent)| found != sent).count() as u64;
        }
        println!("{} {num_errors}", elapsed.as_secs_f64() * 1e3 / args.iterations as f64);
    }
    Ok(())
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
