//! Measures latency and bandwidth of the verbs transport beside perftest's tools, in turns, on one device.
//!
//! ```text
//! cargo run --release -p switchyard-bench-harness --features verbs --example verbs_bench -- [REPEATS]
//! ```
//!
//! Both use the same device in loopback, the same message sizes, queue depth and number of operations. The program
//! prints one JSON line per measurement, and a table of medians and ratios.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2p_core::endpoint::Endpoint;
use p2p_core::network::{JoinedSide, Network, Route, SideDescription};
use p2p_core::{Region, RemoteRange, SlotConfig, SlotKey, SlotLayout};
use switchyard_bench_harness::stats::median;
use verbs_transport::{VerbsConfig, VerbsNetwork, device_names};

const LIMIT: Duration = Duration::from_secs(60);
const LATENCY_ROUNDS: usize = 3000;
const WARM_UP: usize = 300;
const BANDWIDTH_ROUNDS: usize = 1500;
const BANDWIDTH_BYTES: usize = 64 << 10;
/// Queue depth, as in perftest.
const DEPTH: u32 = 128;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).map(String::as_str) == Some("peer") {
        return peer(&args[2]);
    }
    let repeats = args.get(1).map_or(Ok(5), |text| text.parse()).context("REPEATS")?;
    let device = device_names().into_iter().next().context("this host has no RDMA device")?;
    let mut rows: Vec<(&str, &str, Vec<f64>, Vec<f64>)> = vec![
        ("write 8 B, half round trip", "us", Vec::new(), Vec::new()),
        ("fetch-add 8 B", "us", Vec::new(), Vec::new()),
        ("write 64 KiB", "MB/s", Vec::new(), Vec::new()),
    ];
    for repeat in 0..repeats {
        let ours = ours()?;
        let theirs = perftest(&device)?;
        for (row, (own, other)) in rows.iter_mut().zip(ours.into_iter().zip(theirs)) {
            println!(
                "{{\"repeat\": {repeat}, \"what\": \"{}\", \"unit\": \"{}\", \"switchyard\": {own:.3}, \"perftest\": {other:.3}}}",
                row.0, row.1
            );
            row.2.push(own);
            row.3.push(other);
        }
    }
    println!("\n| measurement | unit | switchyard | perftest | ratio |\n|---|---|---|---|---|");
    for (what, unit, mut ours, mut theirs) in rows {
        let (ours, theirs) = (median(&mut ours), median(&mut theirs));
        println!("| {what} | {unit} | {ours:.2} | {theirs:.2} | {:.3} |", ours / theirs);
    }
    Ok(())
}

/// Returns write latency, fetch-add latency and write bandwidth.
fn ours() -> Result<[f64; 3]> {
    let network = VerbsNetwork::open(config())?;
    let side = network.open(&layout()?, route())?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["peer", &encode(&side.description())])
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .spawn()?;
    let described = line_after(&mut child, "description ")?;
    let mut joined = side.join(&decode(&described)?)?;
    let mut end = Side::new(&mut joined)?;
    writeln!(child.stdin.as_mut().context("stdin")?)?;

    // Reads the clock once per round, as perftest does: a reading is not cheap on an emulated processor.
    let mut latencies = Vec::with_capacity(LATENCY_ROUNDS);
    let mut last = Instant::now();
    for round in 1..=(WARM_UP + LATENCY_ROUNDS) as u64 {
        end.write_word(round)?;
        end.wait_word(round)?;
        let now = Instant::now();
        if round as usize > WARM_UP {
            latencies.push((now - last).as_nanos() as f64 / 2000.0);
        }
        last = now;
    }
    end.joined.endpoint.quiet(Instant::now() + LIMIT)?;

    let mut adds = Vec::with_capacity(LATENCY_ROUNDS);
    let flag = RemoteRange { key: SlotKey, offset: 1 << 20, len: 8 };
    let mut last = Instant::now();
    for round in 0..WARM_UP + LATENCY_ROUNDS {
        end.joined.endpoint.add_flag(flag, 1)?;
        end.joined.endpoint.quiet(last + LIMIT)?;
        let now = Instant::now();
        if round >= WARM_UP {
            adds.push((now - last).as_nanos() as f64 / 1000.0);
        }
        last = now;
    }

    let remote = RemoteRange { key: SlotKey, offset: 0, len: BANDWIDTH_BYTES };
    let start = Instant::now();
    for _ in 0..BANDWIDTH_ROUNDS {
        let source = end.source.range(0, BANDWIDTH_BYTES).context("source")?;
        // SAFETY: no code writes the source after this.
        unsafe { end.joined.endpoint.put(remote, source)? };
    }
    end.joined.endpoint.quiet(Instant::now() + LIMIT)?;
    let rate = (BANDWIDTH_ROUNDS * BANDWIDTH_BYTES) as f64 / start.elapsed().as_secs_f64() / 1e6;
    child.kill()?;
    child.wait()?;
    Ok([median(&mut latencies), median(&mut adds), rate])
}

fn peer(described: &str) -> Result<()> {
    let network = VerbsNetwork::open(config())?;
    let side = network.open(&layout()?, route())?;
    println!("description {}", encode(&side.description()));
    std::io::stdin().read_line(&mut String::new())?;
    let mut joined = side.join(&decode(described)?)?;
    let mut end = Side::new(&mut joined)?;
    for round in 1..=(WARM_UP + LATENCY_ROUNDS) as u64 {
        end.wait_word(round)?;
        end.write_word(round)?;
    }
    // The other side needs no more answers, and kills this process.
    std::thread::sleep(LIMIT);
    Ok(())
}

