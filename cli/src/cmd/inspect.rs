//! `switchyard inspect`: describes a checkpoint from its headers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use checkpoint::{Checkpoint, Coverage, ExpertSummary, GgufSummary, ReorderedSummary, TensorFile};
use expert_server::{gpu_lacks, gpu_needs, gpu_reads};
use serde::Serialize;

use crate::{Global, ui};

/// Options of `inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder, or a .safetensors or .gguf file.
    path: PathBuf,
    /// Read the experts' weights, too. sampled: prints the fingerprint that peers compare. It covers at least 64 KiB
    /// of every matrix. full: prints a digest of all bytes, to compare the files of two hosts.
    #[arg(long, env = "SWITCHYARD_VERIFY", value_name = "sampled|full")]
    verify: Option<Verify>,
    /// Number of servers among which the experts are divided, for the memory of each.
    #[arg(long, env = "SWITCHYARD_SERVERS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    servers: u32,
    /// Measure this host's memory bandwidth (half a second) and estimate the time of a layer.
    #[arg(long, env = "SWITCHYARD_MEASURE", value_parser = clap::builder::FalseyValueParser::new())]
    measure: bool,
}

/// The bytes that a digest covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Verify {
    /// At least 64 KiB of every matrix.
    Sampled,
    /// All bytes of routed experts.
    Full,
}

impl Verify {
    pub const fn coverage(self) -> Coverage {
        match self {
            Self::Sampled => Coverage::Sampled,
            Self::Full => Coverage::Full,
        }
    }
}

/// The description of a folder.
#[derive(Debug, Serialize)]
struct Report {
    path: PathBuf,
    family: &'static str,
    model_type: &'static str,
    num_layers: u32,
    moe_layers: Vec<u32>,
    experts_per_layer: u32,
    experts_per_token: usize,
    hidden: usize,
    model_hidden: usize,
    width: usize,
    shared_width: usize,
    activation: String,
    weighting: String,
    quantization: Option<String>,
    formats: BTreeMap<String, u64>,
    file_bytes: u64,
    files: usize,
    expert_bytes: u64,
    all_experts_bytes: u64,
    servers: u32,
    bytes_per_server: u64,
    cpu: Verdict,
    gpu: Verdict,
    gpu_bytes_per_server: Option<u64>,
    bandwidth_gb_per_s: Option<f64>,
    layer_us_per_token: Option<f64>,
    fingerprint: Option<String>,
    full_digest: Option<String>,
    ignored_keys: Vec<String>,
    router: Option<String>,
    warnings: Vec<String>,
}

