//! The same through the message engine: every sender and receiver is an engine with a thread of its own.
//! Senders write into the receivers' memory, or receivers read the senders'.
//!
//! A round begins with the start of all transfers, and ends with the end of the last. Then every byte is
//! compared. The first round, which touches memory for the first time, does not count.

use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use message_engine::credit::CreditConfig;
use message_engine::engine::{
    Access, Connection, DESCRIPTOR_BYTES, Descriptor, Engine, EngineConfig, MemoryRegion, Span,
    Transfer, open_fabric,
};
use switchyard_bench_harness::engine::fabrics;

use crate::ends::{part, patterns};
use crate::{Ended, JOB, Measured, Over, Plan, say, text};

/// Runs a plan: the receivers here, the senders in a process of their own.
pub(crate) fn run(plan: Plan) -> Result<Measured, String> {
    let receivers: Vec<Engine> =
        (0..plan.receivers).map(|_| engine(&plan)).collect::<Result<_, _>>()?;
    let addrs: Vec<String> = receivers.iter().map(|engine| hex(&engine.metadata())).collect();
    let program = std::env::current_exe().map_err(text)?;
    let child = Command::new(program)
        .env(JOB, plan.encode(&addrs))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(text)?;
    let mut senders = Senders::new(child)?;
    let pairs = meet_senders(&plan, &receivers)?;
    let transport = pairs[0].connection.transport().to_string();
    let (mut ms, pattern) = (Vec::new(), patterns(&plan));
    let mut stamped = pattern.to_vec();
    for round in 0..=plan.rounds as u64 {
        senders.tell(&format!("stamp {round}"))?;
        let took = match plan.over {
            Over::Reads => {
                let begin = Instant::now();
                let read =
                    |pair: &Pair| pair.connection.start_read(&pair.here, &pair.there, soon());
                finish(pairs.iter().map(read))?;
                begin.elapsed().as_secs_f64() * 1e3
            }
            _ => senders.tell("write")?.parse().map_err(text)?,
        };
        if round > 0 {
            ms.push(took);
        }
        each_stamp(stamped.len(), |at| stamped[at] = round as u8);
        let mut found = vec![0; plan.bytes as usize];
        for pair in &pairs {
            pair.memory.copy_out(pair.slot_at, &mut found).map_err(text)?;
            if found != stamped[pair.part_at..][..found.len()] {
                return Err(format!("other bytes arrived than were sent, round {round}"));
            }
        }
    }
    Ok(Measured { plan, transport, ms })
}

/// What the process of the senders does.
pub(crate) fn send(plan: &Plan, addrs: &[String]) -> Result<(), String> {
    let pattern = patterns(plan);
    let mut senders = Vec::new();
    for sender in 0..plan.senders {
        let engine = engine(plan)?;
        let memory = engine.alloc(pattern.len(), Access::RemoteReadWrite).map_err(text)?;
        memory.copy_in(0, &pattern).map_err(text)?;
        let mut met = Vec::new();
        for (receiver, addr) in addrs.iter().enumerate() {
            let metadata = unhex(addr).ok_or("the receivers' metadata cannot be read")?;
            let connection = engine.add_remote_endpoint(&metadata, soon()).map_err(text)?;
            let part_at = part(sender as u64, receiver as u64);
            let here = memory.span(part_at as u64, plan.bytes).map_err(text)?;
            let mut greeting = (sender as u64).to_le_bytes().to_vec();
            greeting.extend((part_at as u64).to_le_bytes());
            greeting.extend(connection.advertise(&here).map_err(text)?.to_bytes());
            connection.notify(&greeting, soon()).map_err(text)?;
            met.push((connection, here));
        }
        senders.push((engine, memory, met));
    }
    let mut pairs = Vec::new();
    for (engine, _, met) in &mut senders {
        while !met.is_empty() {
            let answer = engine.next_notification(soon()).map_err(text)?;
            let position = met.iter().position(|(known, _)| known.id() == answer.connection);
            let (connection, here) = met.swap_remove(position.ok_or("a stranger's notification")?);
            pairs.push((connection, here, Descriptor::from_bytes(&answer.bytes).map_err(text)?));
        }
    }
    for line in std::io::stdin().lines() {
        let line = line.map_err(text)?;
        if let Some(round) = line.strip_prefix("stamp ") {
            let round: u64 = round.parse().map_err(text)?;
            for (_, memory, _) in &senders {
                let mut failed = Ok(());
                each_stamp(pattern.len(), |at| {
                    failed = failed.clone().and(memory.copy_in(at as u64, &[round as u8]));
                });
                failed.map_err(text)?;
            }
            say("ok")?;
        } else {
            let begin = Instant::now();
            finish(pairs.iter().map(|(to, here, there)| to.start_write(here, there, soon())))?;
            say(&format!("{}", begin.elapsed().as_secs_f64() * 1e3))?;
        }
    }
    Ok(())
}