struct Side<'a> {
    joined: &'a mut JoinedSide,
    source: Region,
}

impl<'a> Side<'a> {
    fn new(joined: &'a mut JoinedSide) -> Result<Self> {
        let source = Region::anonymous(1 << 20)?;
        joined.endpoint.register(&source)?;
        Ok(Self { joined, source })
    }

    fn write_word(&mut self, value: u64) -> Result<()> {
        // Uses eight sources in turn, since the transport does not promise to copy small puts when they are posted.
        let at = (value % 8) as usize * 64;
        word(&self.source, at).store(value, Ordering::Relaxed);
        let source = self.source.range(at, 8).context("source")?;
        // SAFETY: the answer to this write comes before the word is used again.
        unsafe {
            self.joined.endpoint.put(RemoteRange { key: SlotKey, offset: 0, len: 8 }, source)?
        };
        Ok(())
    }

    fn wait_word(&self, value: u64) -> Result<()> {
        let flag = word(&self.joined.slot, 0);
        let mut num_looks = 0u64;
        while flag.load(Ordering::Acquire) < value {
            num_looks += 1;
            ensure!(num_looks < 10_000_000_000, "the peer is silent");
        }
        Ok(())
    }
}

fn word(region: &Region, offset: usize) -> &AtomicU64 {
    // SAFETY: aligned, in range, mapped as long as the region, only accessed atomically.
    unsafe { AtomicU64::from_ptr(region.as_ptr().add(offset).as_ptr().cast()) }
}

/// Returns the same three figures from perftest.
fn perftest(device: &str) -> Result<[f64; 3]> {
    let rounds = LATENCY_ROUNDS.to_string();
    let latency = |tool: &str| {
        // Typical, which is the median, is the fifth column.
        run_tool(device, tool, &["-s", "8", "-n", &rounds], 4)
    };
    let (rounds, bytes) = (BANDWIDTH_ROUNDS.to_string(), BANDWIDTH_BYTES.to_string());
    let rate =
        run_tool(device, "ib_write_bw", &["-s", &bytes, "-n", &rounds, "--report_gbits"], 3)?;
    Ok([latency("ib_write_lat")?, latency("ib_atomic_lat")?, rate * 1000.0 / 8.0])
}

/// Runs both sides of a tool. Returns a column of the last row of figures.
fn run_tool(device: &str, tool: &str, arguments: &[&str], column: usize) -> Result<f64> {
    let mut arguments = arguments.to_vec();
    if tool == "ib_atomic_lat" {
        // The tool has one size only.
        arguments.drain(..2);
    }
    let command = || {
        let mut command = Command::new(tool);
        command.args(["-d", device, "-F"]).args(&arguments).stdout(Stdio::piped());
        command
    };
    let mut server = command().stdout(Stdio::null()).spawn().with_context(|| tool.to_owned())?;
    let deadline = Instant::now() + LIMIT;
    let text = loop {
        std::thread::sleep(Duration::from_millis(300));
        let output = command().arg("127.0.0.1").stderr(Stdio::null()).output()?;
        if output.status.success() {
            break String::from_utf8_lossy(&output.stdout).into_owned();
        }
        if Instant::now() >= deadline {
            server.kill()?;
            bail!("{tool} finds no server: {}", String::from_utf8_lossy(&output.stdout));
        }
    };
    server.wait()?;
    let is_row = |line: &&str| {
        line.split_whitespace().next().is_some_and(|first| first.parse::<u64>().is_ok())
    };
    let row = text.lines().rfind(is_row).with_context(|| format!("no figures: {text}"))?;
    let found = row.split_whitespace().nth(column).context("a column is missing")?;
    found.parse().with_context(|| format!("`{found}` in `{row}`"))
}

fn line_after(child: &mut Child, mark: &str) -> Result<String> {
    let mut reader = BufReader::new(child.stdout.as_mut().context("stdout")?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    Ok(line.trim().strip_prefix(mark).context("no description")?.to_owned())
}

fn encode(described: &SideDescription) -> String {
    let SideDescription { address, remote_key, bytes, detail } = described;
    let detail: Vec<_> = detail.iter().map(u8::to_string).collect();
    format!("{address} {remote_key} {bytes} {}", detail.join(","))
}

fn decode(text: &str) -> Result<SideDescription> {
    let parts: Vec<_> = text.split(' ').collect();
    ensure!(parts.len() == 4, "a broken description");
    Ok(SideDescription {
        address: parts[0].parse()?,
        remote_key: parts[1].parse()?,
        bytes: parts[2].parse()?,
        detail: parts[3].split(',').map(str::parse).collect::<Result<_, _>>()?,
    })
}

fn config() -> VerbsConfig {
    VerbsConfig { send_queue_depth: DEPTH, stall_timeout_ms: 30_000, ..Default::default() }
}

fn layout() -> Result<SlotLayout> {
    Ok(SlotLayout::new(SlotConfig { slot_bytes: 2 << 20, num_frames: 2 })?)
}

fn route() -> Route {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    Route { local: here, remote: here }
}
