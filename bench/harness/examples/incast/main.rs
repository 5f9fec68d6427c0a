//! Measures many senders into few receivers over a real transport, with and without credits.
//!
//! ```text
//! cargo run --release -p switchyard-bench-harness --example incast -- [OPTION VALUE]…
//!   --shapes 32v8,8v32           senders and receivers
//!   --over channel               the transports of slots; writes or reads: the message engine
//!   --credits off,turn,shortest  order of grants; engine: the engine's defaults
//!   --bytes 8388608              from every sender to every receiver
//!   --rounds 7                   the report has their median
//!   --transport shm              as for --transport elsewhere; of the engine: cma, tcp, libfabric:…
//!   --window 4194304             most granted bytes in flight to one receiver
//!   --slot 1048576               bytes of a slot, of 8 frames
//!   --json FILE                  all results
//! ```
//!
//! All senders are threads of one process, all receivers are threads of another. A round begins when all senders are
//! ready. It ends when each sender has a confirmation from each receiver that its message has arrived and that all of
//! its bytes were right. For the engine see `engine.rs`.

mod ends;
mod engine;
mod wire;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, Command, ExitCode, Stdio};

use message_engine::credit::{CreditConfig, GrantOrder};
use p2p_core::transports::{TransportSpec, Transports};
use switchyard_bench_harness::p2p::networks;
use switchyard_bench_harness::stats::median;

/// Settings of a run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) senders: usize,
    pub(crate) receivers: usize,
    pub(crate) bytes: u64,
    pub(crate) rounds: usize,
    pub(crate) credits: String,
    pub(crate) window: u64,
    pub(crate) slot: usize,
    pub(crate) transport: String,
    pub(crate) over: Over,
}

/// The path of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// Frames of channels.
    Channels,
    /// Writes of the engine, by the senders.
    Writes,
    /// Reads of the engine, by the receivers.
    Reads,
}

impl Over {
    const ALL: [(Self, &str); 3] =
        [(Self::Channels, "channel"), (Self::Writes, "writes"), (Self::Reads, "reads")];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(over, _)| *over == self).map_or("", |(_, name)| *name)
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(over, _)| *over)
    }
}

impl Plan {
    /// Returns the settings of the credits; `None` without credits.
    pub(crate) fn credit_config(&self) -> Result<Option<CreditConfig>, String> {
        let order = match self.credits.as_str() {
            "off" | "engine" => return Ok(None),
            "turn" => GrantOrder::RoundRobin,
            "shortest" => GrantOrder::ShortestFirst,
            other => {
                return Err(format!(
                    "`{other}` is no kind of credits: off, turn, shortest, engine"
                ));
            }
        };
        let config = CreditConfig {
            window_bytes: self.window,
            sender_window_bytes: self.window.div_ceil(2),
            grant_bytes: (self.window / 8).max(1),
            unscheduled_bytes: 4096,
            max_senders: self.senders,
            order,
            expiry_ns: 10_000_000_000,
            ..CreditConfig::default()
        };
        config.check().map_err(text)?;
        Ok(Some(config))
    }

    pub(crate) fn transports(&self) -> Result<Transports, String> {
        let spec: TransportSpec = self.transport.parse().map_err(text)?;
        networks().open(&spec).map_err(text)
    }

    pub(crate) fn encode(&self, addrs: &[String]) -> String {
        let Self { senders, receivers, bytes, rounds, credits, window, slot, transport, over } =
            self;
        let (over, addrs) = (over.name(), addrs.join(","));
        format!(
            "{senders} {receivers} {bytes} {rounds} {credits} {window} {slot} {transport} {over} {addrs}"
        )
    }

    fn decode(job: &str) -> Option<(Self, Vec<String>)> {
        let words: Vec<&str> = job.split(' ').collect();
        let [senders, receivers, bytes, rounds, credits, window, slot, transport, over, addrs] =
            words[..]
        else {
            return None;
        };
        let plan = Self {
            senders: senders.parse().ok()?,
            receivers: receivers.parse().ok()?,
            bytes: bytes.parse().ok()?,
            rounds: rounds.parse().ok()?,
            credits: credits.to_owned(),
            window: window.parse().ok()?,
            slot: slot.parse().ok()?,
            transport: transport.to_owned(),
            over: Over::of(over)?,
        };
        Some((plan, addrs.split(',').map(str::to_owned).collect()))
    }
}

/// The times of one run.
pub(crate) struct Figures {
    pub(crate) plan: Plan,
    pub(crate) transport: String,
    pub(crate) ms: Vec<f64>,
}

impl Figures {
    fn median_ms(&self) -> f64 {
        median(&mut self.ms.clone())
    }

    fn gb_per_s(&self) -> f64 {
        let plan = &self.plan;
        (plan.senders * plan.receivers) as f64 * plan.bytes as f64 / self.median_ms() / 1e6
    }
}