/// A sender and a receiver, at the receiver.
struct Pair {
    connection: Connection,
    memory: MemoryRegion,
    /// Where the message belongs, and where it is in the sender's memory.
    here: Span,
    there: Descriptor,
    slot_at: u64,
    /// Where it is in the pattern.
    part_at: usize,
}

fn meet_senders(plan: &Plan, receivers: &[Engine]) -> Result<Vec<Pair>, String> {
    let mut pairs = Vec::new();
    for engine in receivers {
        let bytes = plan.senders * plan.bytes as usize;
        let memory = engine.alloc(bytes, Access::RemoteReadWrite).map_err(text)?;
        let mut connections = Vec::new();
        for _ in 0..plan.senders {
            connections.push(engine.accept(soon()).map_err(text)?);
        }
        for _ in 0..plan.senders {
            let greeting = engine.next_notification(soon()).map_err(text)?;
            let position = connections.iter().position(|known| known.id() == greeting.connection);
            let connection = connections.swap_remove(position.ok_or("a stranger's notification")?);
            let told = greeting.bytes;
            let (numbers, descriptor) = told.split_at_checked(16).ok_or("a short greeting")?;
            if descriptor.len() != DESCRIPTOR_BYTES {
                return Err("a greeting without descriptor".to_owned());
            }
            let number =
                |at: usize| numbers[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
            let slot_at = number(0) * plan.bytes;
            let here = memory.span(slot_at, plan.bytes).map_err(text)?;
            let answer = connection.advertise(&here).map_err(text)?.to_bytes();
            connection.notify(&answer, soon()).map_err(text)?;
            let there = Descriptor::from_bytes(descriptor).map_err(text)?;
            let (memory, part_at) = (memory.clone(), number(8) as usize);
            pairs.push(Pair { connection, memory, here, there, slot_at, part_at });
        }
    }
    Ok(pairs)
}

/// Starts all, then waits for all.
fn finish<E: std::fmt::Display>(
    starting: impl Iterator<Item = Result<Transfer, E>>,
) -> Result<(), String> {
    let started: Vec<Transfer> = starting.collect::<Result<_, E>>().map_err(text)?;
    started.into_iter().try_for_each(|transfer| transfer.wait().map(drop)).map_err(text)
}

/// The process of the senders: does what it is told, line by line.
struct Senders {
    _child: Ended,
    orders: std::process::ChildStdin,
    answers: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Senders {
    fn new(mut child: std::process::Child) -> Result<Self, String> {
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let child = Ended(child);
        let orders = orders.ok_or("the senders have no input")?;
        let answers = answers.ok_or("the senders have no output")?;
        Ok(Self { _child: child, orders, answers: BufReader::new(answers).lines() })
    }

    fn tell(&mut self, order: &str) -> Result<String, String> {
        writeln!(self.orders, "{order}").map_err(text)?;
        self.answers.next().ok_or("the senders have ended")?.map_err(text)
    }
}

fn engine(plan: &Plan) -> Result<Engine, String> {
    let local = EngineConfig::local();
    let fabric = {
        let local = Some(Ipv4Addr::LOCALHOST.into());
        open_fabric(&plan.transport, local, &fabrics()).map_err(text)?
    };
    let credit = match (plan.credits.as_str(), plan.credit_config()?) {
        ("engine", _) => local.credit,
        (_, Some(credit)) => CreditConfig { max_senders: 256, ..credit },
        (_, None) => CreditConfig {
            window_bytes: UNLIMITED,
            sender_window_bytes: UNLIMITED,
            grant_bytes: UNLIMITED,
            unscheduled_bytes: UNLIMITED,
            max_senders: 256,
            ..local.credit
        },
    };
    let config = EngineConfig { fabrics: vec![fabric], credit, ..local };
    Engine::start(config).map_err(text)
}

/// The bytes that tell rounds apart: one in every page.
fn each_stamp(bytes: usize, stamp: impl FnMut(usize)) {
    (5..bytes).step_by(4096).for_each(stamp);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    (0..text.len()).step_by(2).map(digits).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(300)
}

/// As much as no run has.
const UNLIMITED: u64 = 1 << 40;
