//! Measures how long a server takes to load experts from the page cache, beside `cat` of the same files.
//!
//! `load_bench DIR [--make PRESET LAYERS] [--threads N] [--rounds N] [--cold]` loads every expert of the checkpoint in
//! `DIR`. With `--make` it first writes a synthetic checkpoint there, in files of 1 GB. In each round it runs, in turn:
//!
//! - `cat`: N processes `cat FILE… > /dev/null`, with the files shared out evenly;
//! - `load`: opens the checkpoint and loads all experts on N threads;
//! - `digests`: opens it and computes the sampled digests on N threads, alone;
//! - `both`: what a server does: digests, then load.
//!
//! It prints one line of CSV for each: round, step, seconds, bytes. `cat` reads whole files, so compare bytes per
//! second. Everything must fit into the page cache. With `--cold` the files leave the page cache before each step, so
//! that the disk is measured. Run it with `--release`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use checkpoint::{Checkpoint, Coverage, MakeOptions, TensorFile, make_checkpoint};
use switchyard_expert_compute::{ExpertStore, Residency};

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    if let Some((preset, num_layers)) = &args.make {
        let mut options = MakeOptions::new(preset.parse()?, *num_layers);
        options.max_shard_bytes = 1_000_000_000;
        let written = make_checkpoint(&args.dir, &options, &mut |_, _| {})?;
        eprintln!("wrote {} bytes in {} files", written.tensor_bytes, written.num_shards);
    }
    println!("round,step,seconds,bytes");
    for round in 0..args.rounds {
        let report = |step, run: &dyn Fn() -> Step| {
            if args.cold {
                drop_from_cache(&args.dir)?;
            }
            report(round, step, run)
        };
        let cat = || cat(&args.dir, args.threads);
        let load = || load(&args.dir, args.threads);
        let digests = || digests(&args.dir, args.threads);
        let both = || {
            let open = Arc::new(Checkpoint::open(&args.dir)?);
            open.digests(Coverage::Sampled, args.threads, &mut |_, _| {})?;
            load_all(open, args.threads)
        };
        report("cat", &cat)?;
        report("load", &load)?;
        report("digests", &digests)?;
        report("both", &both)?;
    }
    Ok(())
}

/// The bytes that a step read, and the experts that it loaded.
type Step = Result<(u64, Option<ExpertStore>), Box<dyn Error>>;

/// Runs a step, which returns the bytes that it read, and prints its row. The time does not include the end of the
/// mappings: a server keeps them.
fn report(round: usize, step: &str, run: &dyn Fn() -> Step) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let (bytes, store) = run()?;
    println!("{round},{step},{:.4},{bytes}", start.elapsed().as_secs_f64());
    drop(store);
    Ok(())
}

/// Drops the weight files from the page cache. Another process that maps them keeps them there.
fn drop_from_cache(dir: &Path) -> Result<(), Box<dyn Error>> {
    for file in Checkpoint::open(dir)?.files() {
        let file = std::fs::File::open(file.path())?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Reads all weight files with `threads` processes.
fn cat(dir: &Path, threads: usize) -> Step {
    let open = Checkpoint::open(dir)?;
    let mut files: Vec<&TensorFile> = open.files().collect();
    files.sort_by_key(|file| std::cmp::Reverse(file.len_bytes()));
    let mut shares = vec![(0u64, Vec::new()); threads];
    for file in files {
        if let Some(share) = shares.iter_mut().min_by_key(|(bytes, _)| *bytes) {
            share.0 += file.len_bytes();
            share.1.push(file.path());
        }
    }
    let running: Vec<_> = shares
        .iter()
        .filter(|(_, files)| !files.is_empty())
        .map(|(_, files)| Command::new("cat").args(files).stdout(Stdio::null()).spawn())
        .collect::<Result<_, _>>()?;
    for mut process in running {
        if !process.wait()?.success() {
            return Err("cat failed".into());
        }
    }
    Ok((open.len_bytes(), None))
}

fn load(dir: &Path, threads: usize) -> Step {
    load_all(Arc::new(Checkpoint::open(dir)?), threads)
}

fn load_all(open: Arc<Checkpoint>, threads: usize) -> Step {
    let config = open.config();
    let all: BTreeMap<u32, Vec<u32>> = config
        .moe_layers()
        .into_iter()
        .map(|layer| (layer, (0..config.num_experts).collect()))
        .collect();
    let store = ExpertStore::load(open, &all, Residency::Mapped, threads, &mut |_| {})?;
    Ok((store.size_bytes(), Some(store)))
}

fn digests(dir: &Path, threads: usize) -> Step {
    let open = Checkpoint::open(dir)?;
    let digests = open.digests(Coverage::Sampled, threads, &mut |_, _| {})?;
    Ok((digests.tensors().len() as u64, None))
}

struct Args {
    dir: PathBuf,
    make: Option<(String, u32)>,
    threads: usize,
    rounds: usize,
    cold: bool,
}

impl Args {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut args = std::env::args().skip(1);
        let dir = args.next().ok_or("the first argument is the checkpoint's folder")?.into();
        let mut parsed = Self { dir, make: None, threads, rounds: 7, cold: false };
        while let Some(option) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{option} needs a value"));
            match option.as_str() {
                "--make" => parsed.make = Some((value()?, value()?.parse()?)),
                "--threads" => parsed.threads = value()?.parse::<usize>()?.max(1),
                "--cold" => parsed.cold = true,
                "--rounds" => parsed.rounds = value()?.parse()?,
                _ => return Err(format!("unknown option {option}").into()),
            }
        }
        Ok(parsed)
    }
}