fn main() -> ExitCode {
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    let done = match std::env::var(JOB) {
        Ok(job) => Plan::decode(&job)
            .ok_or_else(|| format!("cannot read the job `{job}`"))
            .and_then(|(plan, addrs)| match plan.over {
                Over::Channels => ends::send(&plan, &addrs),
                Over::Writes | Over::Reads => engine::send(&plan, &addrs),
            }),
        Err(_) => run_all(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("incast: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_all() -> Result<(), String> {
    let mut options = [
        ("--shapes", "32v8,8v32".to_owned()),
        ("--over", "channel".to_owned()),
        ("--credits", "off,turn,shortest".to_owned()),
        ("--bytes", "8388608".to_owned()),
        ("--rounds", "7".to_owned()),
        ("--transport", "shm".to_owned()),
        ("--window", "4194304".to_owned()),
        ("--slot", "1048576".to_owned()),
        ("--json", String::new()),
    ];
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let option = options.iter_mut().find(|(name, _)| *name == arg);
        let (_, value) =
            option.ok_or_else(|| format!("no option `{arg}`; see the source's head"))?;
        *value = args.next().ok_or_else(|| format!("{arg} needs a value"))?;
    }
    let value = |name: &str| {
        options.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value.as_str())
    };
    let number = |name: &str| {
        let found = value(name);
        found.parse::<u64>().map_err(|_| format!("{name}: `{found}` is not a number"))
    };
    let over = value("--over");
    let over = Over::of(over).ok_or_else(|| format!("`{over}`: channel, writes or reads"))?;
    let mut all = Vec::new();
    for credits in value("--credits").split(',') {
        for shape in value("--shapes").split(',') {
            let (senders, receivers) = shape
                .split_once('v')
                .and_then(|(m, n)| Some((m.parse().ok()?, n.parse().ok()?)))
                .filter(|(m, n)| (1..=256).contains(m) && (1..=256).contains(n))
                .ok_or_else(|| format!("`{shape}` is not a shape such as 32v8"))?;
            let plan = Plan {
                senders,
                receivers,
                bytes: number("--bytes")?.max(1),
                rounds: number("--rounds")?.max(1) as usize,
                credits: credits.to_owned(),
                window: number("--window")?,
                slot: number("--slot")? as usize,
                transport: value("--transport").to_owned(),
                over,
            };
            let measured = match over {
                Over::Channels => run(plan)?,
                Over::Writes | Over::Reads => engine::run(plan)?,
            };
            println!(
                "{:>8} {} credits {credits:<8} {shape:>6}: {:.1} ms, {:.2} GB/s",
                measured.transport,
                over.name(),
                measured.median_ms(),
                measured.gb_per_s()
            );
            all.push(measured);
        }
        ratio(&all, credits);
    }
    match value("--json") {
        "" => Ok(()),
        path => std::fs::write(path, json(&all)).map_err(|error| format!("{path}: {error}")),
    }
}

/// Runs one plan: the receivers here, the senders in a process of their own.
fn run(plan: Plan) -> Result<Figures, String> {
    let receivers = ends::Receivers::start(&plan)?;
    let program = std::env::current_exe().map_err(text)?;
    let mut child = Process(
        Command::new(program)
            .env(JOB, plan.encode(receivers.addrs()))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(text)?,
    );
    let (mut ms, mut transport) = (Vec::new(), String::new());
    for line in child.0.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(text)?;
        match line.split_once(' ') {
            Some(("ms", value)) => ms.push(value.parse().map_err(text)?),
            Some(("transport", value)) => value.clone_into(&mut transport),
            _ => return Err(format!("the senders said `{line}`")),
        }
    }
    if !child.0.wait().map_err(text)?.success() || ms.len() != plan.rounds {
        return Err(format!("the senders failed after {} of {} rounds", ms.len(), plan.rounds));
    }
    receivers.join()?;
    Ok(Figures { plan, transport, ms })
}

/// A child process. Dropping it kills the process.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Without an error it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ratio(all: &[Figures], credits: &str) {
    let time = |senders, receivers| {
        let is_it = |m: &&Figures| {
            (m.plan.senders, m.plan.receivers) == (senders, receivers) && m.plan.credits == credits
        };
        all.iter().find(is_it).map(Figures::median_ms)
    };
    for many in
        all.iter().filter(|m| m.plan.credits == credits && m.plan.senders > m.plan.receivers)
    {
        let (m, n) = (many.plan.senders, many.plan.receivers);
        if let Some(few) = time(n, m) {
            println!(
                "         credits {credits:<8} {m}v{n} / {n}v{m} = {:.2}",
                many.median_ms() / few
            );
        }
    }
}

fn json(all: &[Figures]) -> String {
    let mut out = String::from("[\n");
    for (idx, measured) in all.iter().enumerate() {
        let Plan { senders, receivers, bytes, credits, window, slot, over, .. } = &measured.plan;
        let over = over.name();
        let comma = if idx + 1 < all.len() { "," } else { "" };
        let _ = writeln!(
            out,
            r#"  {{"transport": "{}", "over": "{over}", "senders": {senders}, "receivers": {receivers}, "bytes": {bytes}, "credits": "{credits}", "window_bytes": {window}, "slot_bytes": {slot}, "median_ms": {:.3}, "gb_per_s": {:.3}, "ms": {:?}}}{comma}"#,
            measured.transport,
            measured.median_ms(),
            measured.gb_per_s(),
            measured.ms
        );
    }
    out + "]\n"
}

/// Prints a line for the parent on standard output.
pub(crate) fn say(line: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(text)
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub(crate) const JOB: &str = "SWITCHYARD_INCAST_JOB";