/// The answer whether a kind of device can serve the experts.
#[derive(Debug, Serialize)]
struct Verdict {
    servable: bool,
    /// The reason against, or a remark.
    note: Option<String>,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    if args.path.is_file() {
        return inspect_file(global, &args.path);
    }
    let checkpoint = Checkpoint::open(&args.path)?;
    let experts = checkpoint.summarise_experts();
    let servable = experts.is_ok();
    let report = report(&args, global.json, &checkpoint, experts)?;
    if global.json {
        ui::print_json(&report)?;
    } else {
        print(&report);
    }
    Ok(if servable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn report(
    args: &Args,
    json: bool,
    checkpoint: &Checkpoint,
    experts: Result<ExpertSummary, checkpoint::TensorError>,
) -> Result<Report> {
    let config = checkpoint.config();
    let (cpu, summary) = match experts {
        Ok(summary) => (Verdict { servable: true, note: reordered_note(&summary) }, Some(summary)),
        Err(error) => (Verdict { servable: false, note: Some(error.to_string()) }, None),
    };
    let (gpu, gpu_bytes) = gpu(checkpoint, summary.as_ref());
    let servers = u64::from(args.servers);
    let largest = summary.as_ref().map_or(0, |s| s.largest_expert_bytes);
    let total = summary.as_ref().map_or(0, |s| s.computing_bytes);
    // Whole experts go to servers, layer by layer.
    let per_layer = u64::from(config.num_experts).div_ceil(servers);
    let shares = |all: u64| match summary.as_ref().map_or(0, |s| s.num_experts) {
        0 => 0,
        num => all / num * per_layer * config.moe_layers().len() as u64,
    };
    let bandwidth = args.measure.then(read_bandwidth);
    let layer_us =
        bandwidth.map(|bytes_per_s| config.top_k as f64 * largest as f64 / bytes_per_s * 1e6);
    let digest = |coverage| {
        let bar = ui::spinner(json, "reading the experts' weights");
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let digests = checkpoint.digests(coverage, threads, &mut |_, _| {})?;
        bar.finish_and_clear();
        Ok::<_, checkpoint::TensorError>(digests.fingerprint().to_string())
    };
    let wanted = args.verify.filter(|_| summary.is_some());
    let found = wanted.map(|verify| digest(verify.coverage())).transpose()?;
    let (fingerprint, full_digest) = match wanted {
        Some(Verify::Full) => (None, found),
        _ => (found, None),
    };
    Ok(Report {
        path: args.path.clone(),
        family: config.family.class_name(),
        model_type: config.family.model_type,
        num_layers: config.num_layers,
        moe_layers: config.moe_layers(),
        experts_per_layer: config.num_experts,
        experts_per_token: config.top_k,
        hidden: config.hidden,
        model_hidden: config.model_hidden,
        width: config.moe_intermediate,
        shared_width: config.shared_width,
        activation: config.arithmetic.activation.to_string(),
        weighting: format!("{:?}", config.arithmetic.weighting).to_lowercase(),
        quantization: config.quantization.as_ref().map(ToString::to_string),
        formats: summary.as_ref().map(|s| s.formats.clone()).unwrap_or_default(),
        file_bytes: checkpoint.len_bytes(),
        files: checkpoint.num_shards(),
        expert_bytes: largest,
        all_experts_bytes: total,
        servers: args.servers,
        bytes_per_server: shares(total),
        cpu,
        gpu,
        gpu_bytes_per_server: gpu_bytes.map(shares),
        bandwidth_gb_per_s: bandwidth.map(|bytes_per_s| bytes_per_s / 1e9),
        layer_us_per_token: layer_us,
        fingerprint,
        full_digest,
        ignored_keys: config.ignored_keys.clone(),
        router: config.router().err().map(|error| error.to_string()),
        warnings: checkpoint.warnings().to_vec(),
    })
}

/// Says that matrices are held dequantised, and the memory that this costs.
fn reordered_note(summary: &ExpertSummary) -> Option<String> {
    let ReorderedSummary { matrices, stored_bytes, computing_bytes } = summary.reordered;
    (matrices > 0).then(|| {
        format!(
            "{matrices} matrices have columns reordered by activation (desc_act, actorder) and are dequantised at \
             load: {} in memory for {} in the files",
            size(computing_bytes),
            size(stored_bytes)
        )
    })
}

/// The verdict on GPUs, and the bytes of all experts there.
fn gpu(checkpoint: &Checkpoint, summary: Option<&ExpertSummary>) -> (Verdict, Option<u64>) {
    let Some(summary) = summary else {
        let note = Some("the experts cannot be loaded".to_owned());
        return (Verdict { servable: false, note }, None);
    };
    let config = checkpoint.config();
    if let Some(what) = gpu_lacks(config.arithmetic, summary.has_biases) {
        let note = Some(format!("the GPU kernels have no {what}"));
        return (Verdict { servable: false, note }, None);
    }
    if let Some(what) = gpu_needs(config) {
        let note = Some(format!("the GPU kernels need {what}"));
        return (Verdict { servable: false, note }, None);
    }
    let first = config.moe_layers().first().and_then(|layer| checkpoint.expert(*layer, 0).ok());
    let is_read = first.is_some_and(|expert| expert.matrices().all(|m| gpu_reads(m.format())));
    if is_read && summary.formats.len() == 1 {
        return (Verdict { servable: true, note: None }, Some(summary.computing_bytes));
    }
    let note = Some("widened to bf16 in GPU memory at load".to_owned());
    (Verdict { servable: true, note }, Some(summary.bf16_bytes))
}

fn print(report: &Report) {
    let layers = report.moe_layers.len();
    outln!("{}", report.path.display());
    outln!("  family      {} ({})", report.family, report.model_type);
    outln!(
        "  layers      {} of {} have experts: {} each, {} for a token",
        layers,
        report.num_layers,
        report.experts_per_layer,
        report.experts_per_token
    );
    outln!(
        "  expert      hidden {}{} · width {} · {}{}{}",
        report.hidden,
        if report.model_hidden == report.hidden {
            String::new()
        } else {
            format!(" (latent; the engine projects hidden states of {})", report.model_hidden)
        },
        report.width,
        report.activation,
        if report.weighting == "input" { " · factors on the input" } else { "" },
        if report.shared_width > 0 {
            format!(" · shared experts of width {}", report.shared_width)
        } else {
            String::new()
        }
    );
    let formats: Vec<String> =
        report.formats.iter().map(|(format, num)| format!("{format} ({num} matrices)")).collect();
    outln!(
        "  format      {}{}",
        if formats.is_empty() { "unknown".to_owned() } else { formats.join(", ") },
        report.quantization.as_ref().map(|q| format!(" · {q}")).unwrap_or_default()
    );
    outln!("  files       {} in {} file(s)", size(report.file_bytes), report.files);
    outln!(
        "  memory      {} an expert · {} all · {} a server with {} server(s)",
        size(report.expert_bytes),
        size(report.all_experts_bytes),
        size(report.bytes_per_server),
        report.servers
    );
    for (name, verdict) in [("CPU", &report.cpu), ("GPU", &report.gpu)] {
        let note = verdict.note.as_deref().map(|note| format!(": {note}")).unwrap_or_default();
        outln!("  on a {name}    {}{note}", if verdict.servable { "yes" } else { "no" });
    }
    if let Some(bytes) = report.gpu_bytes_per_server {
        outln!("  GPU memory  {} a server", size(bytes));
    }
    if let (Some(bandwidth), Some(us)) = (report.bandwidth_gb_per_s, report.layer_us_per_token) {
        outln!(
            "  a layer     at least {us:.0} us for one token at this host's {bandwidth:.1} GB/s"
        );
    }
    if let Some(router) = &report.router {
        outln!("  router      {router}");
    }
    if let Some(fingerprint) = &report.fingerprint {
        outln!("  fingerprint {fingerprint}");
    }
    if let Some(digest) = &report.full_digest {
        outln!("  all bytes   {digest}");
    }
    if !report.ignored_keys.is_empty() {
        outln!("  keys that the experts do not need: {}", report.ignored_keys.join(", "));
    }
    for warning in &report.warnings {
        outln!("  warning: {warning}");
    }
}

/// Describes a single file. Only folders can be served.
fn inspect_file(global: &Global, path: &Path) -> Result<ExitCode> {
    let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if is_gguf {
        let gguf = GgufSummary::read(path)?;
        let remedy = "experts are served from safetensors: take the model's original checkpoint, or convert with \
                      transformers (`from_pretrained(DIR, gguf_file=FILE)`, then `save_pretrained`)";
        if global.json {
            ui::print_json(&serde_json::json!({
                "path": path, "kind": "gguf", "architecture": gguf.architecture, "name": gguf.name,
                "num_layers": gguf.num_layers, "experts_per_layer": gguf.num_experts,
                "experts_per_token": gguf.top_k, "tensor_types": gguf.tensor_types,
                "file_bytes": gguf.len_bytes, "servable": false, "remedy": remedy,
            }))?;
        } else {
            let number = |n: Option<u64>| n.map_or_else(|| "?".to_owned(), |n| n.to_string());
            outln!("{}: GGUF", path.display());
            outln!("  architecture {}", gguf.architecture.as_deref().unwrap_or("unknown"));
            outln!("  name         {}", gguf.name.as_deref().unwrap_or("unknown"));
            outln!(
                "  layers       {} · {} experts, {} for a token",
                number(gguf.num_layers),
                number(gguf.num_experts),
                number(gguf.top_k)
            );
            let types: Vec<String> =
                gguf.tensor_types.iter().map(|(name, num)| format!("{name} ({num})")).collect();
            outln!("  tensors      {}", types.join(", "));
            outln!("  size         {}", size(gguf.len_bytes));
            outln!("  servable     no: {remedy}");
        }
        return Ok(ExitCode::FAILURE);
    }
    let file = TensorFile::open(path)?;
    let mut types: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for name in file.names() {
        let tensor = file.tensor(name)?;
        let entry = types.entry(tensor.dtype.name()).or_default();
        entry.0 += 1;
        entry.1 += tensor.data.len() as u64;
    }
    let remedy = "give the folder with config.json to see whether it can be served";
    if global.json {
        let types: BTreeMap<_, _> = types
            .iter()
            .map(|(name, (num, bytes))| (name, serde_json::json!({"tensors": num, "bytes": bytes})))
            .collect();
        ui::print_json(&serde_json::json!({
            "path": path, "kind": "safetensors", "dtypes": types, "file_bytes": file.len_bytes(),
            "remedy": remedy,
        }))?;
    } else {
        outln!("{}: safetensors, {}", path.display(), size(file.len_bytes()));
        for (name, (num, bytes)) in types {
            outln!("  {name:8} {num} tensors, {}", size(bytes));
        }
        outln!("  {remedy}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes per second that all processors read together from memory.
fn read_bandwidth() -> f64 {
    const BYTES: usize = 256 << 20;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(64);
    let memory = vec![1u64; BYTES / size_of::<u64>()];
    let read = |part: &[u64]| std::hint::black_box(part.iter().fold(0u64, |sum, v| sum ^ v));
    let mut best = f64::MAX;
    for _ in 0..4 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in memory.chunks(memory.len().div_ceil(threads)) {
                scope.spawn(move || read(part));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    BYTES as f64 / best
}

fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.2} MB", b / 1e6),
        b => format!("{:.1} KB", b / 1e3),
    }
}
